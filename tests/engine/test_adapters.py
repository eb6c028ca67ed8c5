"""Adapters of an engine: updates while requests run, unloads, limits."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    SamplingParams,
    TrainingSample,
    VersionSpan,
)
from nano_inference.checkpoints.loading import load_spec
from nano_inference.checkpoints.lora import targets_of
from nano_inference.config import Backend
from nano_inference.errors import AdapterError, ConfigError, InvalidRequest
from nano_inference.ops.lora import Adapter
from nano_inference.rl import differences, replay, score
from nano_inference.types import KvPolicy
from tests.models.tiny import tiny_llama

PROMPT = list(range(3, 40))
PARAMS = SamplingParams(max_tokens=12, seed=1, adapter="own", ignore_eos=True)


def matrices(folder: Path, seed: int) -> dict[str, Tensor]:
    """Return random adapter matrices of rank 4 for every target module."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for target in targets_of(load_spec(folder)).values():
        out, width = target.slot.shape
        for half, shape in (("A", (4, width)), ("B", (out, 4))):
            name = f"base_model.model.{target.module}.lora_{half}.weight"
            tensors[name] = torch.randn(shape, generator=generator) * 0.2
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["cpu", "reference"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[InferenceEngine]:
    with make(folder, backend=request.param) as engine:
        yield engine


def make(folder: Path, backend: Backend = "cpu", **options: Any) -> InferenceEngine:
    fields: dict[str, Any] = {"max_loras": 2, "kv_cache_memory": 2**22, "device": "cpu"}
    return InferenceEngine(EngineConfig(str(folder), backend=backend, **(fields | options)))


def whole(engine: InferenceEngine, params: SamplingParams = PARAMS) -> TrainingSample:
    (sample,) = engine.generate([PROMPT], params)
    return sample


def bits(sample: TrainingSample) -> tuple[Any, ...]:
    return sample.completion_tokens, sample.logprobs


def begun(engine: InferenceEngine, tokens: int = 4) -> int:
    """Start a request and step `tokens` times."""
    request_id = engine.add_request(PROMPT, PARAMS)
    for _ in range(tokens):
        engine.step()
    return request_id


def rest(engine: InferenceEngine) -> TrainingSample:
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    (sample,) = samples
    return sample


def test_adapter_update_spares_running_requests(engine: InferenceEngine, folder: Path) -> None:
    engine.load_adapter("own", matrices(folder, 1))
    old = whole(engine)
    begun(engine)
    engine.load_adapter("own", matrices(folder, 2))
    sample = rest(engine)
    assert bits(sample) == bits(old)
    assert sample.adapter_versions == (VersionSpan(1, 0, 12),)
    new = whole(engine)
    assert new.adapter_versions == (VersionSpan(2, 0, 12),)
    assert new.logprobs != old.logprobs
    assert new.cached_tokens == 0  # blocks of the old version never match again


def test_unload_frees_the_matrices_after_the_last_request(
    engine: InferenceEngine, folder: Path
) -> None:
    engine.load_adapter("own", matrices(folder, 1))
    loaded = engine.loop.sequences.adapters["own"]
    assert isinstance(loaded, Adapter)
    adapter = weakref.ref(loaded)
    del loaded
    begun(engine)
    engine.unload_adapter("own")
    gc.collect()
    assert adapter() is not None, "a request still uses it"
    rest(engine)
    gc.collect()
    assert adapter() is None


def test_recompute_continues_under_the_new_version_only(
    engine: InferenceEngine, folder: Path
) -> None:
    engine.load_adapter("own", matrices(folder, 1))
    begun(engine)
    engine.load_adapter("own", matrices(folder, 2), kv_policy="recompute")
    sample = rest(engine)
    (first, second) = sample.adapter_versions
    assert (first.version, second.version, second.end) == (1, 2, 12)
    # like a request whose prompt contains the sampled tokens
    known = sample.completion_tokens[: second.start]
    with make(folder, engine.config.backend) as other:
        other.load_adapter("own", matrices(folder, 2))
        alone = other.resume_from(
            sample_until(sample, second.start), max_new_tokens=12 - second.start
        )
        again = rest(other)
    assert alone == again.request_id
    assert again.completion_tokens[: second.start] == known
    assert bits(again) == bits(sample)


def where(engine: InferenceEngine) -> set[int]:
    """Return the addresses of the live version's matrices."""
    adapter = engine.shared.loop.sequences.adapters["own"]
    assert isinstance(adapter, Adapter)
    return {part.a.data_ptr() for parts in adapter.parts.values() for part in parts}


def test_memory_of_an_unloaded_version_is_reused(engine: InferenceEngine, folder: Path) -> None:
    engine.load_adapter("own", matrices(folder, 1))
    old, first = whole(engine), where(engine)
    begun(engine)
    for seed in (2, 3, 4):  # none of them is written while the first request runs
        engine.load_adapter("own", matrices(folder, seed))
        assert not where(engine) & first
    assert bits(rest(engine)) == bits(old)
    new = whole(engine)
    assert new.logprobs != old.logprobs
    wrong = matrices(folder, 5)
    name = sorted(wrong)[-1]
    wrong[name][-1, -1] = torch.nan
    with pytest.raises(AdapterError, match=r"lora_B of 'model.layers.1.self_attn.v_proj' is not f"):
        engine.load_adapter("own", wrong)
    assert bits(whole(engine)) == bits(new)  # the rejected version was written to other memory
    addresses = [where(engine)]
    for _ in range(4):
        engine.load_adapter("own", matrices(folder, 1))
        addresses.append(where(engine))
    assert len({min(each) for each in addresses}) < len(addresses)
    assert bits(whole(engine)) == bits(old)
    halves = {name: tensor[:2] if "_A" in name else tensor[:, :2] for name, tensor in wrong.items()}
    halves = {name: tensor.nan_to_num(0.1) for name, tensor in halves.items()}
    assert engine.load_adapter("own", halves).rank == 2  # another layout, and not contiguous
    with make(folder, engine.config.backend) as other:
        other.load_adapter("own", {name: tensor.clone() for name, tensor in halves.items()})
        assert bits(whole(other)) == bits(whole(engine))


def sample_until(sample: TrainingSample, length: int) -> TrainingSample:
    """Return a partial sample with its first tokens."""
    return replace(
        sample,
        completion_tokens=sample.completion_tokens[:length],
        logprobs=sample.logprobs[:length],
        log_kept_mass=(sample.log_kept_mass or ())[:length],
        loss_mask=sample.loss_mask[:length],
        weight_versions=(VersionSpan(0, 0, length),),
        adapter_versions=(VersionSpan(1, 0, length),),
        kv_versions=(),
        finish_reason="abort",
    )


def test_keep_continues_with_the_cached_keys(engine: InferenceEngine, folder: Path) -> None:
    engine.load_adapter("own", matrices(folder, 1))
    old = whole(engine)
    begun(engine)
    computed = engine.runner.tokens_computed
    engine.load_adapter("own", matrices(folder, 2), kv_policy="keep")
    sample = rest(engine)
    first, second = sample.adapter_versions
    assert (first.version, second.version) == (1, 2)
    assert engine.runner.tokens_computed - computed == 12 - second.start
    assert sample.completion_tokens[: first.end] == old.completion_tokens[: first.end]
    assert whole(engine).cached_tokens == 0  # blocks of mixed versions are not published


def test_abort_ends_only_requests_of_the_adapter(engine: InferenceEngine, folder: Path) -> None:
    engine.load_adapter("own", matrices(folder, 1))
    engine.add_request(PROMPT, SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    request_id = begun(engine)
    engine.load_adapter("own", matrices(folder, 2), kv_policy="abort")
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    ends = {sample.request_id: sample.finish_reason for sample in samples}
    assert ends.pop(request_id) == "abort"
    assert [*ends.values()] == ["length"]


def test_waiting_request_starts_with_the_newest_version(
    engine: InferenceEngine, folder: Path
) -> None:
    engine.load_adapter("own", matrices(folder, 1))
    engine.add_request(PROMPT, PARAMS)
    engine.load_adapter("own", matrices(folder, 2))
    assert rest(engine).adapter_versions == (VersionSpan(2, 0, 12),)


def test_unloaded_adapter_serves_its_running_requests(
    engine: InferenceEngine, folder: Path
) -> None:
    engine.load_adapter("own", matrices(folder, 1))
    old = whole(engine)
    begun(engine)
    engine.unload_adapter("own")
    with pytest.raises(InvalidRequest, match="adapter='own' is not loaded; loaded adapters: none"):
        engine.add_request(PROMPT, PARAMS)
    assert bits(rest(engine)) == bits(old)
    info = engine.load_adapter("own", matrices(folder, 3))
    assert info.version == 2  # the adapter's blocks of version 1 are never read again
    assert whole(engine).cached_tokens == 0


def test_base_update_does_not_affect_the_adapter(engine: InferenceEngine, folder: Path) -> None:
    engine.load_adapter("own", matrices(folder, 1))
    plain = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    before, adapted = whole(engine, plain), whole(engine)
    engine.load_adapter("own", matrices(folder, 2))
    assert bits(whole(engine, plain)) == bits(before)
    assert whole(engine, plain).cached_tokens > 0
    weights = engine.weight_sync.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    engine.update_weights({name: weights[name] * 1.5}, blocking=True)
    assert whole(engine).weight_version == 1
    assert whole(engine).logprobs != adapted.logprobs


def test_adapter_limits_are_enforced(folder: Path) -> None:
    with make(folder) as engine:
        for name in ("one", "two"):
            engine.load_adapter(name, matrices(folder, 1))
        with pytest.raises(AdapterError, match="max_loras=2 adapters are already loaded"):
            engine.load_adapter("three", matrices(folder, 1))
        engine.load_adapter("two", matrices(folder, 2), version=7)
        for version in (7, 3, -1, 1.5):
            with pytest.raises(AdapterError, match="must be an integer above 7"):
                engine.load_adapter("two", matrices(folder, 2), version=version)
        with pytest.raises(
            AdapterError, match="adapter 'three' is not loaded; loaded adapters: 'one'"
        ):
            engine.unload_adapter("three")
        with pytest.raises(AdapterError, match="kv_policy='wait' must be one of"):
            engine.load_adapter("two", matrices(folder, 2), kv_policy="wait")
        for name in ("", "x" * 257, 3, "a\nb"):
            with pytest.raises(
                AdapterError, match="must be a printable string of 1 to 256 characters"
            ):
                engine.load_adapter(name, matrices(folder, 1))
        assert [(info.name, info.version) for info in engine.adapters()] == [("one", 1), ("two", 7)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_lora_rank": 257}, "max_lora_rank=257 must be at most 256"),
        ({"loras": ("own",)}, "loras: 'own' must be NAME=FOLDER"),
        ({"loras": ("a=x", "a=y")}, "names an adapter twice"),
        ({"max_loras": -1}, "max_loras=-1"),
    ],
)
def test_config_rejects_impossible_adapter_options(
    folder: Path, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        EngineConfig(str(folder), **options)


def test_engine_without_adapter_slots_rejects_adapters(folder: Path) -> None:
    expected = pytest.raises(AdapterError, match="set max_loras to the number to allow")
    with make(folder, max_loras=0) as engine, expected:
        engine.load_adapter("own", matrices(folder, 1))


def test_matrices_belong_to_the_caller_after_loading(engine: InferenceEngine, folder: Path) -> None:
    tensors = matrices(folder, 1)
    engine.load_adapter("own", tensors)
    before = whole(engine)
    engine.flush_cache()
    for tensor in tensors.values():
        tensor.fill_(torch.nan)
    assert bits(whole(engine)) == bits(before)


def test_replay_uses_the_adapter(engine: InferenceEngine, folder: Path) -> None:
    engine.load_adapter("own", matrices(folder, 1))
    sample = whole(engine)
    assert differences(sample, replay(engine, sample)) == ()
    engine.load_adapter("own", matrices(folder, 2))
    with pytest.raises(InvalidRequest, match="version 1 of adapter 'own', and the engine has"):
        replay(engine, sample)
    assert differences(whole(engine), replay(engine, whole(engine))) == ()


def test_unload_drops_the_blocks_of_the_adapter(engine: InferenceEngine, folder: Path) -> None:
    engine.load_adapter("own", matrices(folder, 0))
    keeping = replace(PARAMS, keep_cache_seconds=3600.0)
    whole(engine, keeping)
    assert engine.stats().num_kept_blocks > 0
    engine.add_request(PROMPT, keeping)
    engine.step()
    engine.unload_adapter("own")
    assert engine.stats().num_kept_blocks == 0
    rest(engine)
    assert engine.stats().num_kept_blocks == 0


@pytest.mark.thorough(cases=["cpu-weights"])
@pytest.mark.parametrize("what", ["adapter", "weights"])
def test_blocks_of_mixed_versions_are_not_kept(
    engine: InferenceEngine, folder: Path, what: str
) -> None:
    engine.load_adapter("own", matrices(folder, 0))
    keeping = replace(PARAMS, max_tokens=40, keep_cache_seconds=3600.0)
    engine.add_request(PROMPT, keeping)
    for _ in range(20):
        engine.step()
    if what == "adapter":
        engine.load_adapter("own", matrices(folder, 5), kv_policy="keep")
    else:
        engine.update_weights({"model.norm.weight": engine.model.params["norm"]}, kv_policy="keep")
    rest(engine)
    assert engine.stats().num_kept_blocks == 0


@pytest.mark.parametrize("kv_policy", ["recompute", "keep"])
def test_prompt_scores_come_from_one_version(folder: Path, kv_policy: KvPolicy) -> None:
    params = replace(PARAMS, prompt_logprobs=True)
    with make(folder, max_tokens_per_batch=16) as engine:
        engine.load_adapter("own", matrices(folder, 1))
        engine.add_request(PROMPT, params)
        engine.step()  # part of the prompt
        engine.load_adapter("own", matrices(folder, 2), kv_policy=kv_policy)
        sample = rest(engine)
        assert sample.adapter_versions == (VersionSpan(2, 0, 12),)
        assert repr(sample.prompt_logprobs) == repr(whole(engine, params).prompt_logprobs)


@pytest.mark.parametrize("kv_policy", ["finish_old", "recompute", "keep", "abort"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_score_uses_one_version_of_an_adapter(folder: Path, kv_policy: KvPolicy, at: int) -> None:
    sequences = [PROMPT, list(range(50, 90))]
    with make(folder, max_tokens_per_batch=16, max_batch_size=1) as engine:
        engine.load_adapter("own", matrices(folder, 1))
        steps, step = [0], engine.loop.step

        def step_and_load() -> list[TrainingSample]:
            steps[0] += 1
            if steps[0] == at:
                engine.load_adapter("own", matrices(folder, 2), kv_policy=kv_policy)
            return step()

        engine.loop.step = step_and_load
        scores = score(engine, sequences, adapter="own")
        assert repr(scores) == repr(score(engine, sequences, adapter="own"))
