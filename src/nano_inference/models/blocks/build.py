"""`build_layer`: the blocks of a layer, chosen from the model's description."""

from collections.abc import Callable, Mapping

from nano_inference.models.blocks.attention import Attention
from nano_inference.models.blocks.delta_net import DeltaNet
from nano_inference.models.blocks.experts import Mixture
from nano_inference.models.blocks.gated_attention import GatedAttention
from nano_inference.models.blocks.gemma4 import ExpertsBeside, Gemma4Layer, OwnInput
from nano_inference.models.blocks.latent_attention import LatentAttention
from nano_inference.models.blocks.layer import AnyLayer, Layer, NormedAfter
from nano_inference.models.blocks.mlp import GatedMlp, Mlp
from nano_inference.models.blocks.short_conv import ShortConv
from nano_inference.models.blocks.step import Block, ModelPart
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.states import DeltaNet as DeltaNetSpec

MIXERS: Mapping[str, Callable[[ModelPart, int], Block]] = {
    "attention": Attention,
    "gated attention": GatedAttention,
    "latent attention": LatentAttention,
    "delta net": DeltaNet,
    "short convolution": ShortConv,
}


def mixer_kind(spec: ModelSpec, layer: int) -> str:
    """Return a layer's key in `MIXERS`."""
    if spec.state is not None and spec.state.layers[layer]:
        return "delta net" if isinstance(spec.state, DeltaNetSpec) else "short convolution"
    if spec.latent is not None:
        return "latent attention"
    return "gated attention" if spec.gated_attention else "attention"


def build_mixtures(part: ModelPart) -> dict[int, Mixture]:
    """Return the experts of every layer that has any."""
    moe = part.spec.moe
    if moe is None:
        return {}
    layers = [layer for layer, mixed in enumerate(moe.layers) if mixed or moe.beside]
    return {layer: Mixture(part, layer, moe) for layer in layers}


def build_layer(part: ModelPart, layer: int, mixtures: Mapping[int, Mixture]) -> AnyLayer:
    """Build a layer from its blocks."""
    spec, name = part.spec, f"layers.{layer}."
    beside = spec.moe is not None and spec.moe.beside
    mlp = _normed(part, _mlp(part, layer, mixtures), name, "dense" if beside else "mlp")
    mixer = _normed(part, MIXERS[mixer_kind(spec, layer)](part, layer), name, "attn")
    plain = Layer(part, layer, mixer, mlp)
    if not (beside or spec.layer_inputs or spec.layer_scales):
        return plain
    return Gemma4Layer(
        plain,
        ExpertsBeside(part, layer, mixtures[layer]) if beside else None,
        OwnInput(part, layer) if spec.layer_inputs else None,
        part.params[name + "scale"] if spec.layer_scales else None,
    )


def _mlp(part: ModelPart, layer: int, mixtures: Mapping[int, Mixture]) -> Block:
    if layer in mixtures and not (part.spec.moe is not None and part.spec.moe.beside):
        return mixtures[layer]
    return GatedMlp(part, layer) if part.spec.gated else Mlp(part, layer)


def _normed(part: ModelPart, block: Block, name: str, which: str) -> Block:
    """Return the block, with a norm of its output if the model has one there."""
    norm = part.norm_after(f"{name}{which}_out_norm")
    return block if norm is None else NormedAfter(block, norm)
