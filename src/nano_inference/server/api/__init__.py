"""The HTTP protocols of OpenAI, Anthropic and Ollama.

Begin with: shared/fields.py.
Tests: tests/server/api.
"""
