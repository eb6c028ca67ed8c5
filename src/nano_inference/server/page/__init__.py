"""The page at `/` and the documentation at `/docs`.

Begin with: routes.py.
Tests: tests/server/page.
"""
