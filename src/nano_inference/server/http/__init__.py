"""The edge of the server: connections, limits, keys, admission, replies, metrics, tracing.

Imports only from: remote.
Begin with: layers.py.
Tests: tests/server/http.
"""
