"""Additions of Gemma 4 to a layer: experts parallel to the MLP, an input for each layer, and a
factor of the layer's output.
"""

from collections.abc import Callable
from functools import partial

from nano_inference.arrays import Tensor, namespace
from nano_inference.models.blocks.experts import Mixture
from nano_inference.models.blocks.layer import Layer
from nano_inference.models.blocks.step import ModelPart, Step, rounded
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import Operations, X
from nano_inference.ops.rowwise import Norm, gate


class Gemma4Layer:
    """A layer with the additions of Gemma 4.

    Args:
        layer: Attention and MLP.
        beside: Experts parallel to the MLP. None: no experts.
        own_input: Contribution of the layer's input. None: no such input.
        factor: [1], factor of the residual stream after the layer. None: 1.
    """

    def __init__(
        self,
        layer: Layer,
        beside: "ExpertsBeside | None",
        own_input: "OwnInput | None",
        factor: Tensor | None,
    ) -> None:
        self.layer, self.beside, self.own_input, self.factor = layer, beside, own_input, factor

    def __call__(self, step: Step[X], x: X | None, residual: X) -> tuple[X | None, X]:
        x, residual = self.layer(step, x, residual)
        if self.beside is not None:
            x = self.beside(step, x, residual)
        if self.own_input is not None:
            x, residual = self.own_input(step, x, residual)
        if self.factor is None:
            return x, residual
        _, residual = step.ops.rms_norm(x, residual, self.layer.not_rounded, self.layer.scale)
        times, width = partial(_times, self.factor), self.layer.hidden_size
        float32 = self.layer.not_rounded.dtype
        return None, step.ops.call(step.batch, times, (residual,), width, float32)


class ExpertsBeside:
    """Experts that read the same residual stream as the MLP, with their own norms.

    The outputs of MLP and experts are added.
    """

    def __init__(self, part: ModelPart, layer: int, mixture: Mixture) -> None:
        name = f"layers.{layer}."
        self.mixture = mixture
        self.experts_norm = part.norm(name + "experts_norm")
        self.router_norm = None
        if name + "router_norm" in part.params:
            self.router_norm = part.norm(name + "router_norm")
        self.experts_out_norm = part.norm_after(name + "experts_out_norm")
        self.out_norm = part.norm(name + "mlp_out_norm")._replace(dtype=part.float32)

    def __call__(self, step: Step[X], dense: X, residual: X) -> X:
        """Compute (the MLP's output [N, H], residual) -> normalized sum of MLP and experts."""
        ops = step.ops
        rows = ops.rms_norm(None, residual, self.experts_norm, 1.0)[0]
        routed = None
        if self.router_norm is not None:
            routed = ops.rms_norm(None, residual, self.router_norm, 1.0)[0]
        mixed = self.mixture(step, rows, routed)
        if self.experts_out_norm is not None:
            mixed = ops.rms_norm(None, mixed, self.experts_out_norm, 1.0)[0]
        return ops.rms_norm(mixed, dense, self.out_norm, 1.0)[0]


class LayerInputs:
    """Inputs of all layers, made from the token and its embedding."""

    def __init__(self, part: ModelPart) -> None:
        spec, params = part.spec, part.params
        norm = Norm(params["inputs_norm"], spec.rms_norm_eps, spec.norm_offset, part.float32)
        self.project, self.embed = params["inputs_project"], params["inputs_embed"]
        self.rounding, self.residual_scale = Norm(None, 0.0, 0.0, part.dtype), spec.residual_scale
        # rounded as in training
        self.embed_scale = rounded(spec.layer_inputs**0.5, part.dtype)
        self.join = partial(_join, part.ops.normed_rows, norm, spec.hidden_size**-0.5)
        self.width, self.float32 = spec.num_layers * spec.layer_inputs, part.float32

    def __call__(self, ops: Operations[X], batch: ForwardBatch, rows: X) -> X:
        """Compute embeddings [N, H] -> inputs of all layers, float32 [N, layers * width]."""
        rounded = ops.rms_norm(None, rows, self.rounding, self.residual_scale)[0]
        projected = ops.linear(rounded, self.project, None)
        known = ops.embed(batch.input_ids, self.embed, self.embed_scale)
        return ops.call(batch, self.join, (projected, known), self.width, self.float32)


class OwnInput:
    """Contribution of a layer's input to the residual stream."""

    def __init__(self, part: ModelPart, layer: int) -> None:
        name, spec = f"layers.{layer}.", part.spec
        self.gate, self.out = part.params[name + "input_gate"], part.params[name + "input_out"]
        self.norm = part.norm_after(name + "input_norm")
        self.rounding, self.residual_scale = Norm(None, 0.0, 0.0, part.dtype), spec.residual_scale
        self.width, self.first = spec.layer_inputs, layer * spec.layer_inputs
        self.apply = partial(_gate, spec.activation)
        self.dtype = part.dtype

    def __call__(self, step: Step[X], x: X, residual: X) -> tuple[X, X]:
        """Compute (previous blocks' output, residual) -> (the input's contribution, residual)."""
        ops, batch = step.ops, step.batch
        rows, residual = ops.rms_norm(x, residual, self.rounding, self.residual_scale)
        gates = ops.linear(rows, self.gate, None)
        assert step.inputs is not None
        inputs = ops.columns(step.inputs, self.first, self.first + self.width)
        gated = ops.call(batch, self.apply, (gates, inputs), self.width, self.dtype)
        x = ops.linear(gated, self.out, None)
        if self.norm is not None:
            x = ops.rms_norm(None, x, self.norm, 1.0)[0]
        return x, residual


def _times(number: Tensor, _batch: ForwardBatch, out: Tensor, x: Tensor) -> None:
    out.copy_(x * number.float())


def _join(
    normed_rows: Callable[[Tensor, Norm], Tensor],
    norm: Norm,
    scale: float,
    _batch: ForwardBatch,
    out: Tensor,
    projected: Tensor,
    known: Tensor,
) -> None:
    """Fill `out` with the inputs of all layers: the projected embeddings, normalized by layer, plus
    the inputs looked up for the tokens, divided by the root of 2.
    """
    assert norm.weight is not None
    by_layer = (projected.float() * scale).unflatten(1, (-1, len(norm.weight)))
    out.copy_((normed_rows(by_layer, norm).flatten(1) + known) * 2**-0.5)


def _gate(activation: str, _batch: ForwardBatch, out: Tensor, gates: Tensor, x: Tensor) -> None:
    out.copy_(gate(namespace(x).cat((gates.float(), x), dim=1), activation))
