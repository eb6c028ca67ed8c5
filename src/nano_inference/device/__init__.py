"""Execution on one device: model runner, KV tensors, CUDA graphs, sleep, memory plan.

Imports only from: checkpoints, core, kv_cache, models, ops, parallel, sampling, weights.
Begin with: runner.py; on CUDA cuda_runner.py.
Tests: tests/device.
"""
