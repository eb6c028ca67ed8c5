"""`LatentSpec`: what config.json says of attention over latents (DeepSeek-V2, V3 and their kin)."""

import math
from dataclasses import dataclass, replace

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, whole
from nano_inference.models.spec.rope import RopeSpec, ropes_by_window
from nano_inference.ops.settings import Latent

_EPS = 1e-6  # of the norms of latents, whatever that of the others is


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention whose cache holds one latent a token (`LatentOps` in `ops/interface.py`).

    Attributes:
        sizes: of a layer.
        query_rank: queries too are made of a latent, so wide; None: of the hidden state.
        eps: of the latents' norms.
    """

    sizes: Latent
    query_rank: int | None
    eps: float = _EPS


def read_latent(config: Config) -> LatentSpec:
    """Of a config.json that has latents. Raises `ModelLoadError`, `KeyError`."""
    for name in ("index_topk", "attention_bias"):
        if config.get(name):
            raise ModelLoadError(
                f"config.json has {name}={config[name]!r}; attention over latents has no {name} "
                "here."
            )
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, rotary, plain, value = (whole(config, name) for name in names)
    if rotary % 2:
        raise ModelLoadError(
            f"qk_rope_head_dim={rotary} must be even: rotary embedding turns pairs."
        )
    query_rank = config.get("q_lora_rank")
    return LatentSpec(Latent(rank, rotary, plain, value), query_rank and int(query_rank))


def latent_scale(config: Config) -> dict[str, float]:
    """The scale of whole queries; where yarn stretches them, its factor squared."""
    scale = (whole(config, "qk_nope_head_dim") + whole(config, "qk_rope_head_dim")) ** -0.5
    fields: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight, factor = fields.get("mscale_all_dim"), float(fields.get("factor") or 1.0)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind != "default" and weight and factor > 1:
        scale *= (0.1 * float(weight) * math.log(factor) + 1.0) ** 2
    return {"attention_scale": scale}


def latent_ropes(
    config: Config, max_position: int, windows: tuple[int, ...]
) -> tuple[RopeSpec, ...]:
    """Neighbours are pairs, unless `rope_interleave` is false; a key's latent does not turn."""
    sizes = read_latent(config).sizes
    share, interleaved = sizes.rotary / sizes.key, bool(config.get("rope_interleave", True))
    found = ropes_by_window(config, max_position, windows)
    return tuple(replace(rope, share=share, interleaved=interleaved) for rope in found)
