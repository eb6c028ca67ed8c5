"""The operations of a model. A backend is one set of them, chosen when an engine is built.

Imports only from: core, parallel, sampling.
Begin with: the interface, then reference (the specification).
Tests: tests/ops.
"""
