"""The parameters of layers of experts."""

from dataclasses import replace

from nano_inference.models.parameters.param import Fused, ParamSpec, Source
from nano_inference.models.parameters.rows import norm_param, plain_param, product_param
from nano_inference.models.sharding.shard import ModelShard
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.formats import FORMATS, Format, Stack

BLOCKS = "_blocks"  # suffix of checkpoint names of MXFP4 codes


def has_blocks(spec: ModelSpec) -> bool:
    """Return True if a checkpoint stores experts, and nothing else, as codes in MXFP4."""
    said = spec.quantisation
    return said is not None and {scheme.format for _, scheme in said.schemes} == {"mxfp4"}


def block_formats(spec: ModelSpec, table: tuple[ParamSpec, ...]) -> dict[str, Format | Stack]:
    """Return the format of the parameters that a checkpoint stores as codes in MXFP4."""
    if not has_blocks(spec):
        return {}
    form = FORMATS["mxfp4-32"]
    stored = (param for param in table if any(each.name.endswith(BLOCKS) for each in param.fused))
    return {param.name: form for param in stored}


def expert_params(part: ModelShard, moe: MoeSpec, prefix: str, layer: str) -> list[ParamSpec]:
    """Return the router, and the experts' matrices stacked along rows.

    Gate and up rows of an expert are adjacent. Experts of other ranks have no rows.
    """
    hidden, inner, count = part.whole.hidden_size, moe.intermediate_size, moe.num_experts
    gate, up, down = moe.projections
    hf, names = f"{layer}.{moe.module}", moe.in_memory
    gate_up = _by_expert(part, count, hf, (gate, up), "weight", (inner, hidden))

    def fused(names: tuple[str, ...], *shape: int, axes: str = "") -> tuple[Fused, ...]:
        if not (axes and moe.columns):
            return tuple(Fused(f"{layer}.{name}", shape) for name in names)
        how = _of_columns(count, hidden, inner)[axes]
        blocks = _of_blocks(count, hidden, inner)[axes]
        return (
            *(Fused(f"{layer}.{name}", *how) for name in names),
            *(Fused(f"{layer}.{name}{BLOCKS}", *blocks) for name in names),
        )

    gates: list[Source] = []  # gate of the shared expert: an additional row of the router
    if moe.shared is not None and moe.shared.gate is not None:
        gates = [Source(f"{layer}.{moe.shared.gate}.weight", (1, hidden))]
    return [
        ParamSpec(
            f"{prefix}.router",
            (count + len(gates), hidden),
            (Source(f"{hf}.{moe.router}", (count, hidden)), *gates),
            fused=() if gates else fused(names.router, count, hidden),
        ),
        *_router_bias(moe, prefix, hf, layer),
        ParamSpec(
            f"{prefix}.experts_gate_up",
            (len(part.experts) * 2 * inner, hidden),
            gate_up,
            fused=fused(names.gate_up, count, 2 * inner, hidden, axes="gate_up"),
            codes="layers",
        ),
        ParamSpec(
            f"{prefix}.experts_down",
            (len(part.experts) * hidden, inner),
            _by_expert(part, count, hf, (down,), "weight", (hidden, inner)),
            fused=fused(names.down, count, hidden, inner, axes="down"),
            codes="layers",
        ),
        *_expert_biases(part, moe, prefix, hf, layer),
        *_shared_expert(hidden, moe, prefix, layer),
        *_beside_an_mlp(part.whole, moe, prefix, layer),
    ]


def _by_expert(
    part: ModelShard,
    count: int,
    hf: str,
    projections: tuple[str, ...],
    kind: str,
    shape: tuple[int, ...],
) -> tuple[Source, ...]:
    """Return the tensors of each expert, empty if another rank holds it."""
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


def _router_bias(moe: MoeSpec, prefix: str, hf: str, layer: str) -> list[ParamSpec]:
    if moe.bias is None:
        return []
    source = Source(f"{hf}.{moe.bias}", moe.bias_shape)
    names = tuple(Fused(f"{layer}.{name}", moe.bias_shape) for name in moe.in_memory.bias)
    return [ParamSpec(f"{prefix}.router_bias", source.shape, (source,), True, fused=names)]


def _of_columns(
    count: int, hidden: int, inner: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Return gpt-oss's layout of all experts of a layer: shape, axes and order, as in `Fused`.

    Matrices are transposed, and the columns of gate and up alternate.
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
    """Return gpt-oss's layout of MXFP4 blocks: not transposed, rows of gate and up alternate."""
    return {
        "gate_up": ((count, 2 * inner, hidden), (count, inner, 2, hidden), (0, 2, 1, 3)),
        "down": ((count, hidden, inner), (count, hidden, inner), (0, 1, 2)),
    }


def _expert_biases(
    part: ModelShard, moe: MoeSpec, prefix: str, hf: str, layer: str
) -> list[ParamSpec]:
    """Return the biases of the router and of every expert: gate and up, then down."""
    if not moe.biases:
        return []
    hidden, inner, count = part.whole.hidden_size, moe.intermediate_size, moe.num_experts
    gate, up, down = moe.projections
    router = Source(f"{hf}.router.bias", (count,))
    table = [replace(plain_param(f"{prefix}.router_logits_bias", router), keep_float32=True)]
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
        table.append(ParamSpec(f"{prefix}.experts_{name}_bias", (rows,), sources, fused=(whole,)))
    return table


def _shared_expert(hidden: int, moe: MoeSpec, prefix: str, layer: str) -> list[ParamSpec]:
    """Return the shared expert, which every rank holds whole."""
    shared = moe.shared
    if shared is None:
        return []
    inner, (names, down) = shared.intermediate_size, shared.projections
    size, hf = 2 * inner // len(names), f"{layer}.{shared.module}"
    sources = tuple(Source(f"{hf}.{name}.weight", (size, hidden)) for name in names)
    return [
        ParamSpec(f"{prefix}.shared_gate_up", (2 * inner, hidden), sources, codes="layers"),
        product_param(f"{prefix}.shared_down", Source(f"{hf}.{down}.weight", (hidden, inner))),
    ]


def _beside_an_mlp(spec: ModelSpec, moe: MoeSpec, prefix: str, layer: str) -> list[ParamSpec]:
    """Return the norms and factors of experts parallel to an MLP."""
    names: dict[str, str] = {}
    if moe.beside:
        names |= {
            "experts_norm": "pre_feedforward_layernorm_2.weight",
            "experts_out_norm": "post_feedforward_layernorm_2.weight",
            "dense_out_norm": "post_feedforward_layernorm_1.weight",
        }
    if moe.router_norm is not None:
        names["router_norm"] = f"{moe.module}.{moe.router_norm}"
    params = [
        norm_param(spec, f"{prefix}.{name}", f"{layer}.{theirs}", spec.hidden_size)
        for name, theirs in names.items()
    ]
    if moe.scales is not None:
        scales = Source(f"{layer}.{moe.module}.{moe.scales}", (moe.num_experts,))
        params.append(replace(plain_param(f"{prefix}.router_scales", scales), keep_float32=True))
    return params
