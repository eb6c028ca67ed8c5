"""The reference backend: plain torch on CPU and CUDA tensors. It is the specification; clear before fast.

Its law (docs/design.md, "Invariance"): every row is computed in an order of additions that depends neither on the
number of other rows nor on its place among them. Products run on tiles of exactly 16 rows, because a vendor's product
may choose another order for another number of rows; everything else works along single rows.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.ops.backend import KvcacheView, Norm, Ops
from nano_inference.ops.reference_attention import attention, plan_attention
from nano_inference.sampling.logprobs import gather_logprobs
from nano_inference.sampling.pipeline import divide
from nano_inference.sampling.sample import Draw, sample
from nano_inference.sampling.sampling_batch import SamplingBatch

ROW_TILE = 16
VOCAB_TILE = 4096  # rows of the head cast to float32 at a time
SCORE_TILE = 256  # rows whose logits are in memory at once where only one logprob of each is wanted


def embed(input_ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Rows of the embedding, scaled, as the float32 residual stream."""
    rows = functional.embedding(input_ids, weight).float()
    return rows if scale == 1 else rows * scale


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X @ weight.T (+ bias) in tiles of exactly 16 rows, the last one padded."""
    whole = _whole_vectors(weight)
    padded = functional.pad(x, (0, whole.shape[1] - x.shape[1], 0, -len(x) % ROW_TILE))
    out = torch.empty((len(padded), len(whole)), dtype=x.dtype, device=x.device)
    for start in range(0, len(padded), ROW_TILE):
        out[start : start + ROW_TILE] = functional.linear(padded[start : start + ROW_TILE], whole)
    out = out[: len(x), : len(weight)]
    return out if bias is None else out + bias


def rms_norm(x: Tensor | None, residual: Tensor, norm: Norm, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Add scale * x to the residual stream, then bring it to unit root mean square (arXiv:1910.07467), in float32."""
    if x is not None:
        residual = residual + (x.float() if scale == 1 else x.float() * scale)
    return _normed(residual, norm), residual


def _normed(x: Tensor, norm: Norm) -> Tensor:
    if norm.weight is None:
        return x.to(norm.dtype)
    x = x.float()
    scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + norm.eps)
    return (x * scale * (norm.offset + norm.weight.float())).to(norm.dtype)


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
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Rotate queries and keys (halves of a head are the two coordinates), store keys and values, return queries."""
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    turning, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if norms is not None:
        parts = turning.split([num_heads, num_kv_heads], dim=1)
        turning = torch.cat([_normed_heads(part, norm) for part, norm in zip(parts, norms, strict=True)], dim=1)
    turning = turning.float()
    cos, sin = cos[positions][:, None, :], sin[positions][:, None, :]
    first, second = turning.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    view.write(layer, slot_mapping, turned[:, num_heads:], values)
    return turned[:, :num_heads]


def _normed_heads(heads: Tensor, norm: Norm) -> Tensor:
    """[N, heads, D] normalised over D, or over all heads of a row where the norm is that wide."""
    width = heads.shape[-1] if norm.weight is None else len(norm.weight)
    return _normed(heads.float().reshape(len(heads), -1, width), norm).view(heads.shape)


def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up in float32, where both activations are x * sigmoid(y).

    Written out, since a library's sigmoid rounds differently at the ends of an array.
    """
    first, second = gate_up.float().chunk(2, dim=-1)
    # GELU with tanh (arXiv:1606.08415): x / 2 * (1 + tanh(z)) = x * sigmoid(2 z)
    y = first if activation == "silu" else 2 * math.sqrt(2 / math.pi) * (first + 0.044715 * first * first * first)
    return (first / (1 + torch.exp(-y)) * second).to(gate_up.dtype)


def logits(hidden: Tensor, weight: Tensor, divisor: float = 1.0) -> Tensor:
    """Hidden @ weight.T / divisor in float32 whatever the weights' dtype: a rounded logit would be a wrong logprob."""
    tiles = [
        linear(hidden.float(), weight[first : first + VOCAB_TILE].float())
        for first in range(0, len(weight), VOCAB_TILE)
    ]
    whole = torch.cat(tiles, dim=1)
    return whole if divisor == 1 else whole / divisor


def draw(hidden: Tensor, weight: Tensor, divisor: float, batch: SamplingBatch) -> Draw:
    """Draw the samples of a step from the logits of its rows."""
    return sample(logits(hidden, weight, divisor), batch)


def score(hidden: Tensor, weight: Tensor, divisor: float, token_ids: Tensor, temperatures: Tensor) -> Tensor:
    """Logprobs of given tokens, few rows at a time: only one number of each row's logits is wanted."""
    scores = [
        gather_logprobs(divide(logits(rows, weight, divisor), own), targets)
        for rows, targets, own in zip(*(t.split(SCORE_TILE) for t in (hidden, token_ids, temperatures)), strict=True)
    ]
    return torch.cat(scores)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight is a plain tensor."""
    return torch.empty(shape, dtype=dtype, device=device)


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
        version=3,
        schedule_invariant=True,
        embed=embed,
        linear=linear,
        rms_norm=rms_norm,
        rope_and_store=rope_and_store,
        plan_attention=plan_attention,
        attention=attention,
        gate=gate,
        logits=logits,
        sample=draw,
        sample_logits=sample,
        gather_logprobs=score,
        allocate=allocate,
        compile=None,
    )
