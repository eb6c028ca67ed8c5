"""Layers that carry a state along a sequence instead of attending to keys: what they are made of,
and what of it is kept in the cache.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, shown, whole


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

    @property
    def widths(self) -> tuple[int, ...]:
        """Of what its kernels go through at once."""
        return (self.channels,)

    @property
    def by_block(self) -> bool:
        """Whether the bits of a row depend on where blocks end."""
        return False

    def window(self, block_size: int) -> int:
        """How many tokens back, the row's own included, a row reads what the layer keeps."""
        return self.taps


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Layers of a gated delta rule (arXiv:2412.06464; Qwen3-Next, Qwen3.5).

    Each value head carries a matrix S [key_dim, value_dim]. A token multiplies it by its decay a,
    then adds k u^T with u = beta (v - S^T k), so that S^T k comes closer to v; its output is S^T q.
    Queries, keys and values went through a short convolution.

    Attributes:
        layers: one entry a layer: whether it is of this kind.
        key_heads, value_heads: each key head serves so many value heads that follow each other.
        key_dim, value_dim: widths of these heads.
        taps: tokens that the convolution sees, the row's own included.
        joint: the checkpoint has two projections, in which what belongs to a key head stands
            together, instead of four.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    joint: bool = False

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def columns(self) -> dict[str, StateColumn]:
        """What a layer keeps: of a token what goes into the convolution, its key, u, and the
        logarithm of the decay since the block's begin; of a block the matrices at its end.
        """
        return {
            "inputs": StateColumn((self.channels,)),
            "keys": StateColumn((self.key_heads, self.key_dim), keep_float32=True),
            "values": StateColumn((self.value_heads, self.value_dim), keep_float32=True),
            "decays": StateColumn((self.value_heads,), keep_float32=True),
            "state": StateColumn(
                (self.value_heads, self.key_dim, self.value_dim), False, keep_float32=True
            ),
        }

    @property
    def widths(self) -> tuple[int, ...]:
        """Of what its kernels go through at once."""
        return self.channels, self.key_dim, self.value_dim

    @property
    def by_block(self) -> bool:
        """Whether the bits of a row depend on where blocks end."""
        return True

    def window(self, block_size: int) -> int:
        """How many tokens back, the row's own included, a row reads what the layer keeps: its
        block's tokens, and the state at the end of the block before.
        """
        return max(block_size + 1, self.taps)


StateSpec = ShortConv | DeltaNet


def short_conv(config: Config, num_layers: int) -> ShortConv:
    """The layers of LFM2 that `layer_types`, or `full_attn_idxs`, says are no attention."""
    full = config.get("full_attn_idxs")
    types = config.get("layer_types") or [
        "full_attention" if full is None or i in full else "conv" for i in range(num_layers)
    ]
    require_types(types, num_layers, "conv")
    return ShortConv(
        tuple(kind == "conv" for kind in types),
        whole(config, "hidden_size"),
        whole(config, "conv_L_cache"),
        bool(config.get("conv_bias", False)),
    )


def delta_net(config: Config, num_layers: int, *, joint: bool) -> DeltaNet:
    """The layers of Qwen3-Next and Qwen3.5 that `layer_types` says are `linear_attention`; else all
    but every `full_attention_interval`-th.
    """
    every = int(config.get("full_attention_interval") or 4)
    types = config.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
    ]
    require_types(types, num_layers, "linear_attention")
    found = DeltaNet(
        tuple(kind == "linear_attention" for kind in types),
        whole(config, "linear_num_key_heads"),
        whole(config, "linear_num_value_heads"),
        whole(config, "linear_key_head_dim"),
        whole(config, "linear_value_head_dim"),
        whole(config, "linear_conv_kernel_dim"),
        joint,
    )
    if found.value_heads % found.key_heads:
        raise ModelLoadError(
            f"{found.value_heads} value heads of the delta rule cannot share {found.key_heads} "
            "key heads evenly."
        )
    return found


def require_types(types: Any, num_layers: int, own: str) -> None:
    """Raise `ModelLoadError` unless each layer is attention or of this kind, and one of them each.

    The keys of an engine lie in blocks of which each has some: a model needs a layer of attention.
    """
    wanted = {"full_attention", own}
    if len(types) != num_layers or set(types) != wanted:
        raise ModelLoadError(
            f"config.json has layer_types {shown(types)}; {num_layers} entries are needed, each "
            f"'full_attention' or {own!r}, and of each at least one."
        )
