"""`ModelPart`, the source of all blocks, and `Step`, the argument of their calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol

from nano_inference.arrays import Dtype, Tensor, namespace
from nano_inference.models.rope import Rotation
from nano_inference.models.routes import RouteRecord
from nano_inference.models.sharding.context import SharedContext
from nano_inference.models.sharding.rank_exchange import RankExchange
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.taps import Taps
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import KvcacheView, Operations, Ops, X
from nano_inference.ops.rowwise import Norm


def rounded(number: float, dtype: Dtype) -> float:
    """Round a number to a dtype, by way of float32."""
    xp = namespace(dtype)
    return xp.tensor(number, dtype=xp.float32).to(dtype).item()


@dataclass(frozen=True, eq=False)
class ModelPart:
    """The part of a model that this rank holds.

    Attributes:
        spec: Description of this part.
        params: Weights by name, with prefix `layers.N.` for those of a layer.
        ops: Operations of the backend.
        exchange: The other ranks of the model.
        context: Ranks that share every sequence's keys and values. None: no such ranks.
        ropes: Rotary tables of each layer.
        dtype: Dtype of the weights.
        ones: Weights [width] of norms, for a model whose norms have none. Otherwise None.
    """

    spec: ModelSpec
    params: Mapping[str, Any]
    ops: Ops
    exchange: RankExchange
    context: SharedContext | None
    ropes: tuple[Rotation, ...]
    dtype: Dtype
    ones: Tensor | None

    @property
    def float32(self) -> Dtype:
        """Dtype of the residual stream."""
        return namespace(self.dtype).float32

    @property
    def not_rounded(self) -> Norm:
        """Norm that only adds a block's output to the residual stream."""
        return Norm(None, 0.0, 0.0, self.float32)

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Return the norm of this name, as wide as the hidden state unless `width` is set.

        A norm that the model lacks only rounds the residual stream for the next product.
        """
        spec = self.spec
        weight = self.params.get(name)
        if self.ones is not None:
            weight = self.ones[: width or spec.hidden_size]
        return Norm(weight, spec.rms_norm_eps, spec.norm_offset, self.dtype)

    def norm_after(self, name: str) -> Norm | None:
        """Return the unrounded norm of a block's output, or None if the model has no such norm."""
        return self.norm(name)._replace(dtype=self.float32) if name in self.params else None


@dataclass(frozen=True, slots=True)
class Step(Generic[X]):
    """One forward pass.

    Attributes:
        ops: Operations that compute immediately or record the calls.
        batch: Rows of the pass.
        view: The KV tensors.
        plans: Plans from `Ops.plan_attention`, by window.
        inputs: Inputs of all layers, concatenated (Gemma 4). None: no such inputs.
        routes: Record of the experts of every row. None: not requested.
        taps: Record of the residual stream before some layers. None: not requested.
    """

    ops: Operations[X]
    batch: ForwardBatch
    view: KvcacheView
    plans: Mapping[int, object]
    inputs: X | None
    routes: RouteRecord | None
    taps: Taps | None

    def tapped(self, layer: int, residual: X, hidden_size: int) -> X:
        """Return the residual stream before a layer, recorded if requested."""
        if self.taps is None or layer not in self.taps.layers:
            return residual
        note, float32 = partial(self.taps.note, layer), namespace(self.batch.positions).float32
        return self.ops.call(self.batch, note, (residual,), hidden_size, float32)


class Block(Protocol):
    """A function from normed rows to an addition to the residual stream."""

    def __call__(self, step: Step[X], x: X) -> X:
        """Compute rows [N, columns in] -> [N, columns out]."""
        ...
