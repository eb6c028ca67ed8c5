"""Sizes of the measurements: full size on a card, or small enough for an interpreter on a CPU."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.models import QWEN_CONFIG
from benchmarks.workloads import Request, Workload

QWEN3_8B = QWEN_CONFIG | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12_288,
    "tie_word_embeddings": False,
}
TINY = QWEN_CONFIG | {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Scale:
    """Sizes of all measurements.

    Attributes:
        device, dtype: Device and dtype of the engine and its peers.
        small, large: The config.json of the two models.
        shrink: Divisor of the workloads' lengths.
        requests: Limit on the requests of a workload.
        batches, large_batches: Numbers of sequences of the steady decodes.
        context: Tokens of each sequence before the timed steps.
        steps: Timed steps of a decode.
        repeats: Timed runs.
        copy_bytes: Bytes of the copy that measures bandwidth.
        matrix: Rows and columns of the product that measures arithmetic.
        options: Options of the engine.
        continuous: Options of transformers' continuous batching.
    """

    device: str
    dtype: str
    small: dict[str, Any]
    large: dict[str, Any]
    shrink: int
    requests: int
    batches: tuple[int, ...]
    large_batches: tuple[int, ...]
    context: int
    steps: int
    repeats: int
    copy_bytes: int
    matrix: int
    options: dict[str, Any]
    continuous: dict[str, Any]

    def fit(self, load: Workload) -> Workload:
        """Return a workload at this scale."""
        vocab = self.small["vocab_size"]

        def smaller(request: Request) -> Request:
            prompt = request.prompt[: max(1, len(request.prompt) // self.shrink)]
            ids = prompt if self.shrink == 1 else tuple(token % vocab for token in prompt)
            return Request(
                ids, max(1, request.max_tokens // self.shrink), min(request.n, self.requests)
            )

        return replace(
            load, requests=tuple(smaller(request) for request in load.requests[: self.requests])
        )


REAL = Scale(
    device="cuda",
    dtype="bfloat16",
    small=QWEN_CONFIG,
    large=QWEN3_8B,
    shrink=1,
    requests=1 << 30,
    batches=(1, 8, 64, 256),
    large_batches=(1, 64),
    context=512,
    steps=200,
    repeats=3,
    copy_bytes=4 << 30,
    matrix=8192,
    options={"max_model_len": 4352, "gpu_memory_utilization": 0.9},
    continuous={},
)
# Triton's interpreter takes a millisecond per element of a grid.
TOY = Scale(
    device="cpu",
    dtype="float32",
    small=TINY,
    large=TINY | {"num_hidden_layers": 2, "tie_word_embeddings": False},
    shrink=128,
    requests=2,
    batches=(1, 2),
    large_batches=(1,),
    context=5,
    steps=5,
    repeats=1,
    copy_bytes=1 << 16,
    matrix=32,
    options={"max_model_len": 128, "kv_cache_memory": 1 << 20, "max_batch_size": 4},
    continuous={"num_blocks": 8, "block_size": 32, "max_batch_tokens": 64, "use_cuda_graph": False},
)
