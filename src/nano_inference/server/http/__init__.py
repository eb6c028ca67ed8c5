"""What all routes share: request ids, keys, limits, errors, event streams, the queue's limit,
metrics and logs.
"""
