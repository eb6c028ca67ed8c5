"""Every family compared with transformers, with weights in which every part matters. Each omitted
feature must be noticed.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import EngineConfig
from nano_inference.checkpoints.loading import load_spec
from nano_inference.config import Backend
from nano_inference.device.backends import choose_ops
from nano_inference.errors import ConfigError
from nano_inference.models.activations import xielu
from nano_inference.models.blocks import mlp
from nano_inference.ops import rowwise
from tests.models.families import CASES
from tests.models.strong import (
    NOTICED,
    TOLERANCE,
    disagreement,
    own_rounding,
    strong_model,
    strong_prompts,
)
from tests.parity.compare import ROWS, compare_rows

Strong = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory) -> Strong:
    """Return the folder of a family's model and the transformers model. Both are shared: only read
    them.
    """

    @cache
    def make(family: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("family")
        return folder, strong_model(folder, CASES[family].class_name, **CASES[family].config)

    return make


@pytest.mark.thorough(
    cases=[
        "qwen3-vl-reference",
        "gemma4 with inputs of layers-cpu",
        "gemma4 with experts-cpu",
        "gemma4 with pictures-cpu",
        "olmo3-reference",
        "exaone4-cpu",
        "phi3-reference",
        "glm4-moe without norms-cpu",
        "olmoe-cpu",
        "granite-moe-cpu",
        "qwen2-reference",
    ]
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", CASES)
def test_family_agrees_with_transformers(strong: Strong, family: str, backend: Backend) -> None:
    case = CASES[family]
    folder, oracle = strong(family)
    if backend not in (case.backend, "reference"):
        with pytest.raises(ConfigError, match=case.class_name):
            disagreement(folder, oracle, backend=backend)
        return
    difference = disagreement(folder, oracle, backend=backend)
    # The oracle's own rounding is the limit for a model that amplifies it more than others.
    assert difference < TOLERANCE or difference < own_rounding(oracle)


# The quick tier keeps the first feature of each family.
@pytest.mark.thorough(
    cases=[f"{name}-{each}" for name, case in CASES.items() for each in list(case.features)[1:]]
)
@pytest.mark.parametrize(
    ("family", "feature"), [(name, each) for name, case in CASES.items() for each in case.features]
)
def test_omitted_feature_is_detected(strong: Strong, family: str, feature: str) -> None:
    """Compare at prompt positions only: sampled tokens take most of the time and add little."""
    case = CASES[family]
    folder, oracle = strong(family)
    without = case.features[feature]
    difference = disagreement(folder, oracle, change=without, backend=case.backend, max_tokens=1)
    assert difference > NOTICED


@pytest.mark.thorough(
    but=[
        "qwen3-vl",
        "ministral3",
        "helium",
        "glm4-moe without norms",
        "granite-moe",
        "deepseek-v3",
        "arcee",
        "nanochat",
        "apertus",
        "llama",
        "qwen3-moe",
        "qwen2-vl",
    ]
)
@pytest.mark.parametrize("family", CASES)
def test_family_has_the_same_bits_in_other_schedules(strong: Strong, family: str) -> None:
    case = CASES[family]
    folder, oracle = strong(family)
    prompts = strong_prompts(oracle.get_input_embeddings().num_embeddings, (1, 33, 70))
    common: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 2**24, "backend": case.backend}
    for result in compare_rows(str(folder), "bfloat16", prompts, 8, (ROWS[1], ROWS[4]), **common):
        assert result["equal"] == result["samples"], result


@pytest.mark.parametrize("name", ["CLAMP", "SLOPE"])
def test_omitted_gate_of_gpt_oss_is_detected(
    strong: Strong, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, oracle = strong("gpt-oss")
    monkeypatch.setattr(rowwise, name, {"CLAMP": 1e9, "SLOPE": 1.0}[name])
    assert disagreement(folder, oracle, backend="reference") > NOTICED


@pytest.mark.parametrize("attention", ["flex"])
@pytest.mark.parametrize(
    ("family", "what"), [("gpt-oss", "attention sinks"), ("gemma2", "caps of attention scores")]
)
def test_attention_backend_lacking_a_feature_is_rejected_by_name(
    strong: Strong, attention: Any, family: str, what: str
) -> None:
    folder, _ = strong(family)
    config = EngineConfig(str(folder), attention=attention)
    specs = {"policy": load_spec(folder)}
    class_name = CASES[family].class_name
    message = f"attention='{attention}' is not possible for {class_name}, which has {what}"
    with pytest.raises(ConfigError, match=message):
        choose_ops(config, specs, torch.float32, torch.device("cpu"))


def test_xielu_parameters_all_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["apertus"]
    oracle = strong_model(tmp_path, case.class_name, **case.config)
    for index in range(4):

        def without(x: Tensor, numbers: Tensor, index: int = index) -> Tensor:
            numbers = numbers.clone()
            numbers[index] = -1.0
            return xielu(x, numbers)

        monkeypatch.setattr(mlp, "UNGATED", {"xielu": without})
        assert disagreement(tmp_path, oracle, lengths=(5, 40)) > NOTICED
