"""`LayerSpec`: sizes of a single layer, in a model whose layers differ."""

from typing import NamedTuple

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, shown, whole


class LayerSpec(NamedTuple):
    """Sizes of a single layer.

    Attributes:
        num_kv_heads, head_dim: Sizes of its attention. All layers have the same number of query
            heads.
        joint: The projection of keys also makes the values.
        keys_of: Number of the layer whose keys and values this layer reads. If that is an earlier
            layer, this one makes none.
        intermediate_size: Width of its MLP.
    """

    num_kv_heads: int
    head_dim: int
    joint: bool
    keys_of: int
    intermediate_size: int

    @property
    def kept(self) -> int:
        """Width of a token's keys."""
        return self.num_kv_heads * self.head_dim


def gemma4_layers(config: Config, windows: tuple[int, ...]) -> tuple[LayerSpec, ...]:
    """Read the layers of Gemma 4.

    Layers with and without a window may have different head sizes. Each of the last
    `num_kv_shared_layers` reads keys and values of the last earlier layer of its kind (windowed or
    not). Raises `ModelLoadError`.
    """
    count, joint = len(windows), bool(config.get("attention_k_eq_v", False))
    shared = int(config.get("num_kv_shared_layers") or 0)
    wide = 2 if config.get("use_double_wide_mlp") else 1
    inner, heads = whole(config, "intermediate_size"), _heads(config, windows)
    makers = {windows[layer] > 0: layer for layer in range(count - shared)}
    if any((window > 0) not in makers for window in windows):
        raise ModelLoadError(
            f"config.json has num_kv_shared_layers={shared}; the first {count - shared} layers "
            "must include every kind of layer (windowed or full) that shares keys and values."
        )
    sharing = [
        layer if layer < count - shared else makers[windows[layer] > 0] for layer in range(count)
    ]
    for layer, maker in enumerate(sharing):
        if heads[layer] != heads[maker]:
            raise ModelLoadError(
                f"layer {layer} shares the keys of layer {maker}, so config.json must give both "
                "the same number and width of key-value heads."
            )
    return tuple(
        LayerSpec(
            *heads[layer],
            joint=joint and not window,
            keys_of=sharing[layer],
            intermediate_size=inner if layer < count - shared else wide * inner,
        )
        for layer, window in enumerate(windows)
    )


def _heads(config: Config, windows: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return key-value heads and their width, by layer.

    Published models define them once for all layers without a window, transformers layer by layer.
    """
    usual = whole(config, "num_key_value_heads"), whole(config, "head_dim")
    by_number = config.get("per_layer_config")
    if by_number is None:
        count = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        full = int(count or usual[0]), int(config.get("global_head_dim") or 512)
        return [usual if window else full for window in windows]
    names = ("num_key_value_heads", "head_dim")
    by_layer = {str(layer): fields for layer, fields in by_number.items()}
    numbers = {str(layer) for layer in range(len(windows))}
    for layer, fields in by_layer.items():
        if layer not in numbers or not set(fields) <= set(names):
            raise ModelLoadError(
                f"config.json: per_layer_config has {layer}: {shown(fields)}; only "
                f"{' and '.join(names)} of layers 0 to {len(windows) - 1} are supported."
            )
    heads: list[tuple[int, int]] = []
    for layer in range(len(windows)):
        overrides = by_layer.get(str(layer), {})
        kv_heads, head_dim = (
            int(overrides.get(name, each)) for name, each in zip(names, usual, strict=True)
        )
        heads.append((kv_heads, head_dim))
    return heads
