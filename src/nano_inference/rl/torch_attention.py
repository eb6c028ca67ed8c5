"""Attention of the differentiable decoder (`torch_decoder.py`)."""

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.models.spec.model import ModelSpec
from nano_inference.sampling.scaling import capped


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None, spec: ModelSpec
) -> Tensor:
    """Compute attention of the last n of L rows: [n, heads * D], in the dtype of q, k and v.

    q is [n, heads, D]; k and v are [L, kv heads, D].
    """
    mask = _mask(q, k, window)
    if sinks is not None:
        mask = _with_sinks(mask, sinks, spec.num_kv_heads)
        k, v = (functional.pad(each, (0, 0, 0, 0, 0, 1)) for each in (k, v))
    n, kv_heads, head_dim = len(q), k.shape[1], k.shape[2]
    # heads that share keys are rows of one matrix
    q = q.view(n, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    q, k, v = (
        q.reshape(1, kv_heads, -1, head_dim),
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
    )
    if spec.attention_cap:
        scores = q.float() @ k.float().transpose(2, 3) * spec.attention_scale
        weights = capped(scores, spec.attention_cap).add(mask).softmax(dim=-1)
        out = weights.to(q.dtype) @ v
    else:
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=spec.attention_scale
        )
    return out.view(kv_heads, -1, n, head_dim).permute(2, 0, 1, 3).reshape(n, -1)


def _mask(q: Tensor, k: Tensor, window: int) -> Tensor:
    """Return a mask, -inf for invisible keys: [heads that share keys * n, L]."""
    keys = torch.arange(len(k), device=q.device)
    rows = keys[len(k) - len(q) :, None]
    outside = keys > rows
    if window:
        outside |= keys <= rows - window
    mask = torch.zeros(outside.shape, dtype=q.dtype, device=q.device)
    return mask.masked_fill(outside, -torch.inf).repeat(q.shape[1] // k.shape[1], 1)


def _with_sinks(mask: Tensor, sinks: Tensor, kv_heads: int) -> Tensor:
    """Return the mask with one additional key, whose products and value are zero.

    The shape is [kv heads, heads that share keys * n, L + 1].
    """
    group = len(sinks) // kv_heads
    columns = sinks.to(mask.dtype).view(-1, group).repeat_interleave(len(mask) // group, dim=1)
    return torch.cat([mask.expand(len(columns), -1, -1), columns[:, :, None]], dim=2)
