"""Structured output: grammars, and the tokens that they allow next. No torch.

Imports only from: errors, system, fields.
Begin with: grammar.py, then backend.py.
Tests: tests/structured.
"""
