"""Guesses of the next tokens. They change no token and no bit; they only save time.

Imports only from: checkpoints, core, device, kv_cache, models, ops, sampling, structured.
Begin with: drafter.py, then suffix.py (by text) or model.py (by a model).
Tests: tests/drafts.
"""
