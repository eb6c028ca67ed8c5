"""The operating system: processes, files, the processor, progress lines, plain HTTP.

Imports only from: errors.
Begin with: machine.py (memory and cores).
Tests: tests/system.
"""
