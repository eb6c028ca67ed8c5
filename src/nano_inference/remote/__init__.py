"""One engine in another process: messages, operations, the process and its client.

Imports only from: engine.
Begin with: client.py (the side of the API), then core.py (the side of the engine).
Tests: tests/remote.
"""
