"""`mtp_table` lists the parameters of a layer of multi-token prediction, `whole_table` those of a
model with such a layer.
"""

from dataclasses import replace

from nano_inference.models.parameters.param import ParamSpec, Source
from nano_inference.models.parameters.rows import norm_param, product_param
from nano_inference.models.parameters.table import param_table
from nano_inference.models.sharding.shard import ModelShard
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.mtp import PARAMS
from nano_inference.models.spec.mtp_layer import mtp_layer

_LAYER, _SOURCE = "layers.0.", "model.layers.0."


def whole_table(spec: ModelSpec, part: ModelShard | None = None) -> tuple[ParamSpec, ...]:
    """Return `param_table`, and the multi-token prediction layer's parameters if the spec has one.

    One rank holds all of that layer.
    """
    return (*param_table(spec, part), *mtp_table(spec))


def mtp_table(spec: ModelSpec) -> tuple[ParamSpec, ...]:
    """Return the parameters of a model's multi-token prediction layer. They begin with `PARAMS`."""
    mtp, hidden = spec.mtp, spec.hidden_size
    if mtp is None:
        return ()
    norms = {"embed_norm": mtp.embed_norm, "hidden_norm": mtp.hidden_norm, "norm": mtp.norm}
    of_layer = [row for row in param_table(mtp_layer(spec)) if row.name.startswith(_LAYER)]
    return (
        *(norm_param(spec, PARAMS + name, theirs, hidden) for name, theirs in norms.items()),
        product_param(PARAMS + "project", Source(mtp.project, (hidden, 2 * hidden))),
        *(_renamed(row, mtp.layer + ".") for row in of_layer),
    )


def drafting_table(spec: ModelSpec) -> tuple[ParamSpec, ...]:
    """Return the parameters that drafts by this layer are computed and drawn with."""
    head = "embed" if spec.tie_word_embeddings else "head"
    return (*(row for row in param_table(spec) if row.name == head), *mtp_table(spec))


def _renamed(row: ParamSpec, layer: str) -> ParamSpec:
    """Return a row of the layer with the names that it has in the model."""
    return replace(
        row,
        name=PARAMS + row.name,
        sources=tuple(
            replace(each, name=each.name.replace(_SOURCE, layer, 1)) for each in row.sources
        ),
        fused=tuple(each._replace(name=each.name.replace(_SOURCE, layer, 1)) for each in row.fused),
    )
