"""Sessions: conversations that the server keeps as token ids, with forks (`/sessions`).

Begin with: store.py, then turn.py.
Tests: tests/server/sessions.
"""
