"""Operations of trainers on the engine, in any dialect: updates, pauses, memory, adapters.

Begin with: control.py, then updates.py.
Tests: tests/server/trainers.
"""
