"""SGLang's dialect: `/generate` and its control routes.

Begin with: models.py, then request.py; weights.py for updates.
Tests: tests/server/trainers.
"""
