"""Invariance on the CUDA backend, every kernel in Triton's interpreter: tiny models, few steps,
rows in shared batches.

An interpreted program costs a millisecond, so ordinary runs use a few chosen schedules: chunks that
cut tiles, splits of keys and of K, preemption, groups, both lookaheads. A few random schedules are
slow tests here, and many run on a card.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.checkpoints.loading import load_spec
from nano_inference.config import KVCacheDType
from nano_inference.device.kv_tensors import common_layout, kv_format, unit_width
from nano_inference.rl import differences
from nano_inference.rl.replayer import Replayer
from tests.invariance.scenario import (
    Request,
    Schedule,
    poison,
    require_same_samples,
    run,
    same_bits,
    small_tiles,
)
from tests.invariance.test_adapter_invariance import engine_with_adapters
from tests.invariance.test_schedule_invariance import requests, schedules
from tests.models.tiny import llama_config, llama_weights, tiny_model, write_model
from tests.structured.vocabularies import with_tokenizer

pytest.importorskip("triton")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}
MODELS = {
    "llama": {"num_hidden_layers": 1, "num_key_value_heads": 1},
    # both kinds of layers
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    # heads of two sizes, and a layer that reads keys of another one
    "gemma4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
    },
    # one layer of experts
    "deepseek-v3": {"num_hidden_layers": 2, "num_attention_heads": 4},
}
STEM = [(7 * i) % 290 + 3 for i in range(60)]

RANDOM = SamplingParams(
    temperature=0.8, max_tokens=4, seed=1, top_logprobs=3, raw_logprobs=True, ignore_eos=True
)
WORK = (
    Request(tuple(STEM[:41]), replace(RANDOM, top_k=5, max_tokens=3), num_samples=2),
    Request(tuple(STEM[:34]), replace(RANDOM, temperature=0.0, max_tokens=2), arrives=1),
    Request(tuple(STEM[:17]), replace(RANDOM, top_p=0.8, repetition_penalty=1.5), num_samples=3),
)
CHUNKS = Schedule(
    block_size=16, max_chunk_tokens=13, max_batch_size=3, lookahead=1, cache_type="radix"
)
WHOLE = Schedule(block_size=24, max_tokens_per_batch=30, lookahead=0, enable_prefix_caching=False)
CASES = [
    ("gemma3", CHUNKS),
    ("gemma3", replace(CHUNKS, kv_cache_dtype="fp8")),
    pytest.param("llama", replace(WHOLE, kv_cache_dtype="int8"), marks=pytest.mark.slow),
    pytest.param("llama", CHUNKS, marks=pytest.mark.slow),
    pytest.param("llama", WHOLE, marks=pytest.mark.slow),
    pytest.param("gemma3", WHOLE, marks=pytest.mark.slow),
    ("gemma4", CHUNKS),
    ("deepseek-v3", CHUNKS),
    pytest.param("gemma4", WHOLE, marks=pytest.mark.slow),
    pytest.param("deepseek-v3", WHOLE, marks=pytest.mark.slow),
]
TIGHT = tuple(
    Request(tuple(STEM[i : 21 + i]), replace(RANDOM, max_tokens=6, seed=i), num_samples=3)
    for i in range(2)
)


@pytest.fixture(scope="module", autouse=True)
def several_of_each() -> Iterator[None]:
    with small_tiles():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: with_tokenizer(tiny_model(tmp_path_factory.mktemp(name), name, **SIZES | own))
        for name, own in MODELS.items()
    }


def bytes_per_token(model: Path, kept: KVCacheDType = "auto") -> int:
    """Return the bytes per token of the layers that share a unit."""
    spec, form = load_spec(model), kv_format(torch.float32, kept)
    width = unit_width(spec, common_layout([spec], spec.max_position), form)
    return spec.kv_tensors * width * form.stored.itemsize


def fitted(model: Path, schedule: Schedule, work: list[Request]) -> Schedule:
    """Shrink the cache to little more than the longest request."""
    if schedule.num_blocks is None:
        return schedule
    spec = load_spec(model)
    layout = common_layout([spec], spec.max_position)
    longest = max(len(request.prompt) + request.params.max_tokens for request in work)
    return replace(
        schedule, num_blocks=layout.most_units(longest, 1, schedule.block_size) + layout.num_units
    )


@cache
def alone(
    model: Path, request: Request, kept: KVCacheDType
) -> dict[tuple[int, int], TrainingSample]:
    lonely = Request(request.prompt, request.params, request.num_samples)
    quiet = Schedule(backend="cuda", kv_cache_dtype=kept)
    samples, _ = run(model, "float32", [lonely], quiet, bytes_per_token(model, kept))
    assert all(sample.finish_reason != "abort" for sample in samples.values()), (
        "even alone it reads what it may not"
    )
    return samples


def check(model: Path, work: list[Request], schedule: Schedule) -> int:
    """Check that each sample has the bits of its request by itself. Return the number of
    preemptions.
    """
    schedule = replace(fitted(model, schedule, work), backend="cuda")
    kept = schedule.kv_cache_dtype
    together, preemptions = run(model, "float32", work, schedule, bytes_per_token(model, kept))
    expected = {
        (place, index): sample
        for place, request in enumerate(work)
        for (_, index), sample in alone(model, request, kept).items()
    }
    require_same_samples(work, together, expected)
    return preemptions


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_same_bits_under_chosen_schedules(
    models: dict[str, Path], name: str, schedule: Schedule
) -> None:
    check(models[name], list(WORK), schedule)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gemma4")),
        pytest.param("deepseek-v3", marks=pytest.mark.slow),
    ],
)
def test_same_bits_under_memory_shortage(models: dict[str, Path], name: str) -> None:
    assert check(models[name], list(TIGHT), Schedule(block_size=4, lookahead=1, num_blocks=1)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(work=requests(), schedule=schedules)
def test_same_bits_under_random_schedules(
    models: dict[str, Path], name: str, work: list[Request], schedule: Schedule
) -> None:
    check(models[name], work, schedule)


@pytest.mark.thorough
def test_adapter_bits_do_not_depend_on_neighbors(models: dict[str, Path]) -> None:
    """Cover prompts in chunks, decodes next to prompts, and adapters in shared tiles."""
    ask = replace(RANDOM, max_tokens=3, prompt_logprobs=True)
    names = (None, "large", "small", "large")
    work = [
        Request(
            tuple(STEM[: 5 + 6 * index]),
            replace(ask, adapter=name, seed=index),
            num_samples=1 + index % 2,
            arrives=index % 3,
        )
        for index, name in enumerate(names)
    ]
    model, adapted = models["gemma3"], engine_with_adapters
    size = bytes_per_token(model)
    expected: dict[tuple[int, int], TrainingSample] = {}
    for number, request in enumerate(work):
        lonely = replace(request, arrives=0)
        schedule = Schedule(backend="cuda", num_blocks=24)
        samples, _ = run(model, "float32", [lonely], schedule, size, adapted)
        expected |= {(number, index): sample for (_, index), sample in samples.items()}
    schedule = replace(fitted(model, CHUNKS, work), backend="cuda")
    together, _ = run(model, "float32", work, schedule, size, adapted)
    require_same_samples(work, together, expected)


CONFIG = llama_config(layers=1, hidden=32, num_heads=2, num_kv_heads=1, inner=64)
VERSIONS = {version: llama_weights(CONFIG, seed=version) for version in range(2)}


@pytest.mark.thorough
@pytest.mark.parametrize("kv_policy", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
def test_update_while_decoding_changes_no_other_bit(tmp_path: Path, kv_policy: str) -> None:
    """Replay reproduces samples that span an update. Afterwards the engine equals one on the new
    weights.
    """
    folders = [
        write_model(tmp_path / str(version), CONFIG, weights)
        for version, weights in VERSIONS.items()
    ]
    config = EngineConfig(
        model_path=str(folders[0]),
        dtype="float32",
        device="cpu",
        backend="cuda",
        batch_invariant=True,
        lookahead=1,
        block_size=4,
        kv_cache_memory=2**18,
    )
    prompt = STEM[:21]
    with (
        InferenceEngine(config) as engine,
        InferenceEngine(replace(config, model_path=str(folders[1]))) as new,
    ):
        engine.add_request(prompt, RANDOM, 2)
        engine.step()
        engine.step()
        engine.step()
        engine.update_weights(VERSIONS[1], kv_policy=kv_policy)  # pyright: ignore[reportArgumentType]
        samples: list[TrainingSample] = []
        while engine.has_pending():
            poison(engine)
            samples += engine.step()
        replayer = Replayer(engine, VERSIONS)
        for sample in samples:
            assert len(sample.weight_versions) == 2
            assert differences(sample, replayer.replay(sample)) == ()
        (after,), (expected,) = engine.generate(prompt, RANDOM), new.generate(prompt, RANDOM)
        assert same_bits(after, expected)
