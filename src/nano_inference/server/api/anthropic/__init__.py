"""Anthropic: messages.

Imports: server/api/shared. Begin with messages.py.
"""
