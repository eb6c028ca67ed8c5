"""How a model is divided among ranks.

Imports: models/spec, ops, parallel. Begin with shard.py.
"""
