"""Shared by the protocols: bodies, prompts, grammars, choices, answers.

Imports only from: remote, text, structured.
Begin with: fields.py, then generation.py.
Tests: tests/server.
"""
