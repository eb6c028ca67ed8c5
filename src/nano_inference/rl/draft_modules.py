"""Draft heads in plain, differentiable torch, over whole sequences.

The computation is that of `drafts/medusa.py` and `drafts/eagle.py`. Parameters are float32, under
the names of `drafts/heads.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.drafts.heads import EagleSpec, MedusaSpec
from nano_inference.models.rope import rope_table

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class PolicyRows:
    """The policy's rows of a sample of T tokens.

    Attributes:
        token_ids: int64 [T], including the prompt.
        hidden: float32 [T, H], after the last norm.
        taps: float32 [T, 3 * H], before three layers; [T, 0] if not needed.
        embedded: float32 [T, E], embeddings of the tokens.
        first: Index of the first sampled token.
    """

    token_ids: Tensor
    hidden: Tensor
    taps: Tensor
    embedded: Tensor
    first: int

    def targets(self, depth: int) -> tuple[int, int]:
        """Return the rows [start, stop) whose next token is drafted at this depth, from 0.

        Base row t drafts the token after row t + 1 + depth.
        """
        return max(self.first - 1, depth + 1), len(self.token_ids) - 1


def medusa_rows(spec: MedusaSpec, params: Params, rows: PolicyRows, places: int) -> list[Tensor]:
    """Return the inputs of the heads' projections by depth, [stop - start, H] each.

    The bounds are those of `PolicyRows.targets`.
    """
    by_depth: list[Tensor] = []
    for head in range(min(places, spec.num_heads)):
        start, stop = rows.targets(head)
        hidden = rows.hidden[start - 1 - head : max(stop - 1 - head, 0)]
        for block in range(spec.num_blocks):
            name = f"blocks.{head}.layers.{block}"
            added = functional.linear(hidden, params[f"{name}.weight"], params.get(f"{name}.bias"))
            hidden = hidden + functional.silu(added)
        by_depth.append(hidden)
    return by_depth


def eagle_rows(spec: EagleSpec, params: Params, rows: PolicyRows, places: int) -> list[Tensor]:
    """Return the inputs of an EAGLE-3 head's projection by depth, as `medusa_rows` does.

    At each depth, the head reads its own rows of the previous depths, as when it drafts (the
    paper's training-time test). The tokens in between are the correct ones.
    """
    count = len(rows.token_ids) - 1  # rows whose next token is known
    hidden = _combined(spec, params, rows.taps[:count])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    by_depth: list[Tensor] = []
    for depth in range(places):
        left = count - depth
        if left <= 0:
            break
        hidden = hidden[:left]
        embedded = rows.embedded[1 + depth : 1 + depth + left]
        out = _layer(spec, params, hidden, embedded, depth, keys, values)
        normed = _norm(spec, params, "norm.weight", out)
        start, stop = rows.targets(depth)
        by_depth.append(normed[start - 1 - depth : max(stop - 1 - depth, 0)])
        hidden = normed if spec.norm_output else out
    return by_depth


def _combined(spec: EagleSpec, params: Params, taps: Tensor) -> Tensor:
    if spec.norm_before_fc:
        taps = _norm(spec, params, "input_norm.weight", taps)
    if spec.fc_norm:
        parts = taps.split(spec.target_hidden_size, dim=1)
        normed = [_norm(spec, params, f"fc_norm.{i}.weight", each) for i, each in enumerate(parts)]
        taps = torch.cat(normed, dim=1)
    return functional.linear(taps, params["fc.weight"])


def _layer(
    spec: EagleSpec,
    params: Params,
    hidden: Tensor,
    embedded: Tensor,
    depth: int,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """Compute rows [N, H], `depth` positions after their bases.

    The lists hold keys and values of the previous depths and receive those of this one.
    """
    layer = spec.layer
    normed = _norm(spec, params, "layers.0.hidden_norm.weight", hidden)
    residual = normed if spec.norm_before_residual else hidden
    x = torch.cat([_norm(spec, params, "layers.0.input_layernorm.weight", embedded), normed], dim=1)
    q, k, v = (_heads(spec, params, x, each, depth) for each in "qkv")
    keys.append(k)
    values.append(v)
    attended = attend_by_depth(q, keys, values, layer.attention_scale)
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    bias = params.get(f"{attention}.o_proj.bias")
    row = residual + functional.linear(attended, params[f"{attention}.o_proj.weight"], bias)
    normed = _norm(spec, params, "layers.0.post_attention_layernorm.weight", row)
    gate = functional.linear(normed, params[f"{mlp}.gate_proj.weight"])
    up = functional.linear(normed, params[f"{mlp}.up_proj.weight"])
    gated = functional.silu(gate) if layer.activation == "silu" else _gelu(gate)
    return row + functional.linear(gated * up, params[f"{mlp}.down_proj.weight"])


def attend_by_depth(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """Attend from rows of the last depth to all earlier bases, and to the same row's previous
    depths: [N, heads * D].

    Args:
        q: Queries, [heads, N, D].
        keys, values: Those of each depth up to this one, [kv heads, at least N, D].
        scale: Factor of the products of queries and keys.
    """
    count, groups = q.shape[1], len(q) // len(keys[0])
    base = q @ keys[0][:, :count].repeat_interleave(groups, 0).transpose(1, 2) * scale
    base = base.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    drafted = [
        (q * each[:, :count].repeat_interleave(groups, 0)).sum(-1) * scale for each in keys[1:]
    ]
    weights = torch.cat([base, *(each[..., None] for each in drafted)], dim=-1).softmax(-1)
    out = weights[..., :count] @ values[0][:, :count].repeat_interleave(groups, 0)
    for i, previous in enumerate(values[1:]):
        own_values = previous[:, :count].repeat_interleave(groups, 0)
        out = out + weights[..., count + i, None] * own_values
    return out.transpose(0, 1).flatten(1)


def _heads(spec: EagleSpec, params: Params, x: Tensor, which: str, depth: int) -> Tensor:
    """Return queries, keys or values, rotated (except values): [heads, N, D]."""
    layer, name = spec.layer, f"layers.0.self_attn.{which}_proj"
    rows = functional.linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))
    rows = rows.view(len(x), -1, layer.head_dim).transpose(0, 1)
    if which == "v":
        return rows
    if layer.qk_norm:
        rows = _norm(spec, params, f"layers.0.self_attn.{which}_norm.weight", rows)
    cos, sin = rope_table(layer.ropes[0], layer.head_dim, len(x) + depth, x.device)
    one, other = rows.chunk(2, dim=-1)
    cos, sin = cos[depth:].float(), sin[depth:].float()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


def _norm(spec: EagleSpec, params: Params, name: str, x: Tensor) -> Tensor:
    eps = spec.layer.rms_norm_eps
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * params[name]


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")
