"""Reader of GGUF files, which are memory-mapped.

Begin with: file.py.
Tests: tests/checkpoints (test_gguf*.py).
"""
