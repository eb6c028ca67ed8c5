"""GGUF files, read from the mapped file.

Imports: models, ops. Begin with file.py.
"""
