"""Ollama's chats and completions, as its clients on laptops send them.

Begin with: request.py.
Tests: tests/server/api/ollama.
"""
