"""Classes of transformers: each is read, and a case shows that it agrees, or it is refused by one
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


def test_every_class_that_is_read_has_a_case() -> None:
    assert {case.class_name for case in EVERY_CASE.values()} == set(ARCHITECTURES)


def test_no_class_that_is_read_is_said_to_be_refused() -> None:
    assert not set(ARCHITECTURES) & set(REFUSED)


def test_every_other_class_is_refused_by_its_name() -> None:
    """Whatever else config.json says: its values mean other things there."""
    others = set(class_names()) - set(ARCHITECTURES)
    assert len(others) > 200
    for name in others:
        with pytest.raises(ModelLoadError) as refused:
            spec_from_config({"architectures": [name], "intermediate_size": [16384] * 30})
        assert judged(name, "", str(refused.value), name).problem is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("MambaForCausalLM", "MambaForCausalLM is not supported: .* which is not implemented."),
        ("Gemma3nForCausalLM", "Gemma3nForCausalLM is not supported: .* which is not implemented."),
        ("DeepseekV2ForCausalLM", "config.json lacks 'num_experts_per_tok'."),
        ("Qwen3ForCausalLMs", "the nearest .*Qwen3ForCausalLM "),
    ],
)
def test_what_a_refusal_says(name: str, told: str) -> None:
    fields = dict(next(classes.default_configs(name))[1]) if name in class_names() else {}
    with pytest.raises(ModelLoadError, match=told):
        spec_from_config(fields | {"architectures": [name]})


def test_bad_refusal_is_a_problem() -> None:
    for told in ("KeyError: 'x'", "XForCausalLM has\nno x.", "XForCausalLM " + "x" * 400 + "."):
        assert judged("XForCausalLM", "", told, "XForCausalLM").problem
    assert judged("XForCausalLM", "", "XForCausalLM is not supported.", "XForCausalLM").refused


def test_class_that_is_read_without_a_case_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = try_defaults("HyperCLOVAXForCausalLM")
    assert found.refused
    monkeypatch.setitem(
        families.ARCHITECTURES, "HyperCLOVAXForCausalLM", ARCHITECTURES["GraniteForCausalLM"]
    )
    (found,) = try_defaults("HyperCLOVAXForCausalLM")
    assert found.problem
    assert "no case" in found.problem


@pytest.mark.thorough
def test_switch_that_nobody_reads_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "norm_topk_prob" in classes.switches(EVERY_CASE["olmoe"])
    assert try_switch("olmoe", "norm_topk_prob", tmp_path / "good").problem is None

    def deaf(config: Any, *rest: Any) -> Any:
        return spec_from_config({**config, "norm_topk_prob": False}, *rest)

    monkeypatch.setattr(folders, "spec_from_config", deaf)
    found = try_switch("olmoe", "norm_topk_prob", tmp_path / "deaf")
    assert found.problem is not None
    assert "a logprob differs by" in found.problem


@pytest.mark.slow
def test_every_class_agrees_or_is_refused() -> None:
    assert not [each for each in try_all() if each.problem]
