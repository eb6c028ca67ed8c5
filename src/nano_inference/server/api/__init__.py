"""The HTTP protocols of OpenAI and Anthropic.

Begin with: shared/fields.py.
Tests: tests/server/api.
"""
