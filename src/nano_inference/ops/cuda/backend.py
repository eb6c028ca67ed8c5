"""The CUDA backend as a value."""

from dataclasses import fields, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from nano_inference.ops import reference
from nano_inference.ops.backend import Ops
from nano_inference.ops.cuda import matmul, sampling
from nano_inference.ops.cuda.attention import Attention
from nano_inference.ops.cuda.few_rows import few_rows
from nano_inference.ops.cuda.rope import rope_and_store
from nano_inference.ops.cuda.rows import embed, gate, rms_norm
from nano_inference.ops.flashinfer import FlashInferAttention
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import SamplingBatch

VERSION = 1  # counted up whenever any bit may change
SCORE_TILE = 1024  # rows whose logits are in memory at once where only one logprob of each is wanted


class CudaOps:
    """The operations on tensors. See `Ops` for what they do.

    Args:
        batch_invariant: a row's bits depend on nothing but its own context; FlashInfer's attention cannot promise it.
        attention: whose.
    """

    embed = staticmethod(embed)
    rms_norm = staticmethod(rms_norm)
    rope_and_store = staticmethod(rope_and_store)
    gate = staticmethod(gate)
    sample_logits = staticmethod(sampling.draw)
    allocate = staticmethod(reference.allocate)

    def __init__(self, *, batch_invariant: bool, attention: Literal["triton", "flashinfer"] = "triton") -> None:
        self.batch_invariant = batch_invariant
        kernels = FlashInferAttention() if attention == "flashinfer" else Attention(batch_invariant=batch_invariant)
        self.plan_attention, self.attention = kernels.plan, kernels.attend

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Ops.linear`."""
        if self.batch_invariant:
            return matmul.invariant_product(x, weight, bias, weight.dtype)
        return matmul.product(x, weight, bias)

    def logits(self, hidden: Tensor, weight: Tensor, divisor: float = 1.0) -> Tensor:
        """See `Ops.logits`."""
        if self.batch_invariant:
            whole = matmul.invariant_product(hidden, weight, None, torch.float32)
        else:
            whole = matmul.product_float32(hidden, weight)
        return whole if divisor == 1 else whole / divisor

    def sample(self, hidden: Tensor, weight: Tensor, divisor: float, batch: SamplingBatch) -> Draw:
        """See `Ops.sample`."""
        return sampling.draw(self.logits(hidden, weight, divisor), batch)

    def gather_logprobs(
        self, hidden: Tensor, weight: Tensor, divisor: float, token_ids: Tensor, temperatures: Tensor
    ) -> Tensor:
        """See `Ops.gather_logprobs`."""
        tiles = zip(*(t.split(SCORE_TILE) for t in (hidden, token_ids, temperatures)), strict=True)
        return torch.cat([sampling.score(self.logits(rows, weight, divisor), ids, own) for rows, ids, own in tiles])


def cuda_ops(*, batch_invariant: bool, attention: Literal["triton", "flashinfer"] = "triton") -> Ops:
    """The backend as a value.

    Args:
        batch_invariant: on CUDA it is slower.
        attention: whose.
    """
    ops = CudaOps(batch_invariant=batch_invariant, attention=attention)
    names = (field.name for field in fields(Ops))
    found = {name: getattr(ops, name) for name in names if hasattr(ops, name)}
    plain = Ops(name="cuda", version=VERSION, schedule_invariant=batch_invariant, compile=None, **found)
    return plain if batch_invariant else replace(plain, few_rows=partial(few_rows, plain))
