"""vLLM's dialect: `/inference/v1/generate` and its control routes.

Imports only from: server/api/shared, server/trainers.
Begin with: generate.py, then routes.py.
Tests: tests/server/trainers.
"""
