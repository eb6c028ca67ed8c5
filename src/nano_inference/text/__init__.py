"""Text on both sides of the engine: tokenizer, chat templates, text of a sample, stop strings.

Imports only from: checkpoints.
Begin with: tokenizer.py, then detokenizer.py.
Tests: tests/text.
"""
