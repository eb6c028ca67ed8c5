"""The operations of a model, implemented by three backends: reference, cpu and cuda.

Imports only from: core, parallel, sampling.
Begin with: the interface, then reference (the specification).
Tests: tests/ops.
"""
