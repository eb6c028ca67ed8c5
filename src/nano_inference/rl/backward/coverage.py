"""The models whose backward pass runs on the engine's own kernels."""

from collections.abc import Callable
from typing import Literal

from nano_inference.models.spec.model import ModelSpec
from nano_inference.rl.backward.kernels import KERNELS

# `kernels`: equal bits on every instruction set, or in every run on one card. `torch`: equal bits
# on one instruction set.
Gradients = Literal["kernels", "torch"]

# What a model has -> the kernels have no gradient for it.
_UNCOVERED: dict[str, Callable[[ModelSpec], bool]] = {
    "experts next to an MLP": lambda spec: spec.moe is not None and spec.moe.beside,
    "attention over latents": lambda spec: spec.latent is not None,
    "layers with a state": lambda spec: spec.state is not None,
    "layers of several kinds": lambda spec: bool(spec.kinds),
    "normed values": lambda spec: spec.value_norm,
    "inputs of layers": lambda spec: spec.layer_inputs > 0,
    "scales of layers": lambda spec: spec.layer_scales,
    "gated attention": lambda spec: spec.gated_attention,
    "an MLP without a gate": lambda spec: not spec.gated,
    "normed embeddings": lambda spec: spec.embed_norm,
}


def uncovered(spec: ModelSpec) -> list[str]:
    """Return the parts of a model for which the kernels have no gradient."""
    return [part for part, has_part in _UNCOVERED.items() if has_part(spec)]


def gradients_of(spec: ModelSpec, backend: str) -> Gradients:
    """Return the implementation of a model's backward pass on a backend."""
    return "kernels" if backend in KERNELS and not uncovered(spec) else "torch"
