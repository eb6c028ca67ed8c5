"""Weights that change while an engine serves them: updates, their sources, their transports.

Imports only from: checkpoints, models.
Begin with: update.py (one update), then sync.py (their order and versions).
Tests: tests/weights.
"""
