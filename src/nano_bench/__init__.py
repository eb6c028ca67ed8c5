"""Load on servers with OpenAI's routes: what `nano-inference bench` and the benchmarks send, and
what they see. No torch.
"""
