"""Invariance if the cache holds latents: chunks, batches, forks, preemption, prefix hits of either
cache, and drafts, right and wrong, change no bit.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from nano_inference import SamplingParams, TrainingSample
from nano_inference.config import Backend, CacheType
from tests.depth import at_depth
from tests.invariance.scenario import Drafts, Request, Schedule, require_same_samples, run
from tests.invariance.test_schedule_invariance import (
    BACKENDS,
    DTYPES,
    fitted,
    requests,
    schedules,
)
from tests.models.tiny import tiny_model
from tests.structured.vocabularies import with_tokenizer

VALUES_PER_TOKEN = 2 * (32 + 16)  # layers, latent and rotary part


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # prompts exceed the original context
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = tiny_model(tmp_path_factory.mktemp("latents"), "deepseek-v3", rope_scaling=scaling)
    return with_tokenizer(folder)


@cache
def alone(
    model: Path, dtype: str, request: Request, backend: Backend
) -> dict[tuple[int, int], TrainingSample]:
    lonely = Request(request.prompt, request.params, request.num_samples)
    size = VALUES_PER_TOKEN * DTYPES[dtype]
    samples, _ = run(model, dtype, [lonely], Schedule(backend=backend), size)
    assert all(sample.finish_reason != "abort" for sample in samples.values()), (
        "even alone it reads what it may not"
    )
    return samples


def check(model: Path, dtype: str, work: list[Request], schedule: Schedule) -> int:
    expected = {
        (place, index): sample
        for place, request in enumerate(work)
        for (_, index), sample in alone(model, dtype, request, schedule.backend).items()
    }
    known = {key: sample.completion_tokens for key, sample in expected.items()}
    size = VALUES_PER_TOKEN * DTYPES[dtype]
    together, preemptions = run(model, dtype, work, fitted(schedule, work), size, known=known)
    require_same_samples(work, together, expected)
    return preemptions


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(
    max_examples=at_depth(10),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(work=requests(), schedule=schedules)
def test_same_bits_under_any_schedule(
    model: Path, dtype: str, backend: Backend, work: list[Request], schedule: Schedule
) -> None:
    check(model, dtype, work, replace(schedule, backend=backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=at_depth(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(work=requests(), schedule=schedules)
def test_same_bits_under_many_schedules(
    model: Path, dtype: str, backend: Backend, work: list[Request], schedule: Schedule
) -> None:
    check(model, dtype, work, replace(schedule, backend=backend))


@pytest.mark.thorough
@pytest.mark.parametrize("drafts", ["right", "wrong", "changing", "real", "self"])
def test_drafts_change_no_bit(model: Path, drafts: Drafts) -> None:
    work = [Request((*range(3, 20 + i),), SamplingParams(max_tokens=30, seed=i)) for i in range(3)]
    check(model, "bfloat16", work, Schedule(drafts=drafts, max_drafts=5))


@pytest.mark.thorough
@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_tight_cache_causes_preemption(model: Path, cache_type: CacheType) -> None:
    """Forks of one prompt copy a half-full block of latents."""
    work = [
        Request(tuple(range(3, 40 + i)), SamplingParams(max_tokens=30, seed=i), 4) for i in range(4)
    ]
    schedule = Schedule(num_blocks=1, cache_type=cache_type)
    assert check(model, "float32", work, schedule) > 0


@pytest.mark.thorough
def test_latent_prefixes_are_reused(model: Path) -> None:
    """Later requests recompute no part of the stem and get the same bits."""
    stem = tuple(range(3, 70))
    work = [
        Request((*stem, 90 + i), SamplingParams(max_tokens=9, seed=i), arrives=3 * i)
        for i in range(4)
    ]
    for cache_type in ("paged", "radix"):
        check(model, "float32", work, Schedule(cache_type=cache_type))
