"""How a model is divided among ranks.

Imports only from: models/spec, ops, parallel.
Begin with: shard.py.
Tests: tests/parallel.
"""
