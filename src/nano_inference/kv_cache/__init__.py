"""The cache as a bookkeeper: reference counts, the free list, the index of prefixes, sliding
windows, kept blocks. No tensors.

Imports only from the base modules.
Begin with: manager.py, then block_pool.py.
Tests: tests/kv_cache.
"""
