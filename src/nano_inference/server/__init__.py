"""The HTTP server. It needs the extra `server`.

Imports only from: fleet, remote, text.
Begin with: app.py, then server.py.
Tests: tests/server.
"""
