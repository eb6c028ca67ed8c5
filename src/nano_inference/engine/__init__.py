"""The public engine: intake, threads and lifecycle, delivery, weight updates, adapters, scoring.

Imports only from: everything above: core, device, drafts, ranks, text.
Begin with: engine.py, then shared_loop.py.
Tests: tests/engine.
"""
