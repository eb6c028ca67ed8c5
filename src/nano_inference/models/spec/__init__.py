"""The static description of a model: everything the decoder needs except weights. No torch.

Begin with: model.py, then families.py (a row a family) and read.py.
Tests: tests/models/test_spec.py.
"""
