"""Shared by the protocols: bodies, prompts, grammars, choices, answers.

Begin with: fields.py, then asks.py.
Tests: tests/server.
"""
