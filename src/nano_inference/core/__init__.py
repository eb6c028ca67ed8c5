"""A step of the engine: decide, then apply. No threads, sockets or files.

Imports only from: kv_cache, sampling, structured.
Begin with: loop.py (`EngineLoop.step`), then schedule.py and apply.py.
Tests: tests/core, tests/simulation.
"""
