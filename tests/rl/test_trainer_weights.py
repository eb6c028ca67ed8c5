"""The engine's weights from a PEFT model equal the weights that the model computes with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from nano_inference import ConfigError
from nano_inference.rl.trainer_weights import whole_weights
from tests.models.families import CASES
from tests.models.strong import strong_model

# PEFT warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)
IDS = torch.tensor([[3, 4, 5, 6]])
NAME = "model.layers.0.self_attn.q_proj.weight"


def adapted(folder: Path, family: str, *modules: str) -> Any:
    case = CASES[family]
    oracle = strong_model(folder, case.class_name, **case.config)
    settings: Any = {"target_modules": list(modules), "init_lora_weights": False}
    return get_peft_model(oracle, LoraConfig(r=4, **settings)).eval()


@torch.no_grad()
def test_merged_adapter_stays_merged(tmp_path: Path) -> None:
    model = adapted(tmp_path, "llama", "q_proj")
    with whole_weights(model) as weights:
        expected = weights[NAME].clone()
    model.merge_adapter()
    before = model(IDS).logits
    with whole_weights(model) as weights:
        assert torch.equal(weights[NAME], expected)
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_adapter_of_a_tied_tensor_is_rejected(tmp_path: Path, module: str) -> None:
    model = adapted(tmp_path, "gemma2", "q_proj", module)
    rejected = pytest.raises(ConfigError, match=f"an adapter of .*{module}.* cannot be merged")
    with rejected, whole_weights(model):
        pass
