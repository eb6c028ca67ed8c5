"""Traits of a model that exclude some features."""

from nano_inference.features import CAPS, KINDS, LATENTS, SINKS, STATES, WIDE_NORMS
from nano_inference.models.spec.model import ModelSpec


def traits_of(spec: ModelSpec) -> dict[str, str]:
    """Return a model's traits, each with the name of its architecture.

    The result is the facts for `nano_inference.features.Setting`.
    """
    has = {
        SINKS: spec.attention_sinks,
        CAPS: spec.attention_cap > 0,
        LATENTS: spec.latent is not None,
        STATES: spec.state is not None,
        KINDS: bool(spec.kinds),
        WIDE_NORMS: spec.qk_norm == "full",
    }
    return {trait: spec.architecture for trait, there in has.items() if there}
