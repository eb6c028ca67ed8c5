"""Sleeping and waking, completely or in parts, change no token."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    WeightUpdateError,
)
from tests.engine.test_control import LENGTH, drawn, same
from tests.models.tiny import tiny_llama
from tests.weights.weight_cases import EMBEDDING, HEAD, NEW, PROMPT, Build, drain


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_sleep_changes_no_bit(build: Build, weights: bool, backend: str) -> None:
    expected = build(backend=backend).generate(PROMPT, drawn())[0]
    engine = build(backend=backend, ref_model_path=str(build().config.model_path))
    checksum = engine.weights_checksum()
    engine.add_request(PROMPT, drawn())
    for _ in range(4):
        engine.step()
    engine.sleep(weights=weights)
    assert engine.is_paused()
    assert engine.step() == []
    with pytest.raises(InvalidRequest, match="asleep"):
        engine.resume()
    with pytest.raises(InvalidRequest, match="already asleep"):
        engine.sleep()
    if weights:
        with pytest.raises(WeightUpdateError, match="asleep"):
            engine.update_weights(NEW, blocking=True)
        with pytest.raises(WeightUpdateError, match="asleep"):
            engine.weights_checksum()
    engine.wake()
    assert engine.weights_checksum() == checksum
    (sample,) = drain(engine)
    assert same(replace(sample, ref_logprobs=None), expected)
    assert sample.ref_logprobs == sample.raw_logprobs
    engine.wake()  # no work


def test_sleep_releases_memory(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "wide", hidden=512, inner=2048, vocab_size=8192, layers=4)
    config = EngineConfig(model_path=str(folder), kv_cache_memory=64 * 2**20, num_threads=1)
    process = psutil.Process()
    with InferenceEngine(config) as engine:
        engine.runner.storage.keys.fill_(1.0)
        engine.runner.storage.values.fill_(1.0)
        kv = engine.runner.storage.keys.nbytes * 2
        held = sum(param.numel() * 4 for param in engine.model.params.values())
        full = process.memory_info().rss
        engine.sleep()
        assert full - process.memory_info().rss > 0.9 * kv, "the cache"
        engine.wake()
        asleep = process.memory_info().rss
        engine.sleep(weights=True)
        assert asleep - process.memory_info().rss > 0.8 * held, "the weights"
        engine.wake()
        engine.generate([1, 2, 3], SamplingParams(max_tokens=3))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_tied_head_is_not_compared_with_released_memory(
    build: Build, tied: Path, backend: str
) -> None:
    engine = build(model_path=str(tied), backend=backend)
    embedding = load_file(tied / "model.safetensors")[EMBEDDING]
    engine.sleep(weights=True)
    for head in (embedding, torch.zeros_like(embedding)):
        with pytest.raises(WeightUpdateError, match="cannot be read while the weights are asleep"):
            engine.update_weights({HEAD: head})
    with pytest.raises(WeightUpdateError, match="differs from it"):
        engine.update_weights({HEAD: embedding, EMBEDDING: embedding + 1})
    engine.update_weights({HEAD: embedding + 1, EMBEDDING: embedding + 1})
    engine.wake()
    engine.update_weights({HEAD: embedding + 1})
    assert engine.get_weight_version() == 2


@pytest.mark.parametrize("weights", [False, True])
def test_update_during_a_sleep_is_live_after_it(build: Build, weights: bool) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn())
    engine.step()
    engine.sleep(weights)
    tensors = {name: tensor.clone() for name, tensor in NEW.items()}
    update = engine.update_weights(tensors, kv_policy="recompute")
    assert update.done() is not weights
    for tensor in tensors.values():
        tensor.zero_()
    engine.wake()
    engine.step()
    assert update.done()
    checksum = engine.weights_checksum()
    engine.update_weights(NEW, blocking=True)
    assert engine.weights_checksum() == checksum
    (sample,) = drain(engine)
    assert {span.version for span in sample.weight_versions} == {0, 1, 2}


@pytest.mark.parametrize("paused", [False, True])
def test_awake_weights_are_updated_while_the_cache_sleeps(build: Build, paused: bool) -> None:
    """Trainers that share the device wake the weights, update, then wake the cache."""
    expected = build(NEW).generate(PROMPT, drawn())[0]
    engine = build()
    engine.add_request(PROMPT, drawn())
    if paused:
        engine.pause()
    for _ in range(2):
        engine.sleep(memory=["kv_cache", "weights"])
        assert engine.sleeping() == ("weights", "kv_cache")
    engine.wake(memory=["weights"])
    assert engine.sleeping() == ("kv_cache",)
    engine.update_weights(NEW, blocking=True)
    assert engine.get_weight_version() == 1
    computed = engine.stats().tokens_computed
    assert engine.step() == []
    engine.wake(memory=["kv_cache", "weights"])
    assert engine.is_paused() is paused
    assert engine.step() == []
    assert (engine.stats().tokens_computed == computed) is paused
    engine.resume()
    (sample,) = drain(engine)
    assert sample.completion_tokens == expected.completion_tokens
    assert sample.logprobs == expected.logprobs


def test_sleep_of_only_the_weights_keeps_the_cache(build: Build) -> None:
    expected = build().generate(PROMPT, drawn())[0]
    engine = build()
    engine.add_request(PROMPT, drawn())
    engine.step()
    engine.sleep(memory=["weights"])
    engine.pause()
    engine.resume()
    assert engine.is_paused(), "it is asleep"
    computed = engine.stats().tokens_computed
    engine.wake()
    (sample,) = drain(engine)
    assert same(sample, expected)
    assert engine.stats().tokens_computed == computed + LENGTH - 1, "nothing was computed again"
    with pytest.raises(InvalidRequest, match="memory='all' does not exist"):
        engine.sleep(memory=["all"])  # pyright: ignore[reportArgumentType]
    assert not engine.is_paused()
