"""OpenAI: chat completions, completions, responses, embeddings.

Imports only from: server/api/shared.
Begin with: chat.py.
Tests: tests/server/api/openai.
"""
