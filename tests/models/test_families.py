"""Every family beside transformers, with weights in which every part matters; and without each of
its features, which must be noticed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import Backend
from nano_inference.models.spec import ModelSpec
from tests.models.strong import NOTICED, TOLERANCE, disagreement, strong_model

Change = Callable[[ModelSpec], ModelSpec]


@dataclass(frozen=True)
class Case:
    """A tiny model, and what it is without each of its features."""

    class_name: str
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    features: dict[str, Change] = field(default_factory=dict[str, Change])


def spec_with(**fields: Any) -> Change:
    """The spec with other values."""
    return lambda spec: replace(spec, **fields)


def without_windows(spec: ModelSpec) -> ModelSpec:
    return replace(spec, windows=(0,) * spec.num_layers)


def one_rope(spec: ModelSpec) -> ModelSpec:
    """Layers with a window turn as those without."""
    return replace(spec, sliding_rope=spec.rope)


CASES = {
    "gemma3": Case(
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 7,
            "sliding_window": 17,
            "query_pre_attn_scalar": 40,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        {
            "windows": without_windows,
            "rope of windows": one_rope,
            "query_pre_attn_scalar": spec_with(attention_scale=0.25),
            "activation": spec_with(activation="silu"),
            "embed_scale": spec_with(embed_scale=1.0),
            "norms after": spec_with(norms="pre"),
        },
    ),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", CASES)
def test_a_family_agrees_with_transformers(tmp_path: Path, family: str, backend: Backend) -> None:
    case = CASES[family]
    oracle = strong_model(tmp_path, case.class_name, **case.config)
    assert disagreement(tmp_path, oracle, backend=backend) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "feature"), [(name, each) for name, case in CASES.items() for each in case.features]
)
def test_a_feature_left_out_is_noticed(tmp_path: Path, family: str, feature: str) -> None:
    case = CASES[family]
    oracle = strong_model(tmp_path, case.class_name, **case.config)
    without = case.features[feature]
    assert disagreement(tmp_path, oracle, change=without) > NOTICED
