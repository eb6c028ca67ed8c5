"""Load generator for servers with OpenAI's routes, for `nano-inference bench` and the benchmarks.
Does not import torch.
"""
