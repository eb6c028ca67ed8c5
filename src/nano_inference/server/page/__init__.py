"""The page at `/` and the documentation at `/docs`.

Imports only from: server.
Begin with: routes.py.
Tests: tests/server/page.
"""
