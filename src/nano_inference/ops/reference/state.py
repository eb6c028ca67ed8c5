"""Layers with a state in plain torch: the specification. A row reads the cached values of earlier
rows even if they are in the same chunk, so its bits do not depend on chunks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.state import DeltaWeights, ShortConvWeights, StateView

L2_EPS = 1e-6  # epsilon in the norms of queries and keys


def short_conv(
    projected: Tensor, weights: ShortConvWeights, batch: ForwardBatch, view: StateView, layer: int
) -> Tensor:
    """Implement `Ops.short_conv` in torch."""
    before, after, x = projected.float().chunk(3, dim=-1)
    mixed = causal_conv(before * x, weights.conv, weights.bias, batch, view, layer)
    return (after * mixed).to(projected.dtype)


def causal_conv(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    batch: ForwardBatch,
    view: StateView,
    layer: int,
) -> Tensor:
    """Multiply each channel's last inputs by its taps [channels, 1, taps], oldest first: float32
    [N, channels].

    Inputs are stored, rounded to the dtype of the cache, and read back.
    """
    view.write(layer, "inputs", batch.slot_mapping, inputs)
    taps = weight.float()[:, 0, :]
    total = torch.zeros_like(inputs)
    for tap in range(taps.shape[1]):
        places = batch.positions - (taps.shape[1] - 1 - tap)
        seen = view.gather(layer, "inputs", slots_of(batch, places.clamp(min=0), view.block_size))
        total = total + torch.where(places[:, None] >= 0, seen * taps[:, tap], 0.0)
    return total if bias is None else total + bias.float()


def slots_of(batch: ForwardBatch, positions: Tensor, block_size: int) -> Tensor:
    """Return the slots [N] of the given positions [N], each in its row's sequence."""
    blocks = batch.block_tables[batch.row_chunks, positions // block_size]
    return blocks * block_size + positions % block_size


def sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid, written out because a library's rounds differently at the ends of an
    array.
    """
    return 1 / (1 + torch.exp(-x))


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Implement `Ops.sigmoid_gate` in torch."""
    return (x.float() * sigmoid(gate.float())).to(x.dtype)


class DeltaRows(NamedTuple):
    """Float32 inputs of the delta rule for N rows, with H value heads and G key heads."""

    q: Tensor  # [N, G, key_dim]
    k: Tensor  # [N, G, key_dim]
    v: Tensor  # [N, H, value_dim]
    decay: Tensor  # [N, H], logarithms
    beta: Tensor  # [N, H]

    def of(self, rows: Tensor) -> "DeltaRows":
        """Return the selected rows."""
        return DeltaRows(*(each[rows] for each in self))


def delta_net(
    projected: Tensor, weights: DeltaWeights, batch: ForwardBatch, view: StateView, layer: int
) -> Tensor:
    """Implement `Ops.delta_net` in torch."""
    heads, value_width = weights.value_heads, weights.value_heads * weights.value_dim
    channels = 2 * weights.key_heads * weights.key_dim + value_width
    qkv, z, b, a = projected.float().split([channels, value_width, heads, heads], dim=-1)
    mixed = causal_conv(qkv, weights.conv, None, batch, view, layer)
    out = torch.empty((len(projected), heads, weights.value_dim), device=projected.device)
    rows = _delta_rows(mixed * sigmoid(mixed), b, a, weights)
    # A row reads the results of earlier rows in its block, so iterate over the n-th rows of all
    # chunks.
    nth = torch.arange(len(out), device=out.device) - batch.cu_seqlens_q[batch.row_chunks]
    for number in range(int(nth.max()) + 1 if len(nth) else 0):
        wave = (nth == number).nonzero()[:, 0]
        out[wave] = _delta_rule(rows.of(wave), wave, batch, view, layer)
    scale = torch.rsqrt(out.pow(2).mean(dim=-1, keepdim=True) + weights.eps)
    gate = (z * sigmoid(z)).view_as(out)
    out = out * scale * weights.norm.float() * gate
    if weights.in_tiles:
        out = out.unflatten(1, (weights.key_heads, -1)).transpose(1, 2)
    return out.flatten(1).to(projected.dtype)


def _delta_rows(mixed: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> DeltaRows:
    width = weights.key_heads * weights.key_dim
    q, k, v = mixed.split([width, width, mixed.shape[1] - 2 * width], dim=-1)
    q, k = (each.unflatten(1, (weights.key_heads, -1)) for each in (q, k))
    q, k = (each * torch.rsqrt(each.pow(2).sum(-1, keepdim=True) + L2_EPS) for each in (q, k))
    x = a + weights.decay_bias.float()
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return DeltaRows(
        q * weights.key_dim**-0.5,
        k,
        v.unflatten(1, (weights.value_heads, -1)),
        -torch.exp(weights.log_decay.float()) * softplus,
        sigmoid(b),
    )


def _delta_rule(
    rows: DeltaRows, wave: Tensor, batch: ForwardBatch, view: StateView, layer: int
) -> Tensor:
    """Apply the delta rule to rows of different sequences: outputs float32 [N, H, value_dim].

    S is the state at the end of the previous block, A the decay since then, and A_j the decay since
    token j of the row's own block. Then u = beta (v - A S^T k - sum over j of A_j (k_j . k) u_j).
    The output is A S^T q + sum over j, the row itself included, of A_j (k_j . q) u_j. The block's
    last row stores A S + sum of A_j k_j u_j^T.
    """
    size, slots, positions = view.block_size, batch.slot_mapping[wave], batch.positions[wave]
    group = rows.v.shape[1] // rows.k.shape[1]
    # offset in the block, first slot of the block
    offsets, firsts = positions % size, slots - positions % size
    lanes = torch.arange(size, device=slots.device)
    before = lanes < offsets[:, None]  # [N, lanes]
    places = firsts[:, None] + torch.where(before, lanes, offsets[:, None])

    last = view.gather(layer, "decays", torch.where(offsets > 0, slots - 1, slots))
    decay = rows.decay + torch.where((offsets > 0)[:, None], last, 0.0)
    view.write(layer, "decays", slots, decay)
    view.write(layer, "keys", slots, rows.k)
    since = torch.exp(decay[:, None] - view.gather(layer, "decays", places)).transpose(1, 2)
    keys = view.gather(layer, "keys", places).transpose(1, 2)  # [N, G, lanes, key_dim]
    keys = torch.where(before[:, None, :, None], keys, 0.0)
    values = view.gather(layer, "values", places).transpose(1, 2)
    values = torch.where(before[:, None, :, None], values, 0.0)  # [N, H, lanes, value_dim]
    has_state = (positions >= size)[:, None, None, None]
    before_it = batch.block_tables[batch.row_chunks[wave], (positions // size - 1).clamp(min=0)]
    state = torch.where(has_state, view.read_state(layer, before_it), 0.0)
    whole = torch.exp(decay)[:, :, None]  # [N, H, 1]

    def read(x: Tensor) -> Tensor:
        """Read x [N, G, key_dim] from the block's earlier tokens and the state: [N, H,
        value_dim].
        """
        scores = _times(x, keys.transpose(2, 3)).repeat_interleave(group, dim=1) * since
        return whole * _times(x.repeat_interleave(group, dim=1), state) + _times(scores, values)

    u = rows.beta[:, :, None] * (rows.v - read(rows.k))
    view.write(layer, "values", slots, u)
    current = (rows.q * rows.k).sum(-1).repeat_interleave(group, dim=1)
    out = read(rows.q) + current[:, :, None] * u

    ends = (offsets == size - 1).nonzero()[:, 0]
    if len(ends):
        spread = keys[ends].repeat_interleave(group, dim=1) * since[ends][..., None]
        gained = torch.stack(
            [_times(spread[..., d], values[ends]) for d in range(keys.shape[3])], 2
        )
        current = rows.k[ends].repeat_interleave(group, dim=1)[..., None] * u[ends][:, :, None]
        kept = whole[ends][..., None] * state[ends] + gained + current
        view.write_state(layer, slots[ends] // size, kept)
    return out


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Multiply [N, heads, a] by [N, heads, a, b]: [N, heads, b].

    Sums run along the last axis, because a library's product of a single row may add up in another
    order than a product of several rows.
    """
    return (matrices.transpose(2, 3) * rows[:, :, None]).contiguous().sum(dim=-1)
