"""Control routes in the dialects of trainers: SGLang, vLLM, prime-rl, PipelineRL.

Begin with: shared.py, then sglang/routes.py.
Tests: tests/server/trainers.
"""
