"""Anthropic's Messages API.

Begin with: request.py.
Tests: tests/server/api/anthropic.
"""
