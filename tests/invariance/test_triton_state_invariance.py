"""Invariance of layers with a state on the CUDA backend, in Triton's interpreter: few requests in a
few chosen schedules, and drawn schedules as slow tests.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from nano_inference import SamplingParams
from tests.device.test_triton_states import LAYERS, SIZES
from tests.invariance.scenario import Request, Schedule, small_tiles
from tests.invariance.test_schedule_invariance import requests, schedules
from tests.invariance.test_state_invariance import check
from tests.models.tiny import tiny_model
from tests.structured.vocabularies import with_tokenizer

pytest.importorskip("triton")

STEM = [(7 * i) % 290 + 3 for i in range(60)]
RANDOM = SamplingParams(temperature=0.8, max_tokens=4, seed=1, raw_logprobs=True, ignore_eos=True)
# a group that forks within a block, and a prefix hit
WORK = [
    Request(tuple(STEM[:41]), replace(RANDOM, max_tokens=3), num_samples=2),
    Request(tuple(STEM[:34]), replace(RANDOM, temperature=0.0, max_tokens=2), arrives=2),
    Request(tuple(STEM[:17]), replace(RANDOM, top_p=0.8), num_samples=2),
]
CHUNKS = Schedule(max_chunk_tokens=13, max_batch_size=3, lookahead=1, cache_type="radix")
WHOLE = Schedule(block_size=24, max_tokens_per_batch=30, enable_prefix_caching=False, num_blocks=1)
TIGHT = [
    Request(tuple(STEM[i : 21 + i]), replace(RANDOM, max_tokens=14, seed=i), num_samples=3)
    for i in range(2)
]


@pytest.fixture(scope="module", autouse=True)
def several_of_each() -> Iterator[None]:
    with small_tiles():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = SIZES | {"vocab_size": 300}
    return {
        family: with_tokenizer(
            tiny_model(tmp_path_factory.mktemp(family), family, **sizes, **layers)
        )
        for family, layers in LAYERS.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", [CHUNKS, WHOLE], ids=["chunks", "whole"])
@pytest.mark.parametrize("family", LAYERS)
def test_states_have_the_same_bits_under_chosen_schedules(
    models: dict[str, Path], family: str, schedule: Schedule
) -> None:
    check(models[family], "float32", WORK, replace(schedule, backend="cuda"))


@pytest.mark.thorough
@pytest.mark.parametrize("family", LAYERS)
def test_states_have_the_same_bits_under_memory_shortage(
    models: dict[str, Path], family: str
) -> None:
    schedule = Schedule(block_size=4, lookahead=1, num_blocks=1, backend="cuda")
    assert check(models[family], "float32", TIGHT, schedule) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(work=requests(), schedule=schedules)
def test_states_have_the_same_bits_under_random_schedules(
    models: dict[str, Path], family: str, work: list[Request], schedule: Schedule
) -> None:
    check(models[family], "float32", work, replace(schedule, backend="cuda"))
