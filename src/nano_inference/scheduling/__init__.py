"""Decisions: which sequence computes how many tokens in the next step. Torch may not be imported
here.
"""
