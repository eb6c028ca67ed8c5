"""`Ops`: one signature for each operation, and what a backend promises about its bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nano_inference.batch import ForwardBatch
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import SamplingBatch


class KvcacheView(Protocol):
    """The KV tensors together with the block tables of one batch: what attention reads and writes."""

    block_size: int

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, num_kv_heads, head_dim] at slots [N]."""
        ...

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [...], float32, each [num_kv_heads, ..., head_dim]."""
        ...

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer in their own dtype, not copied, each [num_kv_heads, slots, head_dim]."""
        ...


class Norm(NamedTuple):
    """One RMS norm: x / rms(x) * (offset + weight), rounded to dtype once, at the end."""

    weight: Tensor  # [width]
    eps: float
    offset: float
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ops:
    """A backend. N rows; weights are [out, in]; the residual stream is float32, products have the weights' dtype.

    Attributes:
        name: of the backend; part of the numerics fingerprint.
        version: counted up whenever any bit of its results may change.
        schedule_invariant: whether a row's bits depend only on the weights and on the tokens before it.
        embed: (input_ids [N], weight [V, H]) -> residual [N, H].
        linear: (x [N, in], weight, bias [out] or None) -> [N, out].
        rms_norm: (x [N, H] to be added or None, residual [N, H], norm) -> (normed [N, H], residual).
        rope_and_store: (qkv [N, (heads + 2 kv heads) * D], cos, sin [positions, D / 2], positions [N], view, layer,
            slot_mapping [N], heads, kv heads, norms of q and of k or None) -> q [N, heads, D] rotated; k and v are
            written to their slots. A norm of D weights is of each head, a wider one of all heads of a row.
        plan_attention: (batch, block_size, window) -> whatever `attention` wants to know; once a step for
            each window that the model has (0: none). A row at position p sees the keys above p - window.
        attention: (q [N, heads, D], view, layer, plan, scale) -> [N, heads * D].
        gate: (gate and up [N, 2 * inner], activation) -> activation(gate) * up [N, inner].
        logits: (hidden [L, H], weight [V, H]) -> float32 [L, V].
        sample: (logits [L, V], batch) -> `Draw`.
        gather_logprobs: (logits [L, V], token_ids [L]) -> float32 [L].
    """

    name: str
    version: int
    schedule_invariant: bool
    embed: Callable[[Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor | None, Tensor, Norm], tuple[Tensor, Tensor]]
    rope_and_store: Callable[
        [Tensor, Tensor, Tensor, Tensor, KvcacheView, int, Tensor, int, int, tuple[Norm, Norm] | None], Tensor
    ]
    plan_attention: Callable[[ForwardBatch, int, int], Any]
    attention: Callable[[Tensor, KvcacheView, int, Any, float], Tensor]
    gate: Callable[[Tensor, str], Tensor]
    logits: Callable[[Tensor, Tensor], Tensor]
    sample: Callable[[Tensor, SamplingBatch], Draw]
    gather_logprobs: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Numerics:
    """What decides the bits of this engine. Two engines with the same fingerprint agree to the bit.

    Attributes:
        backend, version: of the operations.
        dtype: of weights, activations and KV cache.
        device: kind of device; torch's own products decide the bits on each.
        torch: version of torch, whose products the reference backend is made of.
        schedule_invariant: whether results are independent of batching, chunking, caching and preemption.
    """

    backend: str
    version: int
    dtype: str
    device: str
    torch: str
    schedule_invariant: bool

    @property
    def fingerprint(self) -> str:
        """One line that every sample carries."""
        return f"{self.backend}-{self.version}/{self.dtype}/{self.device}/torch-{self.torch}"
