"""The division of a model among ranks.

Begin with: shard.py.
Tests: tests/parallel.
"""
