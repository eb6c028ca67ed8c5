"""Anthropic: messages.

Begin with: request.py.
Tests: tests/server/api/anthropic.
"""
