"""The HTTP dialects by which RL trainers reach an engine: thin adapters over `server/control.py`,
on with `--rl`.

`vllm` and `sglang` are the two that the field speaks; `prime_rl` and `pipeline_rl` are aliases for
their trainers.
"""
