"""The static description of a model: everything the decoder needs except weights. No torch.

Imports only from: errors, fields.
Begin with: model.py.
Tests: tests/models/test_spec.py.
"""
