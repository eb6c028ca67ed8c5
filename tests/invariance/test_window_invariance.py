"""Invariance if layers have a window: other sequences reuse blocks outside it, and no bit changes.

As in `test_schedule_invariance`, on a model whose layers all have a window and on one where some
have. Memory is often just enough for the longest request, so blocks are stripped, stripped prefixes
match, and chunks are cut.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from nano_inference import SamplingParams, TrainingSample
from nano_inference.checkpoints.loading import load_spec
from nano_inference.config import Backend
from nano_inference.device.kv_tensors import common_layout, unit_width
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.kv_codes import KvFormat
from tests.depth import at_depth
from tests.invariance.scenario import Request, Schedule, require_same_samples, run
from tests.invariance.test_schedule_invariance import BACKENDS, requests, schedules
from tests.models.tiny import tiny_model
from tests.structured.vocabularies import with_tokenizer

FAMILIES = ["mistral", "gemma2", "gemma3", "gemma4", "gemma4-moe"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: with_tokenizer(tiny_model(tmp_path_factory.mktemp(family), family))
        for family in FAMILIES
    }


def bytes_of_a_unit_token(spec: ModelSpec) -> int:
    layout = common_layout([spec], spec.max_position)
    return 2 * unit_width(spec, layout, KvFormat(torch.float32)) * torch.float32.itemsize


def fitted(schedule: Schedule, work: list[Request], spec: ModelSpec) -> Schedule:
    """`num_blocks` counts units here: little more than the longest request needs."""
    if schedule.num_blocks is None:
        return schedule
    layout = common_layout([spec], spec.max_position)
    longest = max(len(request.prompt) + request.params.max_tokens for request in work)
    least = layout.most_units(longest, 1, schedule.block_size)
    return replace(schedule, num_blocks=least + layout.num_units)


@cache
def alone(model: Path, request: Request, backend: Backend) -> dict[tuple[int, int], TrainingSample]:
    lonely = Request(request.prompt, request.params, request.num_samples)
    samples, _ = run(
        model,
        "float32",
        [lonely],
        Schedule(backend=backend),
        bytes_of_a_unit_token(load_spec(model)),
    )
    assert all(sample.finish_reason != "abort" for sample in samples.values()), (
        "even alone it reads what it may not"
    )
    return samples


def check(model: Path, work: list[Request], schedule: Schedule) -> int:
    spec = load_spec(model)
    together, preemptions = run(
        model, "float32", work, fitted(schedule, work, spec), bytes_of_a_unit_token(spec)
    )
    expected = {
        (place, index): sample
        for place, request in enumerate(work)
        for (_, index), sample in alone(model, request, schedule.backend).items()
    }
    require_same_samples(work, together, expected)
    return preemptions


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=at_depth(8),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(work=requests(), schedule=schedules)
def test_same_bits_under_any_schedule(
    models: dict[str, Path], family: str, backend: Backend, work: list[Request], schedule: Schedule
) -> None:
    check(models[family], work, replace(schedule, backend=backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=at_depth(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(work=requests(), schedule=schedules)
def test_same_bits_under_many_schedules(
    models: dict[str, Path], family: str, backend: Backend, work: list[Request], schedule: Schedule
) -> None:
    check(models[family], work, replace(schedule, backend=backend))


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_tight_cache_causes_preemption(
    models: dict[str, Path], family: str, cache_type: str
) -> None:
    work = [
        Request(tuple(range(3, 90 + i)), SamplingParams(max_tokens=30, seed=i), 3) for i in range(4)
    ]
    schedule = Schedule(block_size=4, num_blocks=1, max_chunk_tokens=40, cache_type=cache_type)  # pyright: ignore[reportArgumentType]
    assert check(models[family], work, schedule) > 0
