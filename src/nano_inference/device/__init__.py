"""A device at work: runner, memory of keys and values, graphs, sleep, memory plan.

Imports: core, models, ops, weights. Begin with runner.py.
"""
