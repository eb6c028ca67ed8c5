"""The static description of a model: everything the decoder needs except weights.

Imports: errors, fields; no torch. Begin with model.py.
"""
