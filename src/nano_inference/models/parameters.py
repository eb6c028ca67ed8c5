"""`ParamSpec`: one table a model that names every parameter, what it is fused from, and how it may
be split.

The table drives allocation, loading from disk, weight updates and sharding: a rank's table says
which part of each checkpoint tensor is its own. It also holds the other names that weights go by: a
tied head's, and those under which transformers keeps all experts of a layer in one tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nano_inference.errors import ConfigError
from nano_inference.models.sharding.shard import ModelShard, shard_of
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.states import DeltaNet, ShortConv
from nano_inference.models.spec.text_part import other_names
from nano_inference.ops import reference
from nano_inference.ops.formats import QUANTIZATIONS, Format, bounds_of, groups_of
from nano_inference.ops.settings import Latent


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


class Fused(NamedTuple):
    """A tensor that holds all sources of a parameter.

    Attributes:
        name: of it.
        shape: of it.
        axes: as these sizes it is looked at; none: the sources' rows stand one below the other.
        order: and in this order of them, the sources are its leading axes, in their order, and what
            is left is one source.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of the decoder, as one rank holds it.

    Attributes:
        name: the decoder's name for it.
        shape: all sources together.
        sources: what is stacked along axis 0 to make it.
        keep_float32: held in float32 whatever dtype the model has.
        tied: checkpoint name of a head that must equal the only source; None: there is none.
        other_names: what a checkpoint may call a source or the tied head instead: ours, theirs.
        fused: each tensor that holds all sources, in order, in a trainer's memory or in
            checkpoints.
        latent: it is what `LatentOps` multiplies by.
        codes: it may be quantised, in the format of layers or of the head; None: it stays as it is.
        segments: bounds of its columns' segments, as the decoder gives them to `Ops.linear`.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    keep_float32: bool = False
    tied: str | None = None
    fused: tuple[Fused, ...] = ()
    other_names: tuple[tuple[str, str], ...] = ()
    latent: Latent | None = None
    codes: Literal["layers", "head"] | None = None
    segments: tuple[int, ...] | None = None

    def form(self, quantization: "Formats") -> Format | None:
        """Its format under `EngineConfig.quantization`; None: it has none."""
        if quantization is None or self.codes is None:
            return None
        if not isinstance(quantization, str):
            return quantization.get(self.name)
        layers, head = QUANTIZATIONS.get(quantization, (None, None))  # a file says it itself
        return {"layers": layers, "head": head}[self.codes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(Source):
    """Where a source goes: what `take` gives becomes rows [start, start + n) of a parameter.

    `tied_to` is for a tied head: the tensor whose slot this is. The head is compared with it, and
    never written.
    """

    param: str
    start: int
    tied_to: str | None = None

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


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor that holds several checkpoint tensors of one shape.

    Attributes:
        shape: of the whole.
        parts: names in the checkpoint, in order.
        axes, order: as `Fused` has them; the product of the leading axes is the number of parts.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    axes: tuple[int, ...]
    order: tuple[int, ...]

    def split(self, whole: Tensor) -> list[tuple[str, Tensor]]:
        """Each part with its name; `whole` has `shape`. Views where it is contiguous."""
        parts = whole.reshape(self.axes).permute(self.order)
        places = product(*(range(size) for size in parts.shape[: self._leading]))
        return [(name, parts[place]) for name, place in zip(self.parts, places, strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`: the whole of its parts, in order."""
        ordered = torch.stack(list(parts)).reshape([self.axes[axis] for axis in self.order])
        back = [self.order.index(axis) for axis in range(len(self.axes))]
        return ordered.permute(back).reshape(self.shape)

    def cut(self, whole: Any) -> dict[str, Any]:
        """Each part by its name, of what is read by slices."""
        if len(self.parts) == 1 and self.axes == self.shape:
            return {self.parts[0]: whole}
        matrices = _Matrices(self, whole)
        return {name: FusedPart(matrices, place) for place, name in enumerate(self.parts)}

    def split_places(self, places: Tensor, values: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """Single numbers of the whole by the part that each is of: name, flat places in the part,
        values.

        `places` are flat and row-major, int64 [n], inside of the whole.
        """
        size = torch.Size(self.shape).numel() // len(self.parts)
        places = self._in_order(places)
        part = places // size
        order = part.argsort(stable=True)
        counts = part.bincount(minlength=len(self.parts)).tolist()
        rows = zip(
            self.parts,
            (places % size)[order].split(counts),
            values[order].split(counts),
            strict=True,
        )
        return [(name, inside, numbers) for name, inside, numbers in rows if len(inside)]

    @property
    def _leading(self) -> int:
        """How many axes, in order, count the parts."""
        left, leading = len(self.parts), 0
        while left > 1:
            left //= self.axes[self.order[leading]]
            leading += 1
        return leading

    def _in_order(self, places: Tensor) -> Tensor:
        """Flat places in the whole -> in the whole with its axes in order."""
        along = torch.unravel_index(places, self.axes)
        found = torch.zeros_like(places)
        for axis in self.order:
            found = found * self.axes[axis] + along[axis]
        return found


class _Matrices:
    """A fused tensor that is read a matrix at a time, where its parts are of one matrix each. What
    was read last is kept, as the next part is of it too.
    """

    def __init__(self, fused: FusedTensor, whole: Any) -> None:
        self.whole, self._read, self._parts = whole, -1, list[Tensor]()
        self._each, self._one, self._by_matrix = len(fused.parts), fused, False
        count, each = fused.shape[0], len(fused.parts) // fused.shape[0]
        axes, order = fused.axes, fused.order
        if each > 1 and axes[0] == count * each and order == tuple(range(len(axes))):
            # rows below rows, of one matrix after the other
            axes, order = (count, each, *axes[1:]), (0, *(1 + axis for axis in order))
        if len(fused.shape) == 3 and each and axes[0] == count and order[0] == 0:
            self._each = each
            self._by_matrix, names = True, fused.parts[:each]
            self._one = FusedTensor((1, *fused.shape[1:]), names, (1, *axes[1:]), order)
            if each == 1:  # the first axis counts no parts
                order = tuple(axis - 1 for axis in order[1:])
                self._one = FusedTensor(fused.shape[1:], names, axes[1:], order)

    def part(self, place: int) -> Tensor:
        """All of a part."""
        which, within = divmod(place, self._each)
        if which != self._read:
            self._parts.clear()  # before the next matrix is there
            matrix = self.whole[which : which + 1] if self._by_matrix else self.whole[:]
            self._parts = [part for _, part in self._one.split(matrix)]
            self._read = which
        found = self._parts[within]
        if within == self._each - 1:
            self._parts, self._read = [], -1
        return found


@dataclass(frozen=True, slots=True)
class FusedPart:
    """A part of a fused tensor, to be read by slices.

    Attributes:
        matrices: of the whole.
        place: which part it is.
    """

    matrices: _Matrices
    place: int

    @property
    def why(self) -> str | None:
        """Why products do not read its codes; None: it has none."""
        return getattr(self.matrices.whole, "why", None)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """A part of it, or all."""
        return self.matrices.part(self.place)[index]


# What a weight may be stored as, or sent as. Integers, booleans and floats of eight bits are codes
# of a quantisation: without their scales they are other numbers.
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Allocate = Callable[..., Any]  # `Ops.allocate`
# How weights are quantised: one of `QUANTIZATIONS`, or the format of each parameter by its name.
Formats = str | Mapping[str, Format] | None


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has its numbers in memory, as they are: kernels read them there. A DTensor
    has none of its own.
    """
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_neg():
        return False
    return tensor.numel() == 0 or tensor.data_ptr() != 0


BLOCKS = "_blocks"  # the end of a name under which a checkpoint holds codes of MXFP4
HEAD = "lm_head.weight"  # in a checkpoint, whether it is tied to the embedding or not

# Numbers of an activation, of which the last two are not trained.
XIELU = ("alpha_p", "alpha_n", "beta", "eps")

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


def param_table(spec: ModelSpec, part: ModelShard | None = None) -> tuple[ParamSpec, ...]:
    """Every parameter of a model, or of a rank's part of it.

    Args:
        spec: of the whole model.
        part: what the rank holds; None: all of it.
    """
    part = part if part is not None else shard_of(spec)
    hidden, vocab = spec.hidden_size, spec.vocab_size
    table: list[ParamSpec] = []
    if part.has_embedding:
        source = Source("model.embed_tokens.weight", (vocab, hidden), 0, _of(part.vocab, vocab))
        tied = HEAD if spec.tie_word_embeddings else None
        embed = _plain("embed", source)
        table.append(embed if tied is None else replace(embed, tied=tied, codes="head"))
    if spec.layer_inputs:
        table += _layer_inputs(spec)
    for place, i in enumerate(part.layers):
        if spec.state is not None and spec.state.layers[i]:
            table += _with_state(spec, f"layers.{place}", f"model.layers.{i}")
        else:
            attention = _attention if spec.latent is None else _latent_attention
            table += attention(part, i, f"layers.{place}", f"model.layers.{i}.self_attn")
        has_experts = spec.moe is not None and spec.moe.layers[i]
        if spec.moe is not None and has_experts:
            table += _experts(part, spec.moe, f"layers.{place}", f"model.layers.{i}")
        if spec.moe is None or not has_experts or spec.moe.beside:
            table += _mlp(part, i, f"layers.{place}", f"model.layers.{i}.mlp")
        table += _own_of_layer(spec, f"layers.{place}", f"model.layers.{i}")
        table += [
            _norm(spec, f"layers.{place}.{own}", f"model.layers.{i}.{hf}.weight", hidden)
            for own, hf in _NORMS[spec.norms]
        ]
    if part.place.is_last_stage:
        table.append(_norm(spec, "norm", "model.norm.weight", hidden))
    if part.has_head:
        head = _plain("head", Source(HEAD, (vocab, hidden), 0, _of(part.vocab, vocab)))
        table.append(replace(head, codes="head"))
    if spec.bare_norms:
        table = [param for param in table if not param.name.endswith("norm")]
    found = tuple(_renamed(param, spec.renamed) for param in table)
    return tuple(map(_also_named, found)) if spec.is_text_part else found


def _renamed(param: ParamSpec, names: tuple[tuple[str, str], ...]) -> ParamSpec:
    """The same under the names of a checkpoint that calls some parts otherwise."""
    sources = param.sources
    for ours, theirs in names:
        sources = tuple(replace(each, name=each.name.replace(ours, theirs)) for each in sources)
    return replace(param, sources=sources)


def _also_named(param: ParamSpec) -> ParamSpec:
    """With all names by which a checkpoint of a larger class may call its tensors."""
    names = [each.name for each in param.sources] + ([] if param.tied is None else [param.tied])
    return replace(
        param, other_names=tuple((name, other) for name in names for other in other_names(name))
    )


def _layer_inputs(spec: ModelSpec) -> list[ParamSpec]:
    """What makes the inputs of all layers."""
    hidden, width = spec.hidden_size, spec.num_layers * spec.layer_inputs
    known = Source("model.embed_tokens_per_layer.weight", (spec.layer_vocab, width))
    project = Source("model.per_layer_model_projection.weight", (width, hidden))
    norm = "model.per_layer_projection_norm.weight"
    return [
        _plain("inputs_embed", known),
        _product("inputs_project", project),
        _norm(spec, "inputs_norm", norm, spec.layer_inputs),
    ]


def _own_of_layer(spec: ModelSpec, own: str, layer: str) -> list[ParamSpec]:
    """What a layer does with its input, and the number that it is multiplied by."""
    hidden, width, found = spec.hidden_size, spec.layer_inputs, list[ParamSpec]()
    if width:
        gate = Source(f"{layer}.per_layer_input_gate.weight", (width, hidden))
        out = Source(f"{layer}.per_layer_projection.weight", (hidden, width))
        norm = f"{layer}.post_per_layer_input_norm.weight"
        found += [
            _product(f"{own}.input_gate", gate),
            _product(f"{own}.input_out", out),
            _norm(spec, f"{own}.input_norm", norm, hidden),
        ]
    if spec.layer_scales:
        scale = _plain(f"{own}.scale", Source(f"{layer}.layer_scalar", (1,)))
        found.append(replace(scale, keep_float32=True))
    return found


def _with_state(spec: ModelSpec, own: str, layer: str) -> list[ParamSpec]:
    if isinstance(spec.state, DeltaNet):
        return _delta_net(spec, spec.state, own, f"{layer}.linear_attn")
    assert spec.state is not None
    return _short_conv(spec, spec.state, own, f"{layer}.conv")


def _delta_net(spec: ModelSpec, net: DeltaNet, own: str, hf: str) -> list[ParamSpec]:
    """Its projections as one: inputs of the convolution, gates, betas, decays."""
    hidden, heads = spec.hidden_size, net.value_heads
    rows: dict[str, tuple[int, tuple[range, ...]]]
    if net.joint:
        group = heads // net.key_heads
        wide = group * net.value_dim
        qkvz, ba = (net.key_dim, net.key_dim, wide, wide), (group, group)
        rows = {
            f"in_proj_{name}": (net.key_heads * sum(sizes), _by_part(sizes, net.key_heads))
            for name, sizes in (("qkvz", qkvz), ("ba", ba))
        }
    else:
        sizes = {"qkv": net.channels, "z": net.value_width, "b": heads, "a": heads}
        rows = {f"in_proj_{name}": (size, (range(size),)) for name, size in sizes.items()}
    floats = {"log_decay": "A_log", "decay_bias": "dt_bias"}
    return [
        replace(_stacked(f"{own}.mix_in", hf, "weight", rows, (hidden,)), codes="layers"),
        _plain(f"{own}.conv", Source(f"{hf}.conv1d.weight", (net.channels, 1, net.taps))),
        *(
            replace(_plain(f"{own}.{name}", Source(f"{hf}.{theirs}", (heads,))), keep_float32=True)
            for name, theirs in floats.items()
        ),
        _plain(f"{own}.mix_norm", Source(f"{hf}.norm.weight", (net.value_dim,))),
        _product(f"{own}.mix_out", Source(f"{hf}.out_proj.weight", (hidden, net.value_width))),
    ]


def _by_part(sizes: tuple[int, ...], heads: int) -> tuple[range, ...]:
    """Rows that stand by head, in each by part, in the order of parts: the first one of all
    heads, then the second.
    """
    whole, starts = sum(sizes), (0, *accumulate(sizes))
    return tuple(
        range(head * whole + start, head * whole + start + size)
        for start, size in zip(starts, sizes, strict=False)
        for head in range(heads)
    )


def _short_conv(spec: ModelSpec, conv: ShortConv, own: str, hf: str) -> list[ParamSpec]:
    hidden, channels = spec.hidden_size, conv.channels
    shapes = {
        "mix_in": ("in_proj", (3 * channels, hidden)),
        "conv": ("conv", (channels, 1, conv.taps)),
        "mix_out": ("out_proj", (hidden, channels)),
    }
    found: list[ParamSpec] = []
    for name, (theirs, shape) in shapes.items():
        make = _plain if name == "conv" else _product
        found.append(make(f"{own}.{name}", Source(f"{hf}.{theirs}.weight", shape)))
        if conv.bias:
            bias = Source(f"{hf}.{theirs}.bias", shape[:1])
            found.append(_plain(f"{own}.{name}_bias", bias))
    return found


def _attention(part: ModelShard, layer: int, own: str, hf: str) -> list[ParamSpec]:
    spec, kind, kv_heads = part.whole, part.whole.layer(layer), part.kv_heads_of(layer)
    size, makes_keys = kind.head_dim, kind.keys_of == layer
    hidden, q_rows, kv_rows = spec.hidden_size, spec.num_heads * size, kind.kept
    group = spec.num_heads // kind.num_kv_heads
    kv = range(kv_heads.start * size, kv_heads.stop * size)
    # all query heads that its KV heads serve
    q_heads = range(kv_heads.start * group, kv_heads.stop * group)
    q = range(q_heads.start * size, q_heads.stop * size)
    rows: dict[str, tuple[int, tuple[range, ...]]] = {"q_proj": (q_rows, (q,))}
    if makes_keys:
        rows["k_proj"] = (kv_rows, (kv,))
    if makes_keys and not kind.joint:
        rows["v_proj"] = (kv_rows, (kv,))
    if spec.gated_attention:  # of each head queries, then gates: here all gates, then all queries
        parts = _by_part((size, size), spec.num_heads)
        rows["q_proj"] = (2 * q_rows, (*parts[spec.num_heads :], *parts[: spec.num_heads]))
    if spec.fused_qkv:
        after, value = q_rows, q_rows + kv_rows
        parts = (
            q,
            range(after + kv.start, after + kv.stop),
            range(value + kv.start, value + kv.stop),
        )
        rows = {"qkv_proj": (q_rows + 2 * kv_rows, parts)}
    columns = range(part.heads.start * size, part.heads.stop * size)
    params = [
        replace(_stacked(f"{own}.qkv", hf, "weight", rows, (hidden,)), codes="layers"),
        _product(
            f"{own}.o",
            Source(f"{hf}.o_proj.weight", (hidden, q_rows), 1, _of(columns, q_rows)),
            part.head_segments_of(layer),
        ),
    ]
    if spec.qkv_bias:
        params.append(_stacked(f"{own}.qkv_bias", hf, "bias", rows, ()))
    if spec.attention_sinks:
        sinks = Source(f"{hf}.sinks", (spec.num_heads,), 0, _of(q_heads, spec.num_heads))
        params.append(replace(_plain(f"{own}.sinks", sinks), keep_float32=True))
    if spec.o_bias:
        params.append(_plain(f"{own}.o_bias", Source(f"{hf}.o_proj.bias", (hidden,))))
    if spec.qk_norm:
        widths = (size, size) if spec.qk_norm == "head" else (q_rows, kv_rows)
        params += [
            _norm(spec, f"{own}.{which}_norm", f"{hf}.{which}_norm.weight", width)
            for which, width in zip("qk", widths, strict=True)
            if which == "q" or makes_keys
        ]
    return params


def _latent_attention(part: ModelShard, _layer: int, own: str, hf: str) -> list[ParamSpec]:
    spec = part.whole
    latent = spec.latent
    assert latent is not None
    sizes, heads, hidden = latent.sizes, spec.num_heads, spec.hidden_size
    matrices = {
        "kv_a": ("kv_a_proj_with_mqa", sizes.rank + sizes.rotary, hidden),
        "kv_b": ("kv_b_proj", heads * (sizes.plain + sizes.value), sizes.rank),
        "o": ("o_proj", hidden, heads * sizes.value),
    }
    norms = {"kv_a_norm": ("kv_a_layernorm", sizes.rank)}
    q_rows = heads * (sizes.plain + sizes.rotary)
    if latent.query_rank is None:
        matrices["q_b"] = ("q_proj", q_rows, hidden)
    else:
        matrices["q_a"] = ("q_a_proj", latent.query_rank, hidden)
        matrices["q_b"] = ("q_b_proj", q_rows, latent.query_rank)
        norms["q_a_norm"] = ("q_a_layernorm", latent.query_rank)
    return [
        *(
            replace(
                _plain(f"{own}.{name}", Source(f"{hf}.{source}.weight", (rows, columns))),
                latent=sizes if name == "kv_b" else None,
                codes=None if name == "kv_b" else "layers",
                segments=part.head_segments if name == "o" else None,
            )
            for name, (source, rows, columns) in matrices.items()
        ),
        *(
            _norm(spec, f"{own}.{name}", f"{hf}.{source}.weight", width)
            for name, (source, width) in norms.items()
        ),
    ]


def _mlp(part: ModelShard, layer: int, own: str, hf: str) -> list[ParamSpec]:
    spec, held = part.whole, part.inner_of(layer)
    hidden, inner = spec.hidden_size, spec.layer(layer).intermediate_size
    rows = {"gate_proj": (inner, (held,)), "up_proj": (inner, (held,))}
    if spec.fused_gate_up:
        parts = (held, range(inner + held.start, inner + held.stop))
        rows = {"gate_up_proj": (2 * inner, parts)}
    if not spec.gated:
        rows = {"up_proj": (inner, (held,))}
    numbers: list[ParamSpec] = []
    if spec.activation == "xielu":
        sources = tuple(Source(f"{hf}.act_fn.{name}", (1,)) for name in XIELU)
        numbers.append(ParamSpec(f"{own}.act", (4,), sources, keep_float32=True))
    up = _stacked(f"{own}.gate_up" if spec.gated else f"{own}.up", hf, "weight", rows, (hidden,))
    return [
        replace(up, codes="layers"),
        *numbers,
        _product(
            f"{own}.down",
            Source(f"{hf}.down_proj.weight", (hidden, inner), 1, _of(held, inner)),
            part.inner_segments_of(layer),
        ),
    ]


def _experts(part: ModelShard, moe: MoeSpec, own: str, layer: str) -> list[ParamSpec]:
    """The router, and the experts' matrices one below the other: the gate and up rows of each
    expert together.

    Of experts that other ranks hold there are no rows here.
    """
    hidden, inner, count = part.whole.hidden_size, moe.intermediate_size, moe.num_experts
    gate, up, down = moe.projections
    hf, names = f"{layer}.{moe.module}", moe.in_memory

    gate_up = _by_expert(part, count, hf, (gate, up), "weight", (inner, hidden))

    def fused(names: tuple[str, ...], *shape: int, axes: str = "") -> tuple[Fused, ...]:
        if not (axes and moe.columns):
            return tuple(Fused(f"{layer}.{name}", shape) for name in names)
        how, blocks = (
            _of_columns(count, hidden, inner)[axes],
            _of_blocks(count, hidden, inner)[axes],
        )
        return (
            *(Fused(f"{layer}.{name}", *how) for name in names),
            *(Fused(f"{layer}.{name}{BLOCKS}", *blocks) for name in names),
        )

    router = Source(f"{hf}.{moe.router}", (count, hidden))
    gates: list[Source] = []  # of the shared expert: one more row of the router
    if moe.shared is not None and moe.shared.gate is not None:
        gates = [Source(f"{layer}.{moe.shared.gate}.weight", (1, hidden))]
    return [
        ParamSpec(
            f"{own}.router",
            (count + len(gates), hidden),
            (router, *gates),
            fused=() if gates else fused(names.router, count, hidden),
        ),
        *_router_bias(moe, own, hf, layer),
        ParamSpec(
            f"{own}.experts_gate_up",
            (len(part.experts) * 2 * inner, hidden),
            gate_up,
            fused=fused(names.gate_up, count, 2 * inner, hidden, axes="gate_up"),
            codes="layers",
        ),
        ParamSpec(
            f"{own}.experts_down",
            (len(part.experts) * hidden, inner),
            _by_expert(part, count, hf, (down,), "weight", (hidden, inner)),
            fused=fused(names.down, count, hidden, inner, axes="down"),
            codes="layers",
        ),
        *_expert_biases(part, moe, own, hf, layer),
        *_shared_expert(hidden, moe, own, layer),
        *_beside_an_mlp(part.whole, moe, own, layer),
    ]


def _by_expert(
    part: ModelShard,
    count: int,
    hf: str,
    projections: tuple[str, ...],
    kind: str,
    shape: tuple[int, ...],
) -> tuple[Source, ...]:
    """Tensors of each expert, of which the rank takes those of its own."""
    return tuple(
        Source(
            f"{hf}.experts.{expert}.{projection}.{kind}",
            shape,
            0,
            None if expert in part.experts else ((0, 0),),
        )
        for expert in range(count)
        for projection in projections
    )


def _router_bias(moe: MoeSpec, own: str, hf: str, layer: str) -> list[ParamSpec]:
    if moe.bias is None:
        return []
    source = Source(f"{hf}.{moe.bias}", moe.bias_shape)
    names = tuple(Fused(f"{layer}.{name}", moe.bias_shape) for name in moe.in_memory.bias)
    return [ParamSpec(f"{own}.router_bias", source.shape, (source,), True, fused=names)]


def _of_columns(
    count: int, hidden: int, inner: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """How gpt-oss holds all experts of a layer: what others have as rows are columns, and those of
    gate and up take turns. Shape, axes and order, see `Fused`.
    """
    return {
        "gate_up": ((count, hidden, 2 * inner), (count, hidden, inner, 2), (0, 3, 2, 1)),
        "down": ((count, inner, hidden), (count, inner, hidden), (0, 2, 1)),
        "gate_up_bias": ((count, 2 * inner), (count, inner, 2), (0, 2, 1)),
        "down_bias": ((count, hidden), (count, hidden), (0, 1)),
    }


def _of_blocks(
    count: int, hidden: int, inner: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """How its blocks of MXFP4 hold the same, by rows."""
    return {
        "gate_up": ((count, 2 * inner, hidden), (count, inner, 2, hidden), (0, 2, 1, 3)),
        "down": ((count, hidden, inner), (count, hidden, inner), (0, 1, 2)),
    }


def _expert_biases(
    part: ModelShard, moe: MoeSpec, own: str, hf: str, layer: str
) -> list[ParamSpec]:
    """Of the router, and of every expert: gate and up, then down."""
    if not moe.biases:
        return []
    hidden, inner, count = part.whole.hidden_size, moe.intermediate_size, moe.num_experts
    gate, up, down = moe.projections
    router = Source(f"{hf}.router.bias", (count,))
    table = [replace(_plain(f"{own}.router_logits_bias", router), keep_float32=True)]
    for name, projections, size in (
        ("gate_up", (gate, up), inner),
        ("down", (down,), hidden),
    ):
        sources = _by_expert(part, count, hf, projections, "bias", (size,))
        whole = Fused(
            f"{layer}.mlp.experts.{name}_proj_bias",
            *_of_columns(count, hidden, inner)[f"{name}_bias"],
        )
        rows = len(part.experts) * len(projections) * size
        table.append(ParamSpec(f"{own}.experts_{name}_bias", (rows,), sources, fused=(whole,)))
    return table


def _shared_expert(hidden: int, moe: MoeSpec, own: str, layer: str) -> list[ParamSpec]:
    """Whole on every rank."""
    shared = moe.shared
    if shared is None:
        return []
    inner, (names, down) = shared.intermediate_size, shared.projections
    size, hf = 2 * inner // len(names), f"{layer}.{shared.module}"
    sources = tuple(Source(f"{hf}.{name}.weight", (size, hidden)) for name in names)
    return [
        ParamSpec(f"{own}.shared_gate_up", (2 * inner, hidden), sources, codes="layers"),
        _product(f"{own}.shared_down", Source(f"{hf}.{down}.weight", (hidden, inner))),
    ]


def _beside_an_mlp(spec: ModelSpec, moe: MoeSpec, own: str, layer: str) -> list[ParamSpec]:
    """What experts have that stand beside an MLP: norms, and what multiplies their weights."""
    names: dict[str, str] = {}
    if moe.beside:
        names |= {
            "experts_norm": "pre_feedforward_layernorm_2.weight",
            "experts_out_norm": "post_feedforward_layernorm_2.weight",
            "dense_out_norm": "post_feedforward_layernorm_1.weight",
        }
    if moe.router_norm is not None:
        names["router_norm"] = f"{moe.module}.{moe.router_norm}"
    found = [
        _norm(spec, f"{own}.{name}", f"{layer}.{theirs}", spec.hidden_size)
        for name, theirs in names.items()
    ]
    if moe.scales is not None:
        scales = Source(f"{layer}.{moe.module}.{moe.scales}", (moe.num_experts,))
        found.append(replace(_plain(f"{own}.router_scales", scales), keep_float32=True))
    return found


def slots(table: tuple[ParamSpec, ...]) -> dict[str, Slot]:
    """Checkpoint name -> where it goes, of every tensor that has a place of its own."""
    found: dict[str, Slot] = {}
    for param in table:
        start = 0
        for source in param.sources:
            found[source.name] = Slot(
                source.name,
                source.shape,
                source.axis,
                source.parts,
                param=param.name,
                start=start,
            )
            start += source.local_shape[0]
    return found


def named_slots(table: tuple[ParamSpec, ...]) -> dict[str, Slot]:
    """As `slots`, with tied heads: a checkpoint or an update may hold one."""
    found = slots(table)
    for param in table:
        if param.tied is not None:
            name = param.sources[0].name
            found[param.tied] = replace(found[name], name=param.tied, tied_to=name)
    return found


def fused_tensors(table: tuple[ParamSpec, ...]) -> dict[str, FusedTensor]:
    """What transformers has in memory under other names than the checkpoint, or in one piece."""
    found = {
        each.name: _fused_tensor(each, tuple(source.name for source in param.sources))
        for param in table
        for each in param.fused
    }
    for param in table:
        shapes = {each.name: each.shape for each in param.sources}
        for name, other in param.other_names:
            shape = shapes.get(name, param.sources[0].shape)
            found[other] = FusedTensor(shape, (name,), shape, tuple(range(len(shape))))
    return found


def _fused_tensor(fused: Fused, parts: tuple[str, ...]) -> FusedTensor:
    axes, order = fused.axes, fused.order
    if not axes:
        rows = torch.Size(fused.shape[:-1]).numel()
        axes = (len(parts), rows // len(parts), fused.shape[-1])
        if len(parts) == 1:
            axes = fused.shape
        elif len(fused.shape) == 1:
            axes = (len(parts), fused.shape[0] // len(parts))
        order = tuple(range(len(axes)))
    return FusedTensor(fused.shape, parts, axes, order)


def unfused(
    fused: Mapping[str, FusedTensor], name: str, tensor: Tensor
) -> list[tuple[str, Tensor]]:
    """A tensor by the names of its checkpoint. One of a name or shape that `fused` has not comes
    back as it is.
    """
    if isinstance(tensor, Tensor) and tensor.dim() == 0:  # a number is a vector of one
        return [(name, tensor.view(1))]
    # callers err
    known = fused.get(name) if isinstance(name, str) and isinstance(tensor, Tensor) else None
    if known is None or tuple(tensor.shape) != known.shape:
        return [(name, tensor)]
    return known.split(tensor)


def allocate(
    table: tuple[ParamSpec, ...],
    dtype: torch.dtype,
    device: torch.device,
    matrix: Allocate = reference.allocate,
    quantization: Formats = None,
) -> dict[str, Any]:
    """Uninitialised parameters by name. Matrices are what `matrix` makes, in the formats of
    `quantization`; vectors are tensors.
    """
    return {
        param.name: matrix(param.shape, dtype, device, **_how(param, quantization))
        if len(param.shape) == 2 and not param.keep_float32
        else torch.empty(
            param.shape, dtype=torch.float32 if param.keep_float32 else dtype, device=device
        )
        for param in table
    }


def _how(param: ParamSpec, quantization: Formats) -> dict[str, Any]:
    """What `Ops.allocate` is told beside the sizes."""
    form = param.form(quantization)
    if form is not None:
        return {"form": form, "segments": param.segments}
    return {} if param.latent is None else {"latent": param.latent}


def num_bytes(
    table: tuple[ParamSpec, ...], dtype: torch.dtype, quantization: Formats = None
) -> int:
    """Bytes that the parameters of a table take."""
    return sum(_bytes_of(param, dtype, param.form(quantization)) for param in table)


def codes_bytes(table: tuple[ParamSpec, ...], dtype: torch.dtype, quantization: Formats) -> int:
    """Bytes that copies of those of them that may be quantised take."""
    forms = ((param, param.form(quantization)) for param in table)
    return sum(_bytes_of(param, dtype, form) for param, form in forms if form is not None)


def _bytes_of(param: ParamSpec, dtype: torch.dtype, form: Format | None) -> int:
    if form is None:
        size = 4 if param.keep_float32 else dtype.itemsize
        return torch.Size(param.shape).numel() * size
    rows, columns = param.shape
    groups = len(groups_of(bounds_of(param.segments, columns, form), form))
    return rows * (-(-columns * form.bits // 8) + groups * form.group_bytes)


def require_whole_groups(
    spec: ModelSpec, ranks: int, name: str, quantization: Formats = None
) -> None:
    """Raise `ConfigError` where a rank's columns of a quantised weight would not be whole groups,
    or its sums not those of one rank.

    Args:
        spec: of the whole model.
        ranks: that share a layer.
        name: of `EngineConfig.quantization`.
        quantization: the same, or the format of each parameter.
    """
    for param in param_table(spec):
        form, segments = param.form(quantization), param.segments
        if form is None or segments is None:
            continue
        if bounds_of(segments, param.shape[1], form) != segments:
            raise ConfigError(
                f"quantization={name!r} is not possible with tensor_parallel={ranks} for "
                f"{spec.architecture}: the {param.shape[1]} columns of {param.name!r} are not cut "
                f"at multiples of {form.group or 4}; use tensor_parallel=1."
            )


def form_of(param: Any) -> Format | None:
    """The format of a parameter; None: it is no codes."""
    return getattr(param, "form", None)


def numbers_of(param: Any) -> Tensor:
    """All numbers of a parameter, [rows, columns]: a view, or a copy where it is packed."""
    return param if isinstance(param, Tensor) else param.read()


def coded_copies(
    table: tuple[ParamSpec, ...], params: Mapping[str, Any], matrix: Allocate, quantization: Formats
) -> dict[str, Any]:
    """The same parameters, with matrices that may be quantised as copies in codes; the others are
    shared.
    """
    found = dict(params)
    for param in table:
        own = params[param.name]
        if param.form(quantization) is not None and form_of(own) is None:
            copy = matrix(param.shape, own.dtype, own.device, **_how(param, quantization))
            copy.write(0, numbers_of(own))
            found[param.name] = copy
    return found


def formats_of(params: Mapping[str, Any]) -> dict[str, Format]:
    """The format of each parameter that is codes."""
    return {name: form for name, param in params.items() if (form := form_of(param)) is not None}


def write(params: dict[str, Any], slot: Slot, tensor: Tensor) -> None:
    """Copy this rank's part of one checkpoint tensor (`Slot.take`) into its place, in place, cast
    to the parameter's dtype; then, where the parameter is quantised, to codes.
    """
    param = params[slot.param]
    if isinstance(param, Tensor):
        param.narrow(0, slot.start, slot.local_shape[0]).copy_(tensor)
    else:
        # so that a trainer may send more digits than the model's dtype has, or not
        param.write(slot.start, tensor if form_of(param) is None else tensor.to(param.dtype))


def patch(params: dict[str, Any], slot: Slot, indices: Tensor, values: Tensor) -> None:
    """Change single numbers of this rank's part of one checkpoint tensor in place: flat row-major
    `indices` int64 [n], `values` [n]. Not of quantised parameters.
    """
    param = params[slot.param]
    if isinstance(param, Tensor):
        flat = param.narrow(0, slot.start, slot.local_shape[0]).view(-1)
        flat.index_copy_(0, indices.to(flat.device), values.to(flat.device, flat.dtype))
    else:
        param.patch(slot.start, indices, values)


def read(params: dict[str, Any], slot: Slot) -> Tensor:
    """What this rank holds of one checkpoint tensor, in the parameter's dtype: a view, or a copy
    where weights are packed; of codes what they stand for.
    """
    param, rows = params[slot.param], slot.local_shape[0]
    if isinstance(param, Tensor):
        return param.narrow(0, slot.start, rows)
    return param.read(slot.start, rows)


def as_held(params: dict[str, Any], slot: Slot, tensor: Tensor) -> Tensor:
    """What `read` would give once `write` had been given this tensor, on the parameter's device.
    Nothing is written.
    """
    param = params[slot.param]
    if form_of(param) is None:
        return tensor.to(param.device, param.dtype)
    scratch = {slot.param: param.clone()}
    write(scratch, slot, tensor)
    return read(scratch, slot)


def _of(part: range, size: int) -> tuple[tuple[int, int], ...] | None:
    """A part as `Source` says it."""
    return None if len(part) == size else ((part.start, part.stop),)


def _plain(name: str, source: Source) -> ParamSpec:
    return ParamSpec(name, source.local_shape, (source,))


def _product(name: str, source: Source, segments: tuple[int, ...] | None = None) -> ParamSpec:
    """A matrix of a layer that `Ops.linear` multiplies by."""
    return replace(_plain(name, source), codes="layers", segments=segments)


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
            None if parts == (range(count),) else tuple((part.start, part.stop) for part in parts),
        )
        for projection, (count, parts) in rows.items()
    )
    return ParamSpec(name, (sum(source.local_shape[0] for source in sources), *inner), sources)
