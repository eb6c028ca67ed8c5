"""One engine in another process: messages, operations, the process and its client.

Imports: engine. Begin with client.py on the side of the API, core.py on the side of the engine.
"""
