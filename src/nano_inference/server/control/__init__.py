"""Operations of trainers on the engine, for all dialects: updates, pauses, memory, adapters.

Begin with: control.py, then updates.py.
Tests: tests/server/trainers.
"""
