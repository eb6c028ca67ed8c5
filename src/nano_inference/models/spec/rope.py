"""`RopeSpec`: rotary position embedding, read from every known spelling in config.json."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (arXiv:2104.09864) and the scaling of its frequencies.

    Attributes:
        theta: Base of the frequencies.
        kind: `"default"`, `"linear"`, `"llama3"`, `"yarn"` (arXiv:2309.00071), `"longrope"`
            (arXiv:2402.13753) or `"proportional"`. `"none"`: no rotation.
        factor: Factor by which the context is extended.
        original_max_position: Context length of the first training (llama3, yarn).
        low_freq_factor, high_freq_factor: Band of interpolation of llama3.
        beta_fast, beta_slow, truncate: Band of interpolation of yarn.
        attention_factor: Factor of cosine and sine.
        factors: Divisors of the frequencies, [rotated dimensions / 2] (longrope, with one list for
            all lengths).
        share: Share of a head's dimensions that rotate, the first ones. For `"proportional"`: share
            of a head's pairs that rotate, at the frequencies that they have if all rotate.
        interleaved: A pair is two neighbors, not one coordinate from each half.
        query_beta: Queries are multiplied by 1 + query_beta * log(1 + n), with n the number of
            whole contexts of `original_max_position` before their position.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()
    share: float = 1.0
    interleaved: bool = False
    query_beta: float = 0.0

    def turning(self, head_dim: int) -> int:
        """Return how many dimensions of a head rotate."""
        if self.kind == "proportional":  # the other pairs rotate by an angle of 0
            return head_dim
        return int(head_dim * self.share + 1e-6)  # a share may be an inexact quotient


# (config, max_position, windows) -> one entry for each layer
ReadRopes = Callable[[Config, int, tuple[int, ...]], tuple[RopeSpec, ...]]
NO_ROPE = RopeSpec(kind="none")


def ropes_by_window(
    config: Config, max_position: int, windows: tuple[int, ...]
) -> tuple[RopeSpec, ...]:
    """Read one rotary embedding for layers with a sliding window and one for all others.

    Most models use the same for both.
    """
    rope, sliding_rope = _pair(config, max_position)
    return tuple(sliding_rope if window else rope for window in windows)


def ropes_backwards(
    config: Config, max_position: int, windows: tuple[int, ...]
) -> tuple[RopeSpec, ...]:
    """nanochat: rotate heads in the opposite direction."""
    ropes = ropes_by_window(config, max_position, windows)
    if any(rope.kind != "default" for rope in ropes):
        raise ModelLoadError(f"rope scaling {ropes[0].kind!r} is not supported for nanochat.")
    return tuple(replace(rope, kind="linear", factor=-1.0) for rope in ropes)


def ropes_unscaled_in_windows(
    config: Config, max_position: int, windows: tuple[int, ...]
) -> tuple[RopeSpec, ...]:
    """OLMo 3: apply `rope_scaling` only to layers without a window."""
    ropes = ropes_by_window(config, max_position, windows)
    if "full_attention" in (config.get("rope_parameters") or {}):
        return ropes
    return tuple(
        RopeSpec(theta=rope.theta) if window else rope
        for rope, window in zip(ropes, windows, strict=True)
    )


def ropes_in_windows_alone(
    config: Config, max_position: int, windows: tuple[int, ...]
) -> tuple[RopeSpec, ...]:
    """EXAONE 4: if some layers have a window, rotate only in those."""
    ropes = ropes_by_window(config, max_position, windows)
    if not config.get("sliding_window"):
        return ropes
    return tuple(rope if window else NO_ROPE for rope, window in zip(ropes, windows, strict=True))


def ropes_but_for_some(
    config: Config, max_position: int, windows: tuple[int, ...]
) -> tuple[RopeSpec, ...]:
    """SmolLM3: rotate only in the layers of `turning_layers`."""
    ropes, turning = (
        ropes_by_window(config, max_position, windows),
        turning_layers(config, len(windows)),
    )
    return tuple(rope if turns else NO_ROPE for rope, turns in zip(ropes, turning, strict=True))


def interleaved_ropes(
    config: Config, max_position: int, windows: tuple[int, ...]
) -> tuple[RopeSpec, ...]:
    """GLM, Ernie, Helium: pair neighbors."""
    ropes = ropes_by_window(config, max_position, windows)
    return tuple(replace(rope, interleaved=True) for rope in ropes)


def turning_layers(config: Config, num_layers: int) -> list[bool]:
    """Return True for each layer that rotates.

    `no_rope_layers` has a 0 for each layer that does not rotate. Without it, every fourth layer (or
    every `no_rope_layer_interval`-th) does not rotate. Raises `ModelLoadError`.
    """
    every = int(config.get("no_rope_layer_interval") or 4)
    flags = config.get("no_rope_layers")
    if flags is None:
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if len(flags) != num_layers:
        raise ModelLoadError(
            f"config.json has no_rope_layers of {len(flags)} entries; it must have {num_layers}."
        )
    return [bool(each) for each in flags]


def _pair(config: Config, max_position: int) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotary embeddings of layers without and with a sliding window.

    transformers 5 writes `rope_parameters`: one, or one for each kind of layer. Earlier versions
    write `rope_theta` with `rope_scaling` and, for Gemma, `rope_local_base_freq`. Raises
    `ModelLoadError` if the kind of scaling is unknown.
    """
    fields: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "full_attention" in fields:
        return _rope(fields["full_attention"], config, max_position), _rope(
            fields["sliding_attention"], config, max_position
        )
    rope = _rope(fields, config, max_position)
    local = config.get("rope_local_base_freq")
    return rope, rope if local is None else RopeSpec(theta=float(local))


