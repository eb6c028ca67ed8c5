"""A merged adapter is a model that was loaded from merged weights, and goes without a trace."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.errors import (
    AdapterError,
    AdapterNotFound,
    InvalidRequest,
    WeightUpdateError,
)
from nano_inference.models.lora import LoraSettings
from tests.engine.test_adapters import matrices
from tests.models.tiny import tiny_llama

PROMPT = list(range(3, 40))
SETTINGS = LoraSettings(rank=4, alpha=8.0)
SCALE = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def adapter_of(folder: Path, seed: int) -> dict[str, Tensor]:
    return {name: t for name, t in matrices(folder, seed).items() if "lm_head" not in name}


@pytest.fixture(params=["cpu", "reference"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[InferenceEngine]:
    with make(folder, request.param) as engine:
        for seed, name in enumerate(("own", "other")):
            engine.load_adapter(name, adapter_of(folder, seed), SETTINGS)
        yield engine


def make(folder: Path, backend: Any = "cpu", **options: Any) -> InferenceEngine:
    fields: dict[str, Any] = {"max_loras": 2, "kv_cache_memory": 2**22, "device": "cpu"}
    return InferenceEngine(EngineConfig(str(folder), backend=backend, **(fields | options)))


def sample(engine: InferenceEngine, adapter: str | None = None) -> TrainingSample:
    params = SamplingParams(max_tokens=12, seed=1, adapter=adapter, ignore_eos=True)
    (found,) = engine.generate([PROMPT], params)
    return found


def bits(found: TrainingSample) -> tuple[Any, ...]:
    return found.completion_tokens, found.logprobs


def merged_folder(folder: Path, target: Path, seed: int) -> Path:
    """The checkpoint with the adapter in its weights, by a way of its own."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    tensors, pairs = load_file(folder / "model.safetensors"), adapter_of(folder, seed)
    for name in [name for name in pairs if "lora_A" in name]:
        a, b = pairs[name], pairs[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").replace(".lora_A", "")
        delta = torch.zeros(b.shape[0], a.shape[1])
        for rank in range(a.shape[0]):
            delta = delta + torch.outer(b[:, rank], a[rank])
        old = tensors[module]
        tensors[module] = (old.float() + SCALE * delta).to(old.dtype)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_merged_is_the_model_of_merged_weights_and_comes_apart_again(
    engine: InferenceEngine, folder: Path, tmp_path: Path
) -> None:
    before, beside, sums = sample(engine), sample(engine, "own"), engine.weights_checksum()
    assert engine.merge_adapter("own") == 1
    assert engine.get_weight_version() == 1
    merged = sample(engine)
    assert merged.cached_tokens == 0, "a block of the old weights matched"
    assert merged.weight_version == 1
    assert bits(sample(engine, "own")) == bits(merged)
    assert bits(merged) != bits(before)
    assert merged.logprobs[0] == pytest.approx(beside.logprobs[0], abs=0.1)
    backend = engine.config.backend
    with make(merged_folder(folder, tmp_path / "merged", 0), backend, max_loras=0) as other:
        assert other.weights_checksum() == engine.weights_checksum()
        assert bits(sample(other)) == bits(merged)
    assert engine.unmerge_adapter() == 2
    assert engine.weights_checksum() == sums
    assert bits(sample(engine)) == bits(before)
    assert bits(sample(engine, "own")) == bits(beside)


def test_what_would_see_two_adapters_is_refused(engine: InferenceEngine) -> None:
    beside = sample(engine, "other")
    with pytest.raises(AdapterNotFound, match="'third' is not loaded"):
        engine.merge_adapter("third")
    with pytest.raises(AdapterError, match="no adapter is merged"):
        engine.unmerge_adapter()
    params = SamplingParams(max_tokens=4, adapter="other", ignore_eos=True)
    request = engine.add_request(PROMPT, params)
    engine.step()
    with pytest.raises(AdapterError, match=f"request {request} is computed with adapter 'other'"):
        engine.merge_adapter("own")
    while engine.has_pending():
        engine.step()
    engine.merge_adapter("own")
    sums = engine.weights_checksum()
    with pytest.raises(InvalidRequest, match="'other' cannot be computed while adapter 'own'"):
        sample(engine, "other")
    with pytest.raises(AdapterError, match="'own' is merged already"):
        engine.merge_adapter("other")
    new = {"model.norm.weight": engine.model.params["norm"] * 1.5}
    for update in (engine.update_weights, engine.weight_sync.stage):
        with pytest.raises(WeightUpdateError, match="'own' is merged into the weights"):
            update(new)
    with pytest.raises(WeightUpdateError, match="'own' is merged into the weights"):
        engine.weight_sync.begin()
    assert engine.weights_checksum() == sums
    engine.unmerge_adapter()
    engine.update_weights({"model.norm.weight": engine.model.params["norm"]}, blocking=True)
    assert bits(sample(engine, "other")) == bits(beside)


def test_a_request_that_runs_goes_on_under_the_merged_weights(engine: InferenceEngine) -> None:
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    engine.add_request(PROMPT, params)
    for _ in range(5):
        engine.step()
    engine.merge_adapter("own")
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    assert [span.version for span in samples[0].weight_versions] == [0, 1]
    engine.loop.check()


def test_codes_and_open_sessions_are_refused(folder: Path) -> None:
    with make(folder, quantization="int8") as engine:
        engine.load_adapter("own", adapter_of(folder, 0), SETTINGS)
        with pytest.raises(AdapterError, match="quantization='int8'"):
            engine.merge_adapter("own")
    with make(folder) as engine:
        engine.load_adapter("own", adapter_of(folder, 0), SETTINGS)
        engine.weight_sync.begin()
        with pytest.raises(AdapterError, match="an update is on its way"):
            engine.merge_adapter("own")
        assert bits(sample(engine, "own"))
