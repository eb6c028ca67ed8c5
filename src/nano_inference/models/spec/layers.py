"""`LayerSpec`: what a layer has for itself, in a model whose layers are of several kinds."""

from typing import NamedTuple

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, shown, whole


class LayerSpec(NamedTuple):
    """What a layer has for itself.

    Attributes:
        num_kv_heads, head_dim: of its attention; all layers have the same number of query heads.
        joint: the projection of its keys makes its values too.
        keys_of: the layer whose keys and values it reads: its own number, or that of an earlier
            one, and then it makes none.
        intermediate_size: of its MLP.
    """

    num_kv_heads: int
    head_dim: int
    joint: bool
    keys_of: int
    intermediate_size: int

    @property
    def kept(self) -> int:
        """Numbers of a token's keys."""
        return self.num_kv_heads * self.head_dim


def gemma4_layers(config: Config, windows: tuple[int, ...]) -> tuple[LayerSpec, ...]:
    """Gemma 4: layers without a window have heads of their own; the last `num_kv_shared_layers`
    read the keys and values of the last layer before them that is like them in its window. Raises
    `ModelLoadError`.
    """
    count, joint = len(windows), bool(config.get("attention_k_eq_v", False))
    shared = int(config.get("num_kv_shared_layers") or 0)
    wide = 2 if config.get("use_double_wide_mlp") else 1
    inner, own = whole(config, "intermediate_size"), _heads(config, windows)
    makers = {windows[layer] > 0: layer for layer in range(count - shared)}
    if any((window > 0) not in makers for window in windows):
        raise ModelLoadError(
            f"config.json has num_kv_shared_layers={shared}; of the first {count - shared} layers "
            "none keeps the keys and values of a kind of layer that shares them."
        )
    sharing = [
        layer if layer < count - shared else makers[windows[layer] > 0] for layer in range(count)
    ]
    for layer, maker in enumerate(sharing):
        if own[layer] != own[maker]:
            raise ModelLoadError(
                f"config.json has layer {layer} read the keys of layer {maker}, which has other "
                "heads."
            )
    return tuple(
        LayerSpec(
            *own[layer],
            joint=joint and not window,
            keys_of=sharing[layer],
            intermediate_size=inner if layer < count - shared else wide * inner,
        )
        for layer, window in enumerate(windows)
    )


def _heads(config: Config, windows: tuple[int, ...]) -> list[tuple[int, int]]:
    """Key-value heads and their width by layer: published models say them for all layers without a
    window, transformers writes them layer by layer.
    """
    usual = whole(config, "num_key_value_heads"), whole(config, "head_dim")
    told = config.get("per_layer_config")
    if told is None:
        count = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        full = int(count or usual[0]), int(config.get("global_head_dim") or 512)
        return [usual if window else full for window in windows]
    names = ("num_key_value_heads", "head_dim")
    by_layer = {str(layer): fields for layer, fields in told.items()}
    places = {str(layer) for layer in range(len(windows))}
    for layer, fields in by_layer.items():
        if layer not in places or not set(fields) <= set(names):
            raise ModelLoadError(
                f"config.json: per_layer_config has {layer}: {shown(fields)}; this decoder knows "
                f"{' and '.join(names)} of layers 0 to {len(windows) - 1}."
            )
    found: list[tuple[int, int]] = []
    for layer in range(len(windows)):
        own = by_layer.get(str(layer), {})
        kv_heads, head_dim = (
            int(own.get(name, each)) for name, each in zip(names, usual, strict=True)
        )
        found.append((kv_heads, head_dim))
    return found