def _rope(fields: Config, config: Config, max_position: int) -> RopeSpec:
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in _KINDS:
        known = ", ".join(kind for kind in _KINDS if kind != "mrope")
        raise ModelLoadError(f"rope scaling {kind!r} is not supported; it must be one of {known}.")
    theta = float(fields.get("rope_theta") or config.get("rope_theta") or 10000.0)
    original = int(fields.get("original_max_position_embeddings") or max_position)
    factor = float(fields.get("factor") or max_position / original)
    share = fields.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return replace(
        _KINDS[kind](fields, theta, original, factor),
        share=1.0 if share is None else float(share),
        query_beta=float(fields.get("llama_4_scaling_beta") or 0.0),
    )


def _default(fields: Config, theta: float, original: int, _factor: float) -> RopeSpec:
    return RopeSpec(
        theta=theta, original_max_position=original if "llama_4_scaling_beta" in fields else 0
    )


def _linear(_fields: Config, theta: float, _original: int, factor: float) -> RopeSpec:
    return RopeSpec(theta=theta, kind="linear", factor=factor)


def _proportional(fields: Config, theta: float, _original: int, _factor: float) -> RopeSpec:
    return RopeSpec(theta=theta, kind="proportional", factor=float(fields.get("factor") or 1.0))


def _llama3(fields: Config, theta: float, original: int, factor: float) -> RopeSpec:
    if fields["low_freq_factor"] >= fields["high_freq_factor"]:
        raise ModelLoadError(
            f"rope scaling llama3 has low_freq_factor={fields['low_freq_factor']!r}, which "
            f"must be less than high_freq_factor={fields['high_freq_factor']!r}."
        )
    return RopeSpec(
        theta=theta,
        kind="llama3",
        factor=factor,
        original_max_position=original,
        low_freq_factor=float(fields["low_freq_factor"]),
        high_freq_factor=float(fields["high_freq_factor"]),
    )


def _yarn(fields: Config, theta: float, original: int, factor: float) -> RopeSpec:
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(fields.get("beta_fast") or 32),
        beta_slow=float(fields.get("beta_slow") or 1),
        truncate=bool(fields.get("truncate", True)),
        attention_factor=_yarn_attention_factor(fields, factor),
    )


def _longrope(fields: Config, theta: float, _original: int, _factor: float) -> RopeSpec:
    """Read longrope with a single table for all lengths.

    With two tables, a token's rotation would depend on the final length of its sequence.
    """
    if fields["short_factor"] != fields["long_factor"] or fields.get("attention_factor") is None:
        raise ModelLoadError(
            "rope scaling 'longrope' requires equal short_factor and long_factor, and an "
            "attention_factor."
        )
    factors = tuple(float(each) for each in fields["short_factor"])
    return RopeSpec(
        theta=theta,
        kind="longrope",
        attention_factor=float(fields["attention_factor"]),
        factors=factors,
    )


def _yarn_attention_factor(fields: Config, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return mscale(float(fields["mscale"])) / mscale(float(fields["mscale_all_dim"]))
    return mscale(1.0)


# (fields, theta, original context, factor)
_KINDS: Mapping[str, Callable[[Config, float, int, float], RopeSpec]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
    # images and videos have three positions for each token, text has one
    "mrope": _default,
}
