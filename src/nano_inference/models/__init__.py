"""One decoder for all families: described by a `ModelSpec`, fed by a table of parameters.

Imports only from: ops, parallel, sampling.
Begin with: spec/model.py, then decoder.py.
Tests: tests/models.
"""
