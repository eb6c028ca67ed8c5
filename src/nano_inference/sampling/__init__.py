"""From logits to tokens: columns, noise, filters, the draw, logprobs. Rows are independent.

Imports only from: structured.
Begin with: sample.py, then pipeline.py.
Tests: tests/sampling.
"""
