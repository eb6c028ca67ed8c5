"""Where state lives: the loop, the runner, the KV tensors, the weights, and the engine that owns
them.
"""
