"""Files of models: folders, safetensors, quantised formats, GGUF, adapters.

Imports only from: models, ops.
Begin with: loading.py.
Tests: tests/checkpoints.
"""
