"""vLLM's dialect: `/inference/v1/generate` and its control routes.

Begin with: request.py, then routes.py.
Tests: tests/server/trainers.
"""
