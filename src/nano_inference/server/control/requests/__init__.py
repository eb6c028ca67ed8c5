"""The control routes and the fields of their requests, a table for each dialect.

Begin with: field_types.py, then vllm.py.
Tests: tests/server/trainers.
"""
