"""How a model is divided among ranks.

Begin with: shard.py.
Tests: tests/parallel.
"""
