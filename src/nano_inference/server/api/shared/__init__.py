"""Shared by the protocols: bodies, prompts, grammars, choices, answers.

Imports only from: remote, text, structured.
Begin with: fields.py, then asks.py.
Tests: tests/server.
"""
