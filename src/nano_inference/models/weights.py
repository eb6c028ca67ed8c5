"""`ParamSpec`: one table a model that names every parameter, what it is fused from, and how it may
be split.

The table drives allocation, loading from disk, weight updates and sharding: a rank's table says
which part of each checkpoint tensor is its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nano_inference.models.part import ModelPart, part_of
from nano_inference.models.spec import ModelSpec, MoeSpec
from nano_inference.ops import reference


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor, and what of it goes into a parameter.

    Attributes:
        name: in the checkpoint.
        shape: in the checkpoint.
        axis: along which parts of it are taken.
        parts: these, in order, as [start, stop); None: all of it.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    parts: tuple[tuple[int, int], ...] | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what is taken."""
        if self.parts is None:
            return self.shape
        size = sum(stop - start for start, stop in self.parts)
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of the decoder, as one rank holds it.

    Attributes:
        name: the decoder's name for it.
        shape: all sources together.
        sources: what is stacked along axis 0 to make it.
        keep_float32: held in float32 whatever dtype the model has.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    keep_float32: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one checkpoint tensor goes: what `take` gives becomes rows [start, start + n) of a
    parameter.

    `shape` is the checkpoint's. `axis` and `parts` are those of `Source`.
    """

    param: str
    start: int
    shape: tuple[int, ...]
    axis: int = 0
    parts: tuple[tuple[int, int], ...] | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what is taken."""
        return Source("", self.shape, self.axis, self.parts).local_shape

    def take(self, tensor: Any) -> Tensor:
        """This rank's part of a checkpoint tensor, or of what safetensors reads by slices; a view
        where it can be.
        """
        if self.parts is None:
            return tensor[:]
        rows = (slice(None),) * self.axis
        cut = [tensor[(*rows, slice(*part))] for part in self.parts]
        return cut[0] if len(cut) == 1 else torch.cat(cut, dim=self.axis)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """The inverse of `take`: write this rank's part into a checkpoint tensor."""
        if self.parts is None:
            whole.copy_(part)
            return
        start = 0
        for first, last in self.parts:
            whole.narrow(self.axis, first, last - first).copy_(
                part.narrow(self.axis, start, last - first)
            )
            start += last - first

    def take_places(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of numbers of a checkpoint tensor, by flat row-major place: this rank's, by place in what
        `take` gives.
        """
        if self.parts is None:
            return indices, values
        inner = torch.Size(self.shape[self.axis + 1 :]).numel()
        size, own_size = self.shape[self.axis], self.local_shape[self.axis]
        along = indices // inner % size
        found: list[tuple[Tensor, Tensor]] = []
        start = 0
        for first, last in self.parts:
            mine = (along >= first) & (along < last)
            places = indices[mine]
            outer, rest = places // (inner * size), places % inner
            found.append(
                ((outer * own_size + along[mine] - first + start) * inner + rest, values[mine])
            )
            start += last - first
        return torch.cat([places for places, _ in found]), torch.cat(
            [numbers for _, numbers in found]
        )


# What a weight may be stored as, or sent as. Integers, booleans and floats of eight bits are codes
# of a quantisation: without their scales they are other numbers.
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], Any]  # `Ops.allocate`


# Norms of a layer by their placement: (the decoder's name, the checkpoint's).
_NORMS = {
    "pre": (("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")),
    "post": (
        ("attn_out_norm", "post_attention_layernorm"),
        ("mlp_out_norm", "post_feedforward_layernorm"),
    ),
    "both": (
        ("attn_norm", "input_layernorm"),
        ("attn_out_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("mlp_out_norm", "post_feedforward_layernorm"),
    ),
}


def param_table(spec: ModelSpec, part: ModelPart | None = None) -> tuple[ParamSpec, ...]:
    """Every parameter of a model, or of a rank's part of it.

    Args:
        spec: of the whole model.
        part: what the rank holds; None: all of it.
    """
    part = part if part is not None else part_of(spec)
    hidden, vocab = spec.hidden_size, spec.vocab_size
    table: list[ParamSpec] = []
    if part.has_embedding:
        table.append(
            _plain(
                "embed",
                Source("model.embed_tokens.weight", (vocab, hidden), 0, _of(part.vocab, vocab)),
            )
        )
    for place, i in enumerate(part.layers):
        table += _attention(part, f"layers.{place}", f"model.layers.{i}.self_attn")
        if spec.moe is not None and spec.moe.layers[i]:
            table += _experts(
                part, spec.moe, f"layers.{place}", f"model.layers.{i}.{spec.moe.module}"
            )
        else:
            table += _mlp(part, f"layers.{place}", f"model.layers.{i}.mlp")
        table += [
            _norm(spec, f"layers.{place}.{own}", f"model.layers.{i}.{hf}.weight", hidden)
            for own, hf in _NORMS[spec.norms]
        ]
    if part.place.is_last_stage:
        table.append(_norm(spec, "norm", "model.norm.weight", hidden))
    if part.has_head:
        table.append(
            _plain("head", Source("lm_head.weight", (vocab, hidden), 0, _of(part.vocab, vocab)))
        )
    return tuple(table)


def _attention(part: ModelPart, own: str, hf: str) -> list[ParamSpec]:
    spec, size = part.whole, part.whole.head_dim
    hidden, q_rows, kv_rows = spec.hidden_size, spec.num_heads * size, spec.num_kv_heads * size
    group = spec.num_heads // spec.num_kv_heads
    kv = range(part.kv_heads.start * size, part.kv_heads.stop * size)
    q = range(kv.start * group, kv.stop * group)  # of all query heads that its KV heads serve
    rows = {"q_proj": (q_rows, (q,)), "k_proj": (kv_rows, (kv,)), "v_proj": (kv_rows, (kv,))}
    if spec.fused_projections:
        after, value = q_rows, q_rows + kv_rows
        parts = (
            q,
            range(after + kv.start, after + kv.stop),
            range(value + kv.start, value + kv.stop),
        )
        rows = {"qkv_proj": (q_rows + 2 * kv_rows, parts)}
    columns = range(part.heads.start * size, part.heads.stop * size)
    params = [
        _stacked(f"{own}.qkv", hf, "weight", rows, (hidden,)),
        _plain(
            f"{own}.o", Source(f"{hf}.o_proj.weight", (hidden, q_rows), 1, _of(columns, q_rows))
        ),
    ]
    if spec.qkv_bias:
        params.append(_stacked(f"{own}.qkv_bias", hf, "bias", rows, ()))
    if spec.o_bias:
        params.append(_plain(f"{own}.o_bias", Source(f"{hf}.o_proj.bias", (hidden,))))
    if spec.qk_norm:
        widths = (size, size) if spec.qk_norm == "head" else (q_rows, kv_rows)
        params += [
            _norm(spec, f"{own}.{which}_norm", f"{hf}.{which}_norm.weight", width)
            for which, width in zip("qk", widths, strict=True)
        ]
    return params


def _mlp(part: ModelPart, own: str, hf: str) -> list[ParamSpec]:
    spec = part.whole
    hidden, inner = spec.hidden_size, spec.intermediate_size
    rows = {"gate_proj": (inner, (part.inner,)), "up_proj": (inner, (part.inner,))}
    if spec.fused_projections:
        parts = (part.inner, range(inner + part.inner.start, inner + part.inner.stop))
        rows = {"gate_up_proj": (2 * inner, parts)}
    return [
        _stacked(f"{own}.gate_up", hf, "weight", rows, (hidden,)),
        _plain(
            f"{own}.down",
            Source(f"{hf}.down_proj.weight", (hidden, inner), 1, _of(part.inner, inner)),
        ),
    ]


def _experts(part: ModelPart, moe: MoeSpec, own: str, hf: str) -> list[ParamSpec]:
    """The router, and the experts' matrices one below the other: the gate and up rows of each
    expert together.

    Of experts that other ranks hold there are no rows here.
    """
    hidden, inner = part.whole.hidden_size, moe.intermediate_size
    gate, up, down = moe.projections

    def source(expert: int, projection: str, shape: tuple[int, int]) -> Source:
        name = f"{hf}.experts.{expert}.{projection}.weight"
        return Source(name, shape, 0, None if expert in part.experts else ((0, 0),))

    every = range(moe.num_experts)
    gate_up = tuple(
        source(expert, name, (inner, hidden)) for expert in every for name in (gate, up)
    )
    return [
        _plain(f"{own}.router", Source(f"{hf}.gate.weight", (moe.num_experts, hidden))),
        ParamSpec(f"{own}.experts_gate_up", (len(part.experts) * 2 * inner, hidden), gate_up),
        ParamSpec(
            f"{own}.experts_down",
            (len(part.experts) * hidden, inner),
            tuple(source(expert, down, (hidden, inner)) for expert in every),
        ),
    ]


# A tied head may be present in a checkpoint or a state dict; it must then equal this tensor.
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def slots(table: tuple[ParamSpec, ...]) -> dict[str, Slot]:
    """Checkpoint name -> where it goes."""
    found: dict[str, Slot] = {}
    for param in table:
        start = 0
        for source in param.sources:
            found[source.name] = Slot(param.name, start, source.shape, source.axis, source.parts)
            start += source.local_shape[0]
    return found


def allocate(
    table: tuple[ParamSpec, ...],
    dtype: torch.dtype,
    device: torch.device,
    matrix: Allocate = reference.allocate,
) -> dict[str, Any]:
    """Uninitialised parameters by name. Matrices are what `matrix` makes, vectors are tensors."""
    return {
        param.name: matrix(param.shape, dtype, device)
        if len(param.shape) == 2
        else torch.empty(
            param.shape, dtype=torch.float32 if param.keep_float32 else dtype, device=device
        )
        for param in table
    }


def num_bytes(table: tuple[ParamSpec, ...], dtype: torch.dtype) -> int:
    """Bytes that the parameters of a table take."""
    return sum(
        torch.Size(param.shape).numel() * (4 if param.keep_float32 else dtype.itemsize)
        for param in table
    )


def write(params: dict[str, Any], slot: Slot, tensor: Tensor) -> None:
    """Copy this rank's part of one checkpoint tensor (`Slot.take`) into its place, in place, cast
    to the parameter's dtype.
    """
    param = params[slot.param]
    if isinstance(param, Tensor):
        param.narrow(0, slot.start, slot.local_shape[0]).copy_(tensor)
    else:
        param.write(slot.start, tensor)


def patch(params: dict[str, Any], slot: Slot, indices: Tensor, values: Tensor) -> None:
    """Change single numbers of this rank's part of one checkpoint tensor in place: flat row-major
    `indices` int64 [n], `values` [n].
    """
    param = params[slot.param]
    if isinstance(param, Tensor):
        flat = param.narrow(0, slot.start, slot.local_shape[0]).view(-1)
        flat.index_copy_(0, indices.to(flat.device), values.to(flat.device, flat.dtype))
    else:
        param.patch(slot.start, indices, values)


def read(params: dict[str, Any], slot: Slot) -> Tensor:
    """What this rank holds of one checkpoint tensor, in the parameter's dtype: a view, or a copy
    where weights are packed.
    """
    param, rows = params[slot.param], slot.local_shape[0]
    if isinstance(param, Tensor):
        return param.narrow(0, slot.start, rows)
    return param.read(slot.start, rows)


def _of(part: range, size: int) -> tuple[tuple[int, int], ...] | None:
    """A part as `Source` says it."""
    return None if len(part) == size else ((part.start, part.stop),)


def _plain(name: str, source: Source) -> ParamSpec:
    return ParamSpec(name, source.local_shape, (source,))


def _norm(spec: ModelSpec, name: str, source: str, width: int) -> ParamSpec:
    # 1 + w in bfloat16 would lose the digits of a small w.
    return ParamSpec(
        name, (width,), (Source(source, (width,)),), keep_float32=spec.norm_offset != 0
    )


def _stacked(
    name: str,
    module: str,
    kind: str,
    rows: dict[str, tuple[int, tuple[range, ...]]],
    inner: tuple[int, ...],
) -> ParamSpec:
    sources = tuple(
        Source(
            f"{module}.{projection}.{kind}",
            (count, *inner),
            0,
            None
            if sum(map(len, parts)) == count
            else tuple((part.start, part.stop) for part in parts),
        )
        for projection, (count, parts) in rows.items()
    )
    return ParamSpec(name, (sum(source.local_shape[0] for source in sources), *inner), sources)
