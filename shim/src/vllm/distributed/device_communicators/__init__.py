"""Broadcasts between a trainer and its servers."""
