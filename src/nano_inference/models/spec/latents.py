"""`LatentSpec`: attention over latents (DeepSeek-V2, V3 and derivatives), from config.json."""

import math
from dataclasses import dataclass, replace

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, whole
from nano_inference.models.spec.rope import RopeSpec, ropes_by_window
from nano_inference.ops.settings import Latent

_EPS = 1e-6  # of latent norms, independent of the model's rms_norm_eps


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention whose cache holds one latent for each token (`LatentOps` in `ops/interface.py`).

    Attributes:
        sizes: Widths of a layer's latents and heads.
        query_rank: Width of the latent that queries are made from. None: queries are made from the
            hidden state.
        eps: Epsilon of the latents' norms.
    """

    sizes: Latent
    query_rank: int | None
    eps: float = _EPS


def read_latent(config: Config) -> LatentSpec:
    """Read the sizes of latents. Raises `ModelLoadError`, or `KeyError` if one is missing."""
    for name in ("index_topk", "attention_bias"):
        if config.get(name):
            raise ModelLoadError(
                f"config.json has {name}={config[name]!r}; {name} is not supported with attention "
                "over latents."
            )
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, rotary, plain, value = (whole(config, name) for name in names)
    if rotary % 2:
        raise ModelLoadError(
            f"qk_rope_head_dim={rotary} must be even: rotary embedding rotates pairs."
        )
    query_rank = config.get("q_lora_rank")
    return LatentSpec(Latent(rank, rotary, plain, value), query_rank and int(query_rank))


def latent_scale(config: Config) -> dict[str, float]:
    """Return the scale of attention scores.

    If the scaling of rotary embedding has `mscale_all_dim` (YaRN), the scale includes the square of
    0.1 * mscale_all_dim * log(factor) + 1.
    """
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
    """Read the rotation of a key's rotary part. Its latent is not rotated.

    A pair is two neighbors unless `rope_interleave` is false.
    """
    sizes = read_latent(config).sizes
    share, interleaved = sizes.rotary / sizes.key, bool(config.get("rope_interleave", True))
    ropes = ropes_by_window(config, max_position, windows)
    return tuple(replace(rope, share=share, interleaved=interleaved) for rope in ropes)
