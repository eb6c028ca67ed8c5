"""`Ops`: one signature for each operation, and what a backend promises about its bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nano_inference.batch import ForwardBatch
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import SamplingBatch

FEW_ROWS = 8  # what `Ops.few_rows` may be given at most


class KvcacheView(Protocol):
    """The KV tensors together with the block tables of one batch: what attention reads and writes."""

    block_size: int
    storage: Any  # whose view it is

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, num_kv_heads, head_dim] at slots [N]."""
        ...

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [...], float32, each [num_kv_heads, ..., head_dim]."""
        ...

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer in their own dtype, not copied, each [num_kv_heads, slots, head_dim]."""
        ...


class Weight(Protocol):
    """A matrix that a backend keeps in an order of its own."""

    dtype: torch.dtype
    device: torch.device

    def write(self, start: int, tensor: Tensor) -> None:
        """Rows [start, start + n) become `tensor` [n, in], in place."""
        ...

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """A copy of some rows."""
        ...

    def clone(self) -> "Weight":
        """A copy of its own."""
        ...


class Norm(NamedTuple):
    """One RMS norm: x / rms(x) * (offset + weight), rounded to dtype once, at the end. No weight: only rounded."""

    weight: Tensor | None  # [width]
    eps: float
    offset: float
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ops:
    """A backend. N rows; weights are [out, in]; the residual stream is float32, products read the weights' dtype.

    Attributes:
        name: of the backend; part of the numerics fingerprint.
        version: counted up whenever any bit of its results may change.
        schedule_invariant: whether a row's bits depend only on the weights and on the tokens before it.
        embed: (input_ids [N], weight [V, H], scale) -> scaled rows as the residual [N, H].
        linear: (x [N, in], weight, bias [out] or None) -> [N, out], in the weights' dtype or in float32.
        rms_norm: (x [N, H] to be added or None, residual [N, H], norm, scale) -> (normed [N, H], residual).
            scale * x is added, in float32.
        rope_and_store: (qkv [N, (heads + 2 kv heads) * D], cos, sin [positions, D / 2], positions [N], view, layer,
            slot_mapping [N], heads, kv heads, norms of q and of k or None) -> q [N, heads, D] rotated; k and v are
            written to their slots. A norm of D weights is of each head, a wider one of all heads of a row.
        plan_attention: (batch, block_size, window) -> whatever `attention` wants to know; once a step for
            each window that the model has (0: none). A row at position p sees the keys above p - window.
        attention: (q [N, heads, D], view, layer, plan, scale) -> [N, heads * D].
        gate: (gate and up [N, 2 * inner], activation) -> activation(gate) * up [N, inner].
        logits: (hidden [L, H], weight [V, H], divisor) -> hidden @ weight.T / divisor, float32 [L, V].
        sample: (hidden [L, H], weight, divisor, batch) -> `Draw` from these logits.
        sample_logits: (logits [L, V], batch) -> the same `Draw`, from logits that are there already.
        gather_logprobs: (hidden [L, H], weight, divisor, token_ids [L], temperatures [L]) -> float32 [L], under softmax
            of these logits over the temperature (above 0): the same bits as `sample` reports of that token.
        allocate: ([out, in], dtype, device) -> a weight as the products read it, not initialised: a tensor, or
            something with the methods of `Weight`.
        compile: (trunk, batch, view, dtype) -> a function of a batch that gives what `trunk(ops, batch, view)` gives;
            None: the trunk is called in every step.
        few_rows: (trunk, batch, view) -> what `trunk(ops, batch, view)` gives but for roundings, of at most `FEW_ROWS`
            rows, in fewer kernels; for steps that are captured. None: there is no other way.
    """

    name: str
    version: int
    schedule_invariant: bool
    embed: Callable[[Tensor, Any, float], Tensor]
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor | None, Tensor, Norm, float], tuple[Tensor, Tensor]]
    rope_and_store: Callable[
        [Tensor, Tensor, Tensor, Tensor, KvcacheView, int, Tensor, int, int, tuple[Norm, Norm] | None], Tensor
    ]
    plan_attention: Callable[[ForwardBatch, int, int], Any]
    attention: Callable[[Tensor, KvcacheView, int, Any, float], Tensor]
    gate: Callable[[Tensor, str], Tensor]
    logits: Callable[[Tensor, Any, float], Tensor]
    sample: Callable[[Tensor, Any, float, SamplingBatch], Draw]
    sample_logits: Callable[[Tensor, SamplingBatch], Draw]
    gather_logprobs: Callable[[Tensor, Any, float, Tensor, Tensor], Tensor]
    allocate: Callable[[tuple[int, ...], torch.dtype, torch.device], Any]
    compile: (
        Callable[[Callable[..., Tensor], ForwardBatch, KvcacheView, torch.dtype], Callable[[ForwardBatch], Tensor]]
        | None
    )
    few_rows: Callable[[Callable[..., Any], ForwardBatch, KvcacheView], Tensor] | None = None


Operations = Any  # an `Ops`, or what takes the same calls and records them


@dataclass(frozen=True, slots=True)
class Numerics:
    """What decides the bits of this engine. Two engines with the same fingerprint agree to the bit.

    Attributes:
        backend, version: of the operations; the batch-invariant kernels of CUDA are another backend than the others.
        dtype: of weights, activations and KV cache.
        device: kind of device, of a GPU with its generation; torch's own products decide the bits on each.
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
