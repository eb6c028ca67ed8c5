"""What a trainer may do to the engine, in any dialect: updates, pauses, memory, adapters.

Imports only from: server/config, server/errors, fleet, remote.
Begin with: control.py, then updates.py.
Tests: tests/server/trainers.
"""
