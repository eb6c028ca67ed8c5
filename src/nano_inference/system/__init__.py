"""The operating system: processes, files, the processor, progress lines.

Imports: errors. Begin with machine.py: what this machine has.
"""
