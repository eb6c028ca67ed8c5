"""The protocols of OpenAI and Anthropic.

Imports only from: server/http, remote, text.
Begin with: shared/fields.py.
Tests: tests/server/api.
"""
