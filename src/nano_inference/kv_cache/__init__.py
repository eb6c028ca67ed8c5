"""Which block holds what: reference counts, the free list, and the index of prefixes. No tensors
here.
"""
