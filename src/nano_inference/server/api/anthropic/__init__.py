"""Anthropic: messages.

Begin with: messages.py.
Tests: tests/server/api/anthropic.
"""
