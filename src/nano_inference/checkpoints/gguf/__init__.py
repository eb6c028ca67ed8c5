"""GGUF files, read from the mapped file.

Begin with: file.py.
Tests: tests/checkpoints (test_gguf*.py).
"""
