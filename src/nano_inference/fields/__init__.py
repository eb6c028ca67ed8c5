"""Declared and checked fields of dataclasses: options of commands and configurations.

Imports: errors. Begin with option.py.
"""
