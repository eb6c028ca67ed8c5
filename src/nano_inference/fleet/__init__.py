"""Several engines behind one client: which request goes where, and what becomes of it when its
engine dies.
"""
