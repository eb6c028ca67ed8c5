"""From logits to tokens: columns, noise, filters, the draw, logprobs. Each row is drawn by itself.

Imports only from: structured.
Begin with: sample.py, then pipeline.py.
Tests: tests/sampling.
"""
