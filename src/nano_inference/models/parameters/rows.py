"""Rows of the parameter table, in their usual shapes."""

from dataclasses import replace

from nano_inference.models.parameters.param import ParamSpec, Source
from nano_inference.models.spec.model import ModelSpec


def own_part(part: range, size: int) -> tuple[tuple[int, int], ...] | None:
    """Return a part for `Source.parts`, or None if it is everything."""
    return None if len(part) == size else ((part.start, part.stop),)


def plain_param(name: str, source: Source) -> ParamSpec:
    return ParamSpec(name, source.local_shape, (source,))


def product_param(name: str, source: Source, segments: tuple[int, ...] | None = None) -> ParamSpec:
    """Return a layer's matrix that `Ops.linear` multiplies by."""
    return replace(plain_param(name, source), codes="layers", segments=segments)


def norm_param(spec: ModelSpec, name: str, source: str, width: int) -> ParamSpec:
    # bfloat16 would lose the digits of a small w in 1 + w
    return ParamSpec(
        name, (width,), (Source(source, (width,)),), keep_float32=spec.norm_offset != 0
    )


def stacked_param(
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
