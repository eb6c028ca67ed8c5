"""Anthropic: messages.

Imports only from: server/api/shared.
Begin with: messages.py.
Tests: tests/server/api/anthropic.
"""
