"""The control routes and the fields of their requests, a table for each dialect.

Begin with: fields.py, then vllm.py.
Tests: tests/server/trainers.
"""
