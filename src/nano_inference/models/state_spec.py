"""Layers that carry a state along a sequence instead of attending to keys: what they are made of,
and what of it is kept in the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nano_inference.errors import ModelLoadError

Config = Mapping[str, Any]


class StateColumn(NamedTuple):
    """Numbers of one kind that a layer keeps.

    Attributes:
        shape: of a token's, or of a block's.
        per_token: one for each token of a block; else one for the whole of it, which stands for all
            tokens up to the block's end.
        keep_float32: whatever dtype the model has.
    """

    shape: tuple[int, ...]
    per_token: bool = True
    keep_float32: bool = False


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Layers of a gated short convolution (LFM2): out = c * conv(b * x), of three projections.

    Attributes:
        layers: one entry a layer: whether it is of this kind.
        channels: each is convolved by itself.
        taps: tokens that a token sees, itself included.
        bias: of the projections and of the convolution.
    """

    layers: tuple[bool, ...]
    channels: int
    taps: int
    bias: bool = False

    @property
    def columns(self) -> dict[str, StateColumn]:
        """What a layer keeps: b * x of each token."""
        return {"inputs": StateColumn((self.channels,))}

    def window(self, block_size: int) -> int:
        """How many tokens back, the row's own included, a row reads what the layer keeps."""
        return self.taps


StateSpec = ShortConv


def short_conv(config: Config, num_layers: int) -> ShortConv:
    """The layers of LFM2 that `layer_types`, or `full_attn_idxs`, says are no attention."""
    full = config.get("full_attn_idxs")
    types = config.get("layer_types") or [
        "full_attention" if full is None or i in full else "conv" for i in range(num_layers)
    ]
    require_types(types, num_layers, "conv")
    return ShortConv(
        tuple(kind == "conv" for kind in types),
        int(config["hidden_size"]),
        int(config["conv_L_cache"]),
        bool(config.get("conv_bias", False)),
    )


def require_types(types: Any, num_layers: int, own: str) -> None:
    """Raise `ModelLoadError` unless each layer is attention or of this kind, and one of them each.

    The keys of an engine lie in blocks of which each has some: a model needs a layer of attention.
    """
    wanted = {"full_attention", own}
    if len(types) != num_layers or set(types) != wanted:
        raise ModelLoadError(
            f"config.json has layer_types {types!r}; {num_layers} entries are needed, each "
            f"'full_attention' or {own!r}, and of each at least one."
        )
