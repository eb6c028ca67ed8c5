"""Layers that carry a state along a sequence instead of attending to keys, and the parts of it that
the cache keeps.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, shown, whole

# key in config.json of converted .gguf files
IN_TILES = "nano_inference_heads_in_tiles"


class StateColumn(NamedTuple):
    """Values of one kind that a layer keeps.

    Attributes:
        shape: Shape for a token or for a block.
        per_token: One entry for each token of a block. False: one for the whole block, which
            summarizes all tokens up to the block's end.
        keep_float32: Stored as float32 even if the model has another dtype.
    """

    shape: tuple[int, ...]
    per_token: bool = True
    keep_float32: bool = False


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Layers of a gated short convolution (LFM2): out = c * conv(b * x), with three projections.

    Attributes:
        layers: True for each layer of this kind.
        channels: Number of channels, each convolved separately.
        taps: Number of tokens that a token sees, itself included.
        bias: The projections and the convolution have biases.
    """

    layers: tuple[bool, ...]
    channels: int
    taps: int
    bias: bool = False

    @property
    def columns(self) -> dict[str, StateColumn]:
        """Values that a layer keeps: b * x of each token."""
        return {"inputs": StateColumn((self.channels,))}

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that kernels divide into vectors."""
        return (self.channels,)

    @property
    def by_block(self) -> bool:
        """True if the bits of a row depend on block boundaries."""
        return False

    def window(self, block_size: int) -> int:
        """Return how many tokens back, the row itself included, a row reads kept values."""
        return self.taps


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Layers of a gated delta rule (arXiv:2412.06464; Qwen3-Next, Qwen3.5).

    Each value head carries a matrix S [key_dim, value_dim]. A token multiplies it by its decay a,
    then adds k u^T with u = beta (v - S^T k), so that S^T k comes closer to v. Its output is S^T q.
    Queries, keys and values went through a short convolution.

    Attributes:
        layers: True for each layer of this kind.
        key_heads, value_heads: Numbers of heads. Each key head serves value_heads / key_heads
            consecutive value heads.
        key_dim, value_dim: Widths of these heads.
        taps: Number of tokens that the convolution sees, the row's own included.
        joint: The checkpoint has two projections, grouped by key head, instead of four.
        in_tiles: The heads of an output are in the order of .gguf files: the first value head of
            every key head, then the second of every key head, and so on.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    joint: bool = False
    in_tiles: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Total width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def output_parts(self) -> tuple[tuple[int, int], ...] | None:
        """Columns of the output, in its order, as [start, stop). None: consecutive heads."""
        if not self.in_tiles:
            return None
        group, width = self.value_heads // self.key_heads, self.value_dim
        heads = [key * group + number for number in range(group) for key in range(self.key_heads)]
        return tuple((head * width, (head + 1) * width) for head in heads)

    @property
    def columns(self) -> dict[str, StateColumn]:
        """Values that a layer keeps.

        For each token: the convolution's input, the key, u, and the logarithm of the decay since
        the block's start. For each block: the matrices at its end.
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
        """Widths that kernels divide into vectors."""
        return self.channels, self.key_dim, self.value_dim

    @property
    def by_block(self) -> bool:
        """True if the bits of a row depend on block boundaries."""
        return True

    def window(self, block_size: int) -> int:
        """Return how many tokens back, the row itself included, a row reads kept values.

        A row reads the tokens of its block and the state at the end of the previous block.
        """
        return max(block_size + 1, self.taps)


StateSpec = ShortConv | DeltaNet


def short_conv(config: Config, num_layers: int) -> ShortConv:
    """Read LFM2's convolution layers: those in `layer_types`, or those not in `full_attn_idxs`."""
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
    """Read the delta-rule layers of Qwen3-Next and Qwen3.5.

    `layer_types` lists them as `linear_attention`. Without that field, every
    `full_attention_interval`-th layer is attention, and all other layers carry a state.
    """
    every = int(config.get("full_attention_interval") or 4)
    types = config.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
    ]
    require_types(types, num_layers, "linear_attention")
    spec = DeltaNet(
        tuple(kind == "linear_attention" for kind in types),
        whole(config, "linear_num_key_heads"),
        whole(config, "linear_num_value_heads"),
        whole(config, "linear_key_head_dim"),
        whole(config, "linear_value_head_dim"),
        whole(config, "linear_conv_kernel_dim"),
        joint,
    )
    if spec.value_heads % spec.key_heads:
        raise ModelLoadError(
            f"{spec.value_heads} value heads of the delta rule cannot share {spec.key_heads} "
            "key heads evenly."
        )
    differs = 1 < spec.key_heads < spec.value_heads
    return replace(spec, in_tiles=differs and bool(config.get(IN_TILES, False)))


def require_types(types: Any, num_layers: int, state_type: str) -> None:
    """Raise `ModelLoadError` unless every layer is attention or `state_type`, and both occur.

    An engine stores keys in blocks, so a model needs at least one attention layer.
    """
    wanted = {"full_attention", state_type}
    if len(types) != num_layers or set(types) != wanted:
        raise ModelLoadError(
            f"config.json has layer_types {shown(types)}; it must have {num_layers} entries, each "
            f"'full_attention' or {state_type!r}, and at least one of each."
        )
