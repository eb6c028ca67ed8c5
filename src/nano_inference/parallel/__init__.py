"""Ranks as places in a mesh, and communication between them: process groups, segments, deadlines.

Imports only from: core, sampling.
Begin with: mesh.py, then process_group.py.
Tests: tests/parallel.
"""
