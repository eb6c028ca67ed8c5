"""Published figures for the same workload (Qwen3-0.6B, 133,966 output tokens), not measured
here.
"""

from typing import NamedTuple


class Published(NamedTuple):
    """One figure and its source."""

    engine: str
    card: str
    tokens_per_s: float
    source: str


PUBLISHED = (
    Published("vLLM", "RTX 4070 Laptop", 1361.84, "github.com/GeeeekExplorer/nano-vllm README"),
    Published(
        "nano-vllm", "RTX 4070 Laptop", 1434.13, "github.com/GeeeekExplorer/nano-vllm README"
    ),
    Published(
        "vLLM 0.10.2", "A800-SXM4-80GB", 8587.95, "github.com/cosmoliu2002/nano-vllm-triton issue 1"
    ),
    Published(
        "nano-vllm-triton",
        "A800-SXM4-80GB",
        10009.26,
        "github.com/cosmoliu2002/nano-vllm-triton issue 1",
    ),
    Published(
        "vLLM 0.21.0", "A100 80GB PCIe", 9530.43, "github.com/GeeeekExplorer/nano-vllm issue 245"
    ),
)
