"""The control routes and the fields of their requests, a table for each dialect.

Imports only from: server/control/engine, server/errors, remote, fields.
Begin with: fields.py, then vllm.py.
Tests: tests/server/trainers.
"""
