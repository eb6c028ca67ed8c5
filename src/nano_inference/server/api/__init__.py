"""The protocols of OpenAI and Anthropic.

Imports only from: server/http, remote, text.
Begin with: shared/requests.py.
Tests: tests/server/api.
"""
