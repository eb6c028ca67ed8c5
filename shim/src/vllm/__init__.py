"""Modules of vLLM that TRL imports, for trainers of a nano-inference server.

Begin with: distributed/weight_transfer/nccl_common.py, then distributed/utils.py.
Tests: tests/shim.
"""

from vllm.absent import Absent

__version__ = "0.31.0"  # a version of vLLM whose protocol this package speaks, and TRL accepts


class LLM(Absent):
    """vLLM's engine, which this package does not have."""


class SamplingParams(Absent):
    """vLLM's parameters, which this package does not have."""


class RequestOutput(Absent):
    """vLLM's outputs, which this package does not have."""
