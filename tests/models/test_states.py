"""Models whose layers carry a state: agreement with transformers at every position, what they
take of the memory, and what is refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nano_inference import ConfigError, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.config import Backend, CacheType
from nano_inference.engine.storage import KVStorage
from nano_inference.errors import ModelLoadError
from nano_inference.models.loading import load_spec
from nano_inference.models.spec import ModelSpec
from nano_inference.ops import reference_state
from nano_inference.rl import PolicyModel
from tests.models.strong import NOTICED, TOLERANCE, disagreement, rewrite_config, strong_model
from tests.models.tiny import tiny_model

LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_bias": True,
}


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("lfm2")
    return folder, strong_model(folder, "Lfm2ForCausalLM", **LFM2)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_lfm2_agrees_with_transformers(
    lfm2: tuple[Path, Any], backend: Backend, cache_type: CacheType
) -> None:
    folder, oracle = lfm2
    options: dict[str, Any] = {"cache_type": cache_type, "max_chunk_tokens": 33, "block_size": 8}
    assert disagreement(folder, oracle, backend=backend, **options) < TOLERANCE


def without_bias(spec: ModelSpec) -> ModelSpec:
    assert spec.state is not None
    return replace(spec, state=replace(spec.state, bias=False))


def without_norms(spec: ModelSpec) -> ModelSpec:
    return replace(spec, qk_norm=None)


@pytest.mark.parametrize("change", [without_bias, without_norms])
def test_what_lfm2_has_is_noticed(lfm2: tuple[Path, Any], change: Any) -> None:
    assert disagreement(*lfm2, lengths=(40,), change=change) > NOTICED


def test_tokens_before_are_noticed(lfm2: tuple[Path, Any]) -> None:
    """A convolution that sees its own token alone is another model."""
    real = reference_state.causal_conv

    def alone(inputs: Any, weight: Any, *rest: Any) -> Any:
        weight = weight.clone()
        weight[..., :-1] = 0
        return real(inputs, weight, *rest)

    with patch.object(reference_state, "causal_conv", alone):
        assert disagreement(*lfm2, backend="reference", lengths=(40,)) > NOTICED


def test_the_memory_is_what_the_table_says(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "lfm2")
    config = EngineConfig(model_path=str(folder), device="cpu", kv_cache_memory=2**20)
    with InferenceEngine(config) as engine:
        budget, storage = engine.memory_budget, engine.runner.storage
        assert storage.states is not None
        states = sum(tensor.nbytes for tensor in storage.states.tensors.values())
        assert states == budget.state_bytes * budget.num_units
        assert states + storage.keys.nbytes + storage.values.nbytes == budget.kv_cache
        assert 0.9 * 2**20 < budget.kv_cache <= 2**20
        assert f"{budget.num_units:,} of " in str(budget)
        engine.add_request(list(range(3, 60)), SamplingParams(max_tokens=20))
        while engine.has_pending():
            engine.step()
            # behind each block that is held and not the last two a state may be taken
            assert engine.cache.num_free_units() >= budget.num_units - 5


def test_a_prefix_is_found_whose_states_are_there(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "lfm2")
    config = EngineConfig(model_path=str(folder), device="cpu", kv_cache_memory=2**20)
    with InferenceEngine(config) as engine:
        prompt, params = list(range(3, 60)), SamplingParams(max_tokens=5, seed=0)
        first = engine.generate([prompt], params)[0]
        again = engine.generate([prompt], params)[0]
        assert again.cached_tokens == 48
        assert again.logprobs == first.logprobs


def test_blocks_with_states_travel(tmp_path: Path) -> None:
    """What one engine gives of a block, another takes: keys, values and states."""
    spec = load_spec(tiny_model(tmp_path, "lfm2"))
    one, other = (KVStorage(spec, 6, 4, torch.float32, torch.device("cpu")) for _ in range(2))
    for storage in (one, other):
        for tensor in storage.tensors:
            tensor.normal_()
    data = one.read_blocks([4, 1])
    assert data.shape[1] == 4 * torch.Size(one.block_shape).numel()
    other.write_blocks([2, 3], data)
    assert torch.equal(other.read_blocks([2, 3]), data)
    copies = other.read_blocks([0, 1])
    other.copy_blocks(((0, 5), (1, 4)))
    assert torch.equal(other.read_blocks([5, 4]), copies)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"context_parallel": 2, "block_size": 1024},
        {"attention": "flex"},
        {"draft_model": "self", "draft_layers": 1},
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = tiny_model(tmp_path, "lfm2")
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM"):
        InferenceEngine(EngineConfig(model_path=str(folder), device="cpu", **options))


def test_gradients_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "lfm2")
    config = EngineConfig(model_path=str(folder), device="cpu", kv_cache_memory=2**20)
    with InferenceEngine(config) as engine, pytest.raises(ConfigError, match="Lfm2ForCausalLM"):
        PolicyModel(engine)


@pytest.mark.parametrize(
    "types", [["conv"] * 4, ["conv", "full_attention"], ["mamba", "full_attention", "conv", "conv"]]
)
def test_layers_of_another_kind_are_refused(tmp_path: Path, types: list[str]) -> None:
    folder = tiny_model(tmp_path, "lfm2")
    rewrite_config(folder, layer_types=types)
    with pytest.raises(ModelLoadError, match="layer_types"):
        load_spec(folder)
