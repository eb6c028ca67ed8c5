"""Models with recurrent layers: agreement with transformers at every position, memory use, and
rejected settings.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference import ConfigError, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.loading import load_spec
from nano_inference.config import Backend, CacheType
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.reference import state as reference_state
from nano_inference.rl import PolicyModel
from tests.models.families import DELTA, DELTA_WITH_PICTURES, LFM2, NEXT
from tests.models.strong import (
    LENGTHS,
    NOTICED,
    TOLERANCE,
    disagreement,
    rewrite_config,
    strong_model,
)
from tests.models.tiny import tiny_model


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


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3_5")
    return folder, strong_model(folder, "Qwen3_5ForCausalLM", **DELTA)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_qwen3_5_agrees_with_transformers(qwen: tuple[Path, Any], backend: Backend) -> None:
    options: dict[str, Any] = {"max_chunk_tokens": 33, "block_size": 8}
    lengths = LENGTHS if backend == "cpu" else (1, 5, 40)  # computed row by row in Python there
    difference = disagreement(*qwen, backend=backend, lengths=lengths, **options)
    assert difference < TOLERANCE


def test_qwen3_next_agrees_with_transformers(tmp_path: Path) -> None:
    """The same layers with joint projections and experts, including a shared one."""
    oracle = strong_model(tmp_path, "Qwen3NextForCausalLM", **NEXT)
    assert disagreement(tmp_path, oracle) < TOLERANCE


def test_text_part_of_a_larger_class_agrees(tmp_path: Path) -> None:
    oracle = strong_model(tmp_path, "Qwen3_5ForConditionalGeneration", **DELTA_WITH_PICTURES)
    assert disagreement(tmp_path, oracle, lengths=(1, 5, 40)) < TOLERANCE


def without_offset(spec: ModelSpec) -> ModelSpec:
    return replace(spec, norm_offset=0.0)


def with_larger_epsilon(spec: ModelSpec) -> ModelSpec:
    return replace(spec, rms_norm_eps=0.1)


def turning_whole_heads(spec: ModelSpec) -> ModelSpec:
    return replace(spec, ropes=tuple(replace(rope, share=1.0) for rope in spec.ropes))


@pytest.mark.parametrize("change", [without_offset, with_larger_epsilon, turning_whole_heads])
def test_omitted_feature_of_qwen3_5_is_detected(qwen: tuple[Path, Any], change: Any) -> None:
    assert disagreement(*qwen, lengths=(40,), change=change) > NOTICED


def no_gate(x: Any, _gate: Any) -> Any:
    return x


def no_state(rows: Any, *rest: Any) -> Any:
    """Compute every row as if it were the first."""
    return (
        rows.beta[:, :, None]
        * rows.v
        * (rows.q * rows.k).sum(-1).repeat_interleave(2, 1)[..., None]
    )


def no_decay(rows: Any, *rest: Any) -> Any:
    return delta_rule(rows._replace(decay=torch.zeros_like(rows.decay)), *rest)


def no_beta(rows: Any, *rest: Any) -> Any:
    return delta_rule(rows._replace(beta=torch.ones_like(rows.beta)), *rest)


def queries_as_they_are(rows: Any, *rest: Any) -> Any:
    """The norm after the layer cancels a head's scale. Only the norm of each query has
    an effect.
    """
    return delta_rule(rows._replace(k=rows.k * 1.1), *rest)


delta_rule = reference_state._delta_rule


@pytest.mark.parametrize("rule", [no_state, no_decay, no_beta, queries_as_they_are])
def test_omitted_part_of_the_delta_rule_is_detected(qwen: tuple[Path, Any], rule: Any) -> None:
    with patch.object(reference_state, "_delta_rule", rule):
        assert disagreement(*qwen, backend="reference", lengths=(40,)) > NOTICED


def test_omitted_attention_gate_is_detected(qwen: tuple[Path, Any]) -> None:
    with patch.object(reference, "sigmoid_gate", no_gate):
        assert disagreement(*qwen, backend="reference", lengths=(40,)) > NOTICED


def test_fingerprint_includes_the_state_interval(tmp_path: Path) -> None:
    unnoticed: list[str] = []
    for family, size in (("qwen3_5", 16), ("qwen3_5", 32), ("lfm2", 16)):
        folder = tiny_model(tmp_path / f"{family}-{size}", family)
        config = EngineConfig(
            model_path=str(folder), device="cpu", kv_cache_memory=2**22, block_size=size
        )
        with InferenceEngine(config) as engine:
            unnoticed.append(engine.numerics.fingerprint)
    assert unnoticed == [
        f"{unnoticed[2]}/states-of-16",
        f"{unnoticed[2]}/states-of-32",
        unnoticed[2],
    ]


def test_multi_token_prediction_tensors_are_ignored(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen3_5")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    config = EngineConfig(model_path=str(folder), device="cpu", kv_cache_memory=2**22)
    with InferenceEngine(config) as engine:
        assert engine.generate([[3, 4]], SamplingParams(max_tokens=2))


def without_bias(spec: ModelSpec) -> ModelSpec:
    assert spec.state is not None
    return replace(spec, state=replace(spec.state, bias=False))


def without_norms(spec: ModelSpec) -> ModelSpec:
    return replace(spec, qk_norm=None)


@pytest.mark.parametrize("change", [without_bias, without_norms])
def test_omitted_feature_of_lfm2_is_detected(lfm2: tuple[Path, Any], change: Any) -> None:
    assert disagreement(*lfm2, lengths=(40,), change=change) > NOTICED


def test_convolution_uses_preceding_tokens(lfm2: tuple[Path, Any]) -> None:
    """A convolution over its own token only would be another model."""
    real = reference_state.causal_conv

    def alone(inputs: Any, weight: Any, *rest: Any) -> Any:
        weight = weight.clone()
        weight[..., :-1] = 0
        return real(inputs, weight, *rest)

    with patch.object(reference_state, "causal_conv", alone):
        assert disagreement(*lfm2, backend="reference", lengths=(40,)) > NOTICED


@pytest.mark.thorough(cases=["lfm2"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_memory_equals_the_table(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path, family)
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
            # one state after each held block except the last two
            assert engine.cache.num_free_units() >= budget.num_units - 5


def test_prefix_is_reused_up_to_a_saved_state(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "lfm2")
    config = EngineConfig(model_path=str(folder), device="cpu", kv_cache_memory=2**20)
    with InferenceEngine(config) as engine:
        prompt, params = list(range(3, 60)), SamplingParams(max_tokens=5, seed=0)
        first = engine.generate([prompt], params)[0]
        again = engine.generate([prompt], params)[0]
        assert again.cached_tokens == 48
        assert again.logprobs == first.logprobs


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_blocks_with_states_transfer_between_engines(tmp_path: Path, family: str) -> None:
    """One engine exports a block, another imports it: keys, values and states."""
    spec = load_spec(tiny_model(tmp_path, family))
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
def test_unsupported_combination_is_rejected_by_name(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = tiny_model(tmp_path, "lfm2")
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM"):
        InferenceEngine(EngineConfig(model_path=str(folder), device="cpu", **options))


def test_gradients_are_rejected_by_name(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "lfm2")
    config = EngineConfig(model_path=str(folder), device="cpu", kv_cache_memory=2**20)
    with InferenceEngine(config) as engine, pytest.raises(ConfigError, match="Lfm2ForCausalLM"):
        PolicyModel(engine)


@pytest.mark.parametrize(
    "types", [["conv"] * 4, ["conv", "full_attention"], ["mamba", "full_attention", "conv", "conv"]]
)
def test_layers_of_another_kind_are_rejected(tmp_path: Path, types: list[str]) -> None:
    folder = tiny_model(tmp_path, "lfm2")
    rewrite_config(folder, layer_types=types)
    with pytest.raises(ModelLoadError, match="layer_types"):
        load_spec(folder)
