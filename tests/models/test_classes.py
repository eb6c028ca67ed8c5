"""Classes of transformers: each one loads and has a case that shows agreement, or is rejected by a
sentence that names it.
"""

from pathlib import Path
from typing import Any

import pytest

from nano_inference.checkpoints import folders
from nano_inference.errors import ModelLoadError
from nano_inference.models.spec import families
from nano_inference.models.spec.families import ARCHITECTURES
from nano_inference.models.spec.read import spec_from_config
from nano_inference.models.spec.refused import REFUSED
from tests.models import classes
from tests.models.classes import EVERY_CASE, class_names, judged, try_all, try_defaults, try_switch


def test_supported_classes_all_have_a_case() -> None:
    assert {case.class_name for case in EVERY_CASE.values()} == set(ARCHITECTURES)


def test_supported_classes_are_not_listed_as_refused() -> None:
    assert not set(ARCHITECTURES) & set(REFUSED)


def test_other_classes_are_rejected_by_name() -> None:
    """The rest of config.json does not matter, because its values mean other things in such a
    class.
    """
    others = set(class_names()) - set(ARCHITECTURES)
    assert len(others) > 200
    for name in others:
        with pytest.raises(ModelLoadError) as refused:
            spec_from_config({"architectures": [name], "intermediate_size": [16384] * 30})
        assert judged(name, "", str(refused.value), name).problem is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MambaForCausalLM", "MambaForCausalLM is not supported: .* which is not implemented."),
        ("Gemma3nForCausalLM", "Gemma3nForCausalLM is not supported: .* which is not implemented."),
        ("DeepseekV2ForCausalLM", "config.json lacks 'num_experts_per_tok'."),
        ("Qwen3ForCausalLMs", "the nearest .*Qwen3ForCausalLM "),
    ],
)
def test_refusal_names_the_missing_feature(name: str, message: str) -> None:
    fields = dict(next(classes.default_configs(name))[1]) if name in class_names() else {}
    with pytest.raises(ModelLoadError, match=message):
        spec_from_config(fields | {"architectures": [name]})


def test_bad_refusal_is_a_problem() -> None:
    for message in ("KeyError: 'x'", "XForCausalLM has\nno x.", "XForCausalLM " + "x" * 400 + "."):
        assert judged("XForCausalLM", "", message, "XForCausalLM").problem
    assert judged("XForCausalLM", "", "XForCausalLM is not supported.", "XForCausalLM").refused


def test_supported_class_without_a_case_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    (outcome,) = try_defaults("HyperCLOVAXForCausalLM")
    assert outcome.refused
    monkeypatch.setitem(
        families.ARCHITECTURES, "HyperCLOVAXForCausalLM", ARCHITECTURES["GraniteForCausalLM"]
    )
    (outcome,) = try_defaults("HyperCLOVAXForCausalLM")
    assert outcome.problem
    assert "no case" in outcome.problem


@pytest.mark.thorough
def test_ignored_switch_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "norm_topk_prob" in classes.switches(EVERY_CASE["olmoe"])
    assert try_switch("olmoe", "norm_topk_prob", tmp_path / "good").problem is None

    def deaf(config: Any, *rest: Any) -> Any:
        return spec_from_config({**config, "norm_topk_prob": False}, *rest)

    monkeypatch.setattr(folders, "spec_from_config", deaf)
    outcome = try_switch("olmoe", "norm_topk_prob", tmp_path / "deaf")
    assert outcome.problem is not None
    assert "a logprob differs by" in outcome.problem


@pytest.mark.slow
def test_classes_agree_or_are_rejected() -> None:
    assert not [each for each in try_all() if each.problem]
