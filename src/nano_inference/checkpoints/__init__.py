"""Files of models: folders, safetensors, quantised formats, GGUF, adapters.

Imports: models, ops. Begin with loading.py.
"""
