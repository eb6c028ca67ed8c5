"""Declared and checked fields of dataclasses: options of commands and configurations.

Imports only from: errors.
Begin with: option.py.
Tests: tests/test_config.py.
"""
