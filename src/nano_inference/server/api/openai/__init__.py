"""OpenAI's APIs: chat completions, completions, responses, embeddings.

Begin with: chat_request.py.
Tests: tests/server/api/openai.
"""
