"""The backward pass by kernels: each block's forward and gradient as explicit functions.

Imports only from: models, ops.
Begin with: decoder.py (a micro-batch), layer.py (a layer).
Tests: tests/rl/backward.
"""
