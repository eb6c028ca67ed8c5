"""Qwen3-MoE, whose layers may or may not have experts: parity, bits, and updates under both naming
schemes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.config import Backend
from nano_inference.errors import WeightUpdateError
from tests.models.tiny import tiny_model
from tests.parity.compare import ROWS, TOLERANCE, agreement, compare_rows, complete

TINY: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 2**24}
PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 70)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def engine_of(folder: Path, **options: Any) -> InferenceEngine:
    return InferenceEngine(
        EngineConfig(model_path=str(folder), **{"dtype": "float32", **TINY, **options})
    )


@pytest.mark.parametrize("renormalized", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_qwen3_moe_agrees_with_transformers(
    tmp_path: Path, backend: Backend, renormalized: bool
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path, "qwen3-moe", norm_topk_prob=renormalized)
    oracle: Any
    oracle, loaded = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)  # pyright: ignore
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    with engine_of(folder, backend=backend) as engine:
        assert engine.spec.moe is not None
        assert engine.spec.moe.layers == (True, False, True)
        samples, _ = complete(engine, PROMPTS, GREEDY, 1, preempted=False)
    actual = agreement(oracle.eval(), samples)
    assert actual.tokens_equal == actual.tokens
    assert actual.largest_difference <= TOLERANCE


def test_qwen3_moe_has_the_same_bits_in_other_configurations(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen3-moe")
    for result in compare_rows(str(folder), "bfloat16", PROMPTS, 12, (ROWS[1], ROWS[4]), **TINY):
        assert result["equal"] == result["samples"], result


@pytest.mark.thorough(cases=["mixtral"])
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_update_accepts_expert_names_of_transformers(tmp_path: Path, family: str) -> None:
    """transformers has one tensor for all experts of a layer, a checkpoint one per expert."""
    from transformers import AutoModelForCausalLM

    old, new = tiny_model(tmp_path / "old", family), tiny_model(tmp_path / "new", family, seed=1)
    fused = AutoModelForCausalLM.from_pretrained(new).state_dict()
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    with engine_of(new) as engine:
        expected, checksum = (
            complete(engine, PROMPTS, GREEDY, 1, preempted=False)[0],
            engine.weights_checksum(),
        )
    with engine_of(old) as engine:
        assert engine.weights_checksum() != checksum
        engine.update_weights(fused, blocking=True, complete=True)
        assert engine.weights_checksum() == checksum
        samples, _ = complete(engine, PROMPTS, GREEDY, 1, preempted=False)
        assert [sample.logprobs for sample in samples] == [sample.logprobs for sample in expected]
        one = "model.layers.0.mlp.experts.gate_up_proj"
        with pytest.raises(WeightUpdateError, match=r"has shape \(\d, \d+, \d+\), expected"):
            engine.update_weights({one: fused[one][1:]}, blocking=True)
        expert = next(name for name in checksum if ".experts.1." in name)
        engine.update_weights(
            {expert: torch.zeros(engine.weight_sync.shapes[expert])}, blocking=True
        )
        changed = {
            name for name, digest in engine.weights_checksum().items() if digest != checksum[name]
        }
        assert changed == {expert}
