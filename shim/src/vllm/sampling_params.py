"""Names of `vllm.sampling_params` that TRL imports."""

from vllm.absent import Absent


class StructuredOutputsParams(Absent):
    """vLLM's grammars, which this package does not have."""
