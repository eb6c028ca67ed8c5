"""One decoder for all model families, described by a `ModelSpec` and a table of parameters.

Imports only from: ops, parallel, sampling.
Begin with: spec/model.py, then decoder.py.
Tests: tests/models.
"""
