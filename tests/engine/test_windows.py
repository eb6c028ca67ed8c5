"""Memory and concurrency of an engine whose layers have windows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.errors import ConfigError, RequestTooLarge
from tests.models.tiny import tiny_model

Build = Callable[..., InferenceEngine]
WINDOWS = {"mistral": 24, "gemma3": 17, "llama": 0}
UNITS = {"mistral": (0, 1), "gemma3": (1, 3), "llama": (1, 0)}  # units per block: full, sliding
# keys and values of a token in one unit
UNIT_TOKEN_BYTES = {"mistral": 512, "gemma3": 128, "llama": 512}
SIZE = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tiny_model(tmp_path_factory.mktemp(family), family) for family in WINDOWS}


@pytest.fixture
def build(models: dict[str, Path]) -> Iterator[Build]:
    built: list[InferenceEngine] = []

    def make(family: str, num_units: int = 4000, **options: Any) -> InferenceEngine:
        memory = num_units * SIZE * UNIT_TOKEN_BYTES[family]
        settings = {
            "block_size": SIZE,
            "device": "cpu",
            "num_threads": 1,
            "kv_cache_memory": memory,
        } | options
        built.append(InferenceEngine(EngineConfig(model_path=str(models[family]), **settings)))
        return built[-1]

    yield make
    for engine in built:
        engine.shutdown()


def held(engine: InferenceEngine) -> int:
    return engine.cache.num_units - engine.cache.num_free_units()


def endless(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)


@pytest.mark.parametrize("family", WINDOWS)
def test_long_sequence_holds_only_its_window_and_full_layers(build: Build, family: str) -> None:
    engine = build(family)
    engine.add_request([5, 6, 7], endless(300))
    full, sliding = UNITS[family]
    for step in range(300):
        engine.step()
        if step < 299:
            computed = 3 + step
            blocks = -(-computed // SIZE)
            # first position visible to the next row
            seen = max(0, computed - WINDOWS[family] + 1) if sliding else 0
            assert held(engine) == full * blocks + sliding * (blocks - seen // SIZE)
            assert engine.stats().kv_use == pytest.approx(held(engine) / engine.cache.num_units)
    assert held(engine) == 0


def most_running(engine: InferenceEngine, count: int, length: int) -> int:
    for index in range(count):
        engine.add_request([5 + index, 6, 7], endless(length))
    most = 0
    while engine.has_pending():
        engine.step()
        stats = engine.stats()
        most = max(most, stats.num_running if stats.num_preemptions == 0 else 0)
    return most


@pytest.mark.thorough
def test_windows_let_more_sequences_share_the_memory(build: Build) -> None:
    # 128 blocks: full size of two sequences of 250 tokens
    memory = {"kv_cache_memory": 128 * SIZE * 512}
    full = build("llama", **memory)
    assert most_running(full, 12, 240) == 12
    assert full.stats().num_preemptions > 0
    sliding = build("mistral", **memory)
    assert most_running(sliding, 12, 240) == 12
    assert sliding.stats().num_preemptions == 0
    assert sliding.memory_budget.num_sequences(243) >= 12 > full.memory_budget.num_sequences(243)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_prefix_is_found_after_the_window_has_moved_on(
    build: Build, family: str, cache_type: str
) -> None:
    engine = build(family, cache_type=cache_type)
    prompt = [*range(3, 43)]
    (first,) = engine.generate([prompt], endless(100))
    (again,) = engine.generate([prompt], endless(100))
    assert again.cached_tokens == 36
    assert (again.completion_tokens, again.logprobs) == (first.completion_tokens, first.logprobs)
    longer = [*prompt, *first.completion_tokens]
    assert engine.generate([longer], endless(5))[0].cached_tokens == 136


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_request_runs_in_its_minimum_memory(build: Build, family: str) -> None:
    """One chunk would need more, so it is cut. With one unit less the engine lowers its sequence
    length.
    """
    full, sliding = UNITS[family]
    blocks = 300 // SIZE
    within = (WINDOWS[family] - 2) // SIZE + 2
    # a uniform cache would need `blocks` of both
    engine = build(family, num_units=full * blocks + sliding * within)
    assert engine.max_model_len == (300 if full else 512)
    prompt = [3 + i % 290 for i in range(290)]
    (sample,) = engine.generate([prompt], endless(10))
    assert len(sample.completion_tokens) == 10
    (roomy,) = build(family).generate([prompt], endless(10))
    assert (sample.completion_tokens, sample.logprobs) == (roomy.completion_tokens, roomy.logprobs)
    less = build(family, num_units=full * blocks + sliding * within - 1)
    assert less.max_model_len < engine.max_model_len
    with pytest.raises(RequestTooLarge, match="max_model_len"):
        less.generate([prompt], endless(10))


@pytest.mark.thorough
def test_device_copy_of_units_follows_the_pool(build: Build) -> None:
    engine = build("gemma3", num_units=120, backend="reference")
    mirror = engine.runner.storage.unit_map
    assert mirror is not None
    mirror._units = mirror._host.clone()  # pyright: ignore[reportPrivateUsage]  # as on a device: memory of its own
    samples = engine.generate([[3 + i, 4, 5] for i in range(6)], endless(60), 2)
    assert engine.stats().num_preemptions > 0
    assert bool((mirror.units() == mirror._host).all())  # pyright: ignore[reportPrivateUsage]
    (roomy, *_) = build("gemma3", backend="reference").generate([[3, 4, 5]], endless(60), 2)
    assert (samples[0].completion_tokens, samples[0].logprobs) == (
        roomy.completion_tokens,
        roomy.logprobs,
    )


def test_unchunked_prompt_needs_memory_for_all_its_tokens(build: Build) -> None:
    engine = build("mistral", num_units=20, enable_chunked_prefill=False, max_tokens_per_batch=512)
    assert engine.max_model_len == 80
    assert len(engine.generate([[3] * 60], endless(20))[0].completion_tokens) == 20


def test_memory_table_reports_the_later_cost_per_token(build: Build) -> None:
    budget = build("gemma3", num_units=400).memory_budget
    assert budget.num_units == 400
    assert budget.num_tokens == 400 // 4 * SIZE
    assert budget.bytes_per_token == 4 * 128
    for line in (
        "512 bytes",
        "128 bytes, once it has left the window of 17",
        "100 blocks of 4 tokens",
    ):
        assert line in str(budget)
    assert "left the window" not in str(build("llama").memory_budget)
    with pytest.raises(
        ConfigError, match=r"is too small for one block of 4 tokens; give at least 2,048 bytes"
    ):
        build("gemma3", num_units=3)


def test_window_that_no_sequence_outgrows_costs_nothing(build: Build) -> None:
    engine = build("mistral", max_model_len=24)
    assert engine.cache.units is None
    assert build("mistral", max_model_len=25).cache.units is not None


@pytest.mark.thorough
def test_mismatched_layers_keep_every_unit(build: Build, models: dict[str, Path]) -> None:
    """The reference has another layout. Blocks belong to both models, so none may drop units."""
    engine = build("mistral", ref_model_path=str(models["llama"]))
    assert engine.cache.units is None
    same = build("mistral", ref_model_path=str(models["mistral"]))
    assert same.cache.units is not None
    for target in (engine, same):
        (sample,) = target.generate([[5, 6, 7]], endless(60))
        assert sample.ref_logprobs is not None
        assert len(sample.ref_logprobs) == 60
