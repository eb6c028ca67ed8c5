"""Control routes and the fields of their requests, in one table per dialect.

Begin with: field_types.py, then vllm.py.
Tests: tests/server/trainers.
"""
