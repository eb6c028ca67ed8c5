"""The reference backend: plain torch on CPU and CUDA tensors. It is the specification; clear before fast.

Its law (docs/design.md, "Invariance"): every row is computed in an order of additions that depends neither on the
number of other rows nor on its place among them. Products run on tiles of exactly 16 rows, because a vendor's product
may choose another order for another number of rows; everything else works along single rows.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.ops.backend import KvcacheView, Ops
from nano_inference.ops.reference_attention import attention, plan_attention
from nano_inference.sampling.logprobs import gather_logprobs
from nano_inference.sampling.sample import sample

ROW_TILE = 16
VOCAB_TILE = 4096  # rows of the head cast to float32 at a time


def embed(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of the embedding as the float32 residual stream."""
    return functional.embedding(input_ids, weight).float()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """X @ weight.T in tiles of exactly 16 rows, the last one padded."""
    whole = _whole_vectors(weight)
    padded = functional.pad(x, (0, whole.shape[1] - x.shape[1], 0, -len(x) % ROW_TILE))
    out = torch.empty((len(padded), len(whole)), dtype=x.dtype, device=x.device)
    for start in range(0, len(padded), ROW_TILE):
        out[start : start + ROW_TILE] = functional.linear(padded[start : start + ROW_TILE], whole)
    return out[: len(x), : len(weight)]


def rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, then scale it to unit root mean square (arXiv:1910.07467), in float32."""
    if x is not None:
        residual = residual + x.float()
    scale = torch.rsqrt(residual.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (residual * scale).to(weight.dtype) * weight, residual


def rope_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    view: KvcacheView,
    layer: int,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """Rotate queries and keys (halves of a head are the two coordinates), store keys and values, return queries."""
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    turning, values = heads[:, : num_heads + num_kv_heads].float(), heads[:, num_heads + num_kv_heads :]
    cos, sin = cos[positions][:, None, :], sin[positions][:, None, :]
    first, second = turning.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    view.write(layer, slot_mapping, turned[:, num_heads:], values)
    return turned[:, :num_heads]


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in float32. Written out, since a library's sigmoid rounds differently at the ends of an array."""
    first, second = gate_up.float().chunk(2, dim=-1)
    return (first / (1 + torch.exp(-first)) * second).to(gate_up.dtype)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Hidden @ weight.T in float32 whatever the weights' dtype: a rounded logit would be a wrong logprob."""
    tiles = [
        linear(hidden.float(), weight[first : first + VOCAB_TILE].float())
        for first in range(0, len(weight), VOCAB_TILE)
    ]
    return torch.cat(tiles, dim=1)


def _whole_vectors(weight: Tensor) -> Tensor:
    """The weight with both sizes a multiple of 16. Real models have that; where a size has not, a vendor's product
    treats the remainder differently by the number of threads.
    """
    missing = (0, -weight.shape[1] % ROW_TILE, 0, -weight.shape[0] % ROW_TILE)
    return functional.pad(weight, missing) if any(missing) else weight


def reference_ops() -> Ops:
    """The backend as a value."""
    return Ops(
        name="reference",
        version=1,
        schedule_invariant=True,
        embed=embed,
        linear=linear,
        rms_norm=rms_norm,
        rope_and_store=rope_and_store,
        plan_attention=plan_attention,
        attention=attention,
        gate=gate,
        logits=logits,
        sample=sample,
        gather_logprobs=gather_logprobs,
    )
