"""`Absent`: base of the classes that may be imported but not made."""

from typing import Any


class Absent:
    """Class of vLLM that this package does not have. Making one raises `ImportError`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(
            f"{type(self).__name__} needs vLLM itself, but nano-inference-vllm-shim is installed; "
            'use vllm_mode="server", with `nano-inference serve MODEL --rl`.'
        )
