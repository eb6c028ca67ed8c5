"""A device at work: runner, tensors of keys and values, graphs, sleep, memory plan.

Imports only from: checkpoints, core, kv_cache, models, ops, parallel, sampling, weights.
Begin with: runner.py; on CUDA cuda_runner.py.
Tests: tests/device.
"""
