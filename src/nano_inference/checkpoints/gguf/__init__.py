"""GGUF files, read from the mapped file.

Imports only from: models, ops.
Begin with: file.py.
Tests: tests/checkpoints (test_gguf*.py).
"""
