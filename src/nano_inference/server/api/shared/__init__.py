"""Code shared by the protocols: bodies, prompts, grammars, choices, answers.

Begin with: protocol.py, then generation.py.
Tests: tests/server.
"""
