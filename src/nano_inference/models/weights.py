"""`ParamSpec`: one table a model that names every parameter, what it is fused from, and how it may be split.

The table drives allocation, loading from disk and weight updates now; sharding reads its axes later.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of the decoder.

    Attributes:
        name: the decoder's name for it.
        shape: whole shape, all sources together.
        sources: checkpoint names that are stacked along axis 0 to make it, with their numbers of rows.
        shard_axis: axis along which tensor parallelism splits it; None: every rank holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, int], ...]
    shard_axis: int | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one checkpoint tensor goes: rows [start, start + shape[0]) of a parameter."""

    param: str
    start: int
    shape: tuple[int, ...]


def param_table(spec: ModelSpec) -> tuple[ParamSpec, ...]:
    """Every parameter of a model of the Llama family."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    table = [_plain("embed", "model.embed_tokens.weight", (spec.vocab_size, hidden), shard_axis=0)]
    for i in range(spec.num_layers):
        hf, own = f"model.layers.{i}", f"layers.{i}"
        qkv = tuple(
            (f"{hf}.self_attn.{part}_proj.weight", rows)
            for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        )
        gate_up = tuple((f"{hf}.mlp.{part}_proj.weight", inner) for part in ("gate", "up"))
        table += [
            _plain(f"{own}.input_norm", f"{hf}.input_layernorm.weight", (hidden,)),
            ParamSpec(f"{own}.qkv", (q_rows + 2 * kv_rows, hidden), qkv, shard_axis=0),
            _plain(f"{own}.o", f"{hf}.self_attn.o_proj.weight", (hidden, q_rows), shard_axis=1),
            _plain(f"{own}.post_norm", f"{hf}.post_attention_layernorm.weight", (hidden,)),
            ParamSpec(f"{own}.gate_up", (2 * inner, hidden), gate_up, shard_axis=0),
            _plain(f"{own}.down", f"{hf}.mlp.down_proj.weight", (hidden, inner), shard_axis=1),
        ]
    table.append(_plain("norm", "model.norm.weight", (hidden,)))
    if not spec.tie_word_embeddings:
        table.append(_plain("head", "lm_head.weight", (spec.vocab_size, hidden), shard_axis=0))
    return tuple(table)


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


def allocate(table: tuple[ParamSpec, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Uninitialised parameters by name."""
    return {param.name: torch.empty(param.shape, dtype=dtype, device=device) for param in table}


def write(params: dict[str, Tensor], slot: Slot, tensor: Tensor) -> None:
    """Copy one checkpoint tensor into its place, in place, cast to the parameter's dtype."""
    params[slot.param].narrow(0, slot.start, slot.shape[0]).copy_(tensor)


def read(params: dict[str, Tensor], slot: Slot) -> Tensor:
    """The view of a parameter that one checkpoint name stands for."""
    return params[slot.param].narrow(0, slot.start, slot.shape[0])


def _plain(name: str, source: str, shape: tuple[int, ...], shard_axis: int | None = None) -> ParamSpec:
    return ParamSpec(name, shape, ((source, shape[0]),), shard_axis)
