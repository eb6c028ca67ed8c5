"""SGLang's dialect: `/generate` and its control routes.

Begin with: models.py, then generate.py; weights.py for updates.
Tests: tests/server/trainers.
"""
