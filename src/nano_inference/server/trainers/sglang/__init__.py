"""SGLang's dialect: `/generate` and its control routes.

Imports only from: server/api/shared, server/trainers.
Begin with: models.py, then generate.py; weights.py for updates.
Tests: tests/server/trainers.
"""
