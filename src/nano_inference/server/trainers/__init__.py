"""Control routes in the words of trainers: SGLang, vLLM, PRIME-RL, PipelineRL.

Begin with: shared.py, then sglang/routes.py.
Tests: tests/server/trainers.
"""
