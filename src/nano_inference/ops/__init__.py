"""The operations that a model is made of. A backend is one set of them, chosen once and passed
down.
"""
