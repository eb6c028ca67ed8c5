"""Tensors that hold all experts of a layer: whole tensors and sparse patches reach the same
parameters.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.checkpoints.loading import load_spec
from nano_inference.models.parameters.fused import fused_tensors
from nano_inference.models.parameters.table import param_table
from tests.models.families import CASES
from tests.models.strong import strong_model

FAMILIES = ("gpt-oss", "granite-moe", "qwen2-moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_single_numbers_map_to_the_same_place_as_whole_tensors(tmp_path: Path, family: str) -> None:
    case = CASES[family]
    strong_model(tmp_path, case.class_name, **case.config)
    fusions = fused_tensors(param_table(load_spec(tmp_path)))
    assert fusions
    for fused in fusions.values():
        whole = torch.arange(torch.Size(fused.shape).numel()).view(fused.shape)
        parts = dict(fused.split(whole))
        assert tuple(parts) == fused.parts
        places = torch.randperm(whole.numel())[:50]
        placed_parts = fused.split_places(places, places)
        assert sum(len(numbers) for _, _, numbers in placed_parts) == len(places)
        for name, inside, numbers in placed_parts:
            assert torch.equal(parts[name].flatten()[inside], numbers)


@pytest.mark.thorough
def test_trainers_tensors_of_gpt_oss_are_served(tmp_path: Path) -> None:
    """Use another model of the same shape, as transformers holds it in memory."""
    case = CASES["gpt-oss"]
    other = strong_model(tmp_path / "b", case.class_name, seed=1, **case.config)
    strong_model(tmp_path / "a", case.class_name, **case.config)
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**24}
    with InferenceEngine(EngineConfig(model_path=str(tmp_path / "a"), **common)) as engine:
        before = engine.weights_checksum()
        engine.update_weights(other.state_dict())
        updated = engine.weights_checksum()
    with InferenceEngine(EngineConfig(model_path=str(tmp_path / "b"), **common)) as engine:
        assert before != updated == engine.weights_checksum()
