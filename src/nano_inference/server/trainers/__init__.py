"""Control routes in the words of trainers: SGLang, vLLM, PRIME-RL, PipelineRL.

Imports only from: server/api/shared, remote.
Begin with: shared.py, then sglang/routes.py.
Tests: tests/server/trainers.
"""
