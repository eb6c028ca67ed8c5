"""Bookkeeping of the KV cache: block tables, prefix lookup, sliding windows. No tensors.

Imports only from the base modules.
Begin with: manager.py, then block_pool.py.
Tests: tests/kv_cache.
"""
