"""Fleets that are too large to have: the real router over simulated replicas, weights to a
thousand, and arithmetic.
"""
