"""A step of the engine: decide, then apply. No threads, sockets or files.

Imports: types, config, kv_cache, sampling. Begin with loop.py, then schedule.py and apply.py.
"""
