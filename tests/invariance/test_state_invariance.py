"""Invariance if layers carry a state: chunks, batches, forks, preemption, prefix hits of either
cache, and drafts, right and wrong, change no bit.

As in `test_window_invariance`, memory is often just enough for the longest request. States are then
taken from held blocks, and prefixes match whose states are gone.
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
from nano_inference.device.kv_tensors import layers_of_a_unit, state_layout
from nano_inference.device.state_tensors import state_bytes
from nano_inference.models.spec.model import ModelSpec
from tests.depth import at_depth
from tests.invariance.scenario import Request, Schedule, require_same_samples, run
from tests.invariance.test_schedule_invariance import BACKENDS, requests, schedules
from tests.models.tiny import tiny_model
from tests.structured.vocabularies import with_tokenizer

FAMILIES = ["lfm2", "qwen3_5"]
PLENTY = 2**22  # bytes; filling more of them with NaN in each step takes time


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: with_tokenizer(tiny_model(tmp_path_factory.mktemp(family), family))
        for family in FAMILIES
    }


def plan(schedule: Schedule, work: list[Request], spec: ModelSpec) -> tuple[Schedule, int]:
    """Return the schedule, and bytes per token with which either keys or states just suffice for
    the longest request.
    """
    size, dtype = schedule.block_size, torch.float32
    layout = state_layout([spec], size)
    assert layout is not None
    assert spec.state is not None
    if schedule.num_blocks is None:
        return replace(schedule, num_blocks=1), PLENTY // size
    unit = state_bytes(spec.state, size, dtype)
    block = 2 * layers_of_a_unit(spec, layout) * spec.num_kv_heads * spec.head_dim
    block *= size * dtype.itemsize
    longest = max(len(request.prompt) + request.params.max_tokens for request in work)
    least = layout.most_units(longest, 1, size)
    memory = 2 * max((least + 1) * unit, (-(-longest // size) + 2) * block)
    return replace(schedule, num_blocks=1), -(-memory // size)


@cache
def alone(
    model: Path, dtype: str, request: Request, backend: Backend, device: str
) -> dict[tuple[int, int], TrainingSample]:
    lonely = Request(request.prompt, request.params, request.num_samples)
    schedule = Schedule(backend=backend, device=device, num_blocks=1)
    samples, _ = run(model, dtype, [lonely], schedule, PLENTY // schedule.block_size)
    assert all(sample.finish_reason != "abort" for sample in samples.values()), (
        "even alone it reads what it may not"
    )
    return samples


def check(model: Path, dtype: str, work: list[Request], schedule: Schedule) -> int:
    spec = load_spec(model)
    if spec.state is not None and spec.state.by_block:  # part of the fingerprint
        schedule = replace(schedule, block_size=Schedule.block_size)
    schedule, bytes_per_token = plan(schedule, work, spec)
    expected = {
        (place, index): sample
        for place, request in enumerate(work)
        for (_, index), sample in alone(
            model, dtype, request, schedule.backend, schedule.device
        ).items()
    }
    known = {key: sample.completion_tokens for key, sample in expected.items()}
    together, preemptions = run(model, dtype, work, schedule, bytes_per_token, known=known)
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
    check(models[family], "float32", work, replace(schedule, backend=backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=at_depth(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(work=requests(), schedule=schedules)
def test_same_bits_under_many_schedules(
    models: dict[str, Path],
    family: str,
    dtype: str,
    backend: Backend,
    work: list[Request],
    schedule: Schedule,
) -> None:
    check(models[family], dtype, work, replace(schedule, backend=backend))


@pytest.mark.thorough(cases=["lfm2-right", "lfm2-wrong", "qwen3_5-right"])
@pytest.mark.parametrize("drafts", ["right", "wrong", "changing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_bit(models: dict[str, Path], family: str, drafts: str) -> None:
    """Steps have several tokens across block boundaries. Wrong drafts leave no trace."""
    work = [Request((*range(3, 20 + i),), SamplingParams(max_tokens=30, seed=i)) for i in range(3)]
    schedule = Schedule(drafts=drafts, max_drafts=5)  # pyright: ignore[reportArgumentType]
    check(models[family], "bfloat16", work, schedule)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_tight_cache_causes_preemption(
    models: dict[str, Path], family: str, cache_type: str
) -> None:
    work = [
        Request(tuple(range(3, 40 + i)), SamplingParams(max_tokens=30, seed=i), 4) for i in range(4)
    ]
    schedule = Schedule(num_blocks=1, cache_type=cache_type)  # pyright: ignore[reportArgumentType]
    assert check(models[family], "float32", work, schedule) > 0
