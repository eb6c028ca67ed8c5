"""Drafts: guesses of the next tokens, which save time and change no token and no bit.

Imports only from: checkpoints, core, device, kv_cache, models, ops, sampling, structured.
Begin with: drafter.py, then suffix.py (by text) or model.py (by a model).
Tests: tests/drafts.
"""
