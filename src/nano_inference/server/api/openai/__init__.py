"""OpenAI: chat completions, completions, responses, embeddings.

Begin with: chat.py.
Tests: tests/server/api/openai.
"""
