"""`ParamSpec`: one table a model that names every parameter, what it is fused from, and how it may be split.

The table drives allocation, loading from disk and weight updates now; sharding reads its axes later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nano_inference.models.spec import ModelSpec
from nano_inference.ops import reference


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of the decoder.

    Attributes:
        name: the decoder's name for it.
        shape: whole shape, all sources together.
        sources: checkpoint names that are stacked along axis 0 to make it, with their numbers of rows.
        shard_axis: axis along which tensor parallelism splits it; None: every rank holds all of it.
        keep_float32: held in float32 whatever dtype the model has.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, int], ...]
    shard_axis: int | None = None
    keep_float32: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one checkpoint tensor goes: rows [start, start + shape[0]) of a parameter."""

    param: str
    start: int
    shape: tuple[int, ...]


Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Any]  # `Ops.allocate`


# Norms of a layer by their placement: (the decoder's name, the checkpoint's).
_NORMS = {
    "pre": (("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")),
    "post": (("attn_out_norm", "post_attention_layernorm"), ("mlp_out_norm", "post_feedforward_layernorm")),
    "both": (
        ("attn_norm", "input_layernorm"),
        ("attn_out_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("mlp_out_norm", "post_feedforward_layernorm"),
    ),
}


def param_table(spec: ModelSpec) -> tuple[ParamSpec, ...]:
    """Every parameter of a model."""
    hidden = spec.hidden_size
    table = [_plain("embed", "model.embed_tokens.weight", (spec.vocab_size, hidden), shard_axis=0)]
    for i in range(spec.num_layers):
        table += _attention(spec, f"layers.{i}", f"model.layers.{i}.self_attn")
        table += _mlp(spec, f"layers.{i}", f"model.layers.{i}.mlp")
        table += [
            _norm(spec, f"layers.{i}.{own}", f"model.layers.{i}.{hf}.weight", hidden) for own, hf in _NORMS[spec.norms]
        ]
    table.append(_norm(spec, "norm", "model.norm.weight", hidden))
    if not spec.tie_word_embeddings:
        table.append(_plain("head", "lm_head.weight", (spec.vocab_size, hidden), shard_axis=0))
    return tuple(table)


def _attention(spec: ModelSpec, own: str, hf: str) -> list[ParamSpec]:
    hidden, q_rows, kv_rows = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    if spec.fused_projections:
        rows = {"qkv_proj": q_rows + 2 * kv_rows}
    params = [
        _stacked(f"{own}.qkv", hf, "weight", rows, (hidden,)),
        _plain(f"{own}.o", f"{hf}.o_proj.weight", (hidden, q_rows), shard_axis=1),
    ]
    if spec.qkv_bias:
        params.append(_stacked(f"{own}.qkv_bias", hf, "bias", rows, ()))
    if spec.o_bias:
        params.append(_plain(f"{own}.o_bias", f"{hf}.o_proj.bias", (hidden,)))
    if spec.qk_norm:
        widths = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (q_rows, kv_rows)
        params += [
            _norm(spec, f"{own}.{part}_norm", f"{hf}.{part}_norm.weight", width)
            for part, width in zip("qk", widths, strict=True)
        ]
    return params


def _mlp(spec: ModelSpec, own: str, hf: str) -> list[ParamSpec]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    rows = {"gate_up_proj": 2 * inner} if spec.fused_projections else {"gate_proj": inner, "up_proj": inner}
    return [
        _stacked(f"{own}.gate_up", hf, "weight", rows, (hidden,)),
        _plain(f"{own}.down", f"{hf}.down_proj.weight", (hidden, inner), shard_axis=1),
    ]


# A tied head may be present in a checkpoint or a state dict; it must then equal this tensor.
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def slots(table: tuple[ParamSpec, ...]) -> dict[str, Slot]:
    """Checkpoint name -> where it goes."""
    found: dict[str, Slot] = {}
    for param in table:
        start = 0
        for name, rows in param.sources:
            found[name] = Slot(param.name, start, (rows, *param.shape[1:]))
            start += rows
    return found


def allocate(
    table: tuple[ParamSpec, ...], dtype: torch.dtype, device: torch.device, matrix: Allocate = reference.allocate
) -> dict[str, Any]:
    """Uninitialised parameters by name. Matrices are what `matrix` makes, vectors are tensors."""
    return {
        param.name: matrix(param.shape, dtype, device)
        if len(param.shape) == 2
        else torch.empty(param.shape, dtype=torch.float32 if param.keep_float32 else dtype, device=device)
        for param in table
    }


def num_bytes(table: tuple[ParamSpec, ...], dtype: torch.dtype) -> int:
    """Bytes that the parameters of a table take."""
    return sum(torch.Size(param.shape).numel() * (4 if param.keep_float32 else dtype.itemsize) for param in table)


def write(params: dict[str, Any], slot: Slot, tensor: Tensor) -> None:
    """Copy one checkpoint tensor into its place, in place, cast to the parameter's dtype."""
    param = params[slot.param]
    if isinstance(param, Tensor):
        param.narrow(0, slot.start, slot.shape[0]).copy_(tensor)
    else:
        param.write(slot.start, tensor)


def patch(params: dict[str, Any], slot: Slot, indices: Tensor, values: Tensor) -> None:
    """Change single numbers of one checkpoint tensor in place: flat row-major `indices` int64 [n], `values` [n]."""
    param = params[slot.param]
    if isinstance(param, Tensor):
        flat = param.narrow(0, slot.start, slot.shape[0]).view(-1)
        flat.index_copy_(0, indices.to(flat.device), values.to(flat.device, flat.dtype))
    else:
        param.patch(slot.start, indices, values)


def read(params: dict[str, Any], slot: Slot) -> Tensor:
    """What one checkpoint name stands for, in the parameter's dtype: a view, or a copy where weights are packed."""
    param = params[slot.param]
    if isinstance(param, Tensor):
        return param.narrow(0, slot.start, slot.shape[0])
    return param.read(slot.start, slot.shape[0])


def _plain(name: str, source: str, shape: tuple[int, ...], shard_axis: int | None = None) -> ParamSpec:
    return ParamSpec(name, shape, ((source, shape[0]),), shard_axis)


def _norm(spec: ModelSpec, name: str, source: str, width: int) -> ParamSpec:
    # 1 + w in bfloat16 would lose the digits of a small w.
    return ParamSpec(name, (width,), ((source, width),), keep_float32=spec.norm_offset != 0)


def _stacked(name: str, module: str, kind: str, rows: dict[str, int], inner: tuple[int, ...]) -> ParamSpec:
    sources = tuple((f"{module}.{projection}.{kind}", count) for projection, count in rows.items())
    return ParamSpec(name, (sum(rows.values()), *inner), sources, shard_axis=0)
