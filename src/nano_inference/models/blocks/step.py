"""`ModelPart`, from which blocks are built, and `Step`, with which they are called."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from nano_inference.models.rope import Rotation
from nano_inference.models.routes import RouteRecord
from nano_inference.models.sharding.context import SharedContext
from nano_inference.models.sharding.rank_exchange import RankExchange
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.taps import Taps
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import KvcacheView, Norm, Operations, Ops, X

NOT_ROUNDED = Norm(None, 0.0, 0.0, torch.float32)  # only adds to the residual stream


@dataclass(frozen=True, eq=False)
class ModelPart:
    """The part of a model that this rank holds.

    Attributes:
        spec: of this part.
        params: weights by name; a layer's begin with `layers.N.`.
        ops: of the backend.
        exchange: the other ranks of the model.
        context: the ranks that share every sequence's keys and values; None: there are none.
        ropes: rotary tables, one entry a layer.
        dtype: of the weights.
        ones: weights [width] of norms, in a model whose norms have none; else None.
    """

    spec: ModelSpec
    params: Mapping[str, Any]
    ops: Ops
    exchange: RankExchange
    context: SharedContext | None
    ropes: tuple[Rotation, ...]
    dtype: torch.dtype
    ones: Tensor | None

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Return the norm of this name, as wide as the hidden state unless `width` is given. A
        norm that the model does not have only rounds the residual stream for the next product.
        """
        spec = self.spec
        weight = self.params.get(name)
        if self.ones is not None:
            weight = self.ones[: width or spec.hidden_size]
        return Norm(weight, spec.rms_norm_eps, spec.norm_offset, self.dtype)

    def norm_after(self, name: str) -> Norm | None:
        """Return the norm of a block's output, which is not rounded; None if the model has no such
        norm.
        """
        return self.norm(name)._replace(dtype=torch.float32) if name in self.params else None


@dataclass(frozen=True, slots=True)
class Step(Generic[X]):
    """One forward pass.

    Attributes:
        ops: operations that compute at once, or record what they are asked for.
        batch: its rows.
        view: the KV tensors.
        plans: what `Ops.plan_attention` gave, by window.
        inputs: the inputs of all layers side by side (Gemma 4); None: layers have none.
        routes: notes the experts of every row; None: they are not wanted.
        taps: notes the residual stream before some layers; None: it is not wanted.
    """

    ops: Operations[X]
    batch: ForwardBatch
    view: KvcacheView
    plans: Mapping[int, object]
    inputs: X | None
    routes: RouteRecord | None
    taps: Taps | None

    def tapped(self, layer: int, residual: X, hidden_size: int) -> X:
        """Return the residual stream before a layer, noted if it is wanted."""
        if self.taps is None or layer not in self.taps.layers:
            return residual
        note = partial(self.taps.note, layer)
        return self.ops.call(self.batch, note, (residual,), hidden_size, torch.float32)


class Block(Protocol):
    """What a layer adds to the residual stream, as a function of its normed rows."""

    def __call__(self, step: Step[X], x: X) -> X:
        """Compute rows [N, columns in] -> [N, columns out]."""
        ...
