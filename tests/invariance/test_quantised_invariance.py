"""The law holds for weights in 8 and 4 bits: no bit depends on the schedule, in any kind of
layer.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.config import Backend
from tests.invariance.scenario import Request, Schedule, require_same_samples, run
from tests.models.tiny import tiny_model

BYTES = 2**10  # of a token; at least what the tiny models take
PARAMS = SamplingParams(max_tokens=9, raw_logprobs=True, prompt_logprobs=True, ignore_eos=True)
WORK = [
    Request(
        tuple(range(3, 3 + length)), replace(PARAMS, seed=length, temperature=warm), count, arrives
    )
    for length, warm, count, arrives in ((40, 0.7, 2, 0), (33, 0.0, 1, 0), (70, 1.0, 1, 3))
]
ALONE = Schedule(num_blocks=16, num_threads=1)
SCHEDULES = {
    "tight": Schedule(block_size=4, num_blocks=24, max_tokens_per_batch=17, max_batch_size=3),
    "chunks": Schedule(num_blocks=24, max_chunk_tokens=7, cache_type="radix", lookahead=1),
    "drafts": Schedule(num_blocks=24, drafts="real", enable_prefix_caching=False),
}
STATES = ("qwen3_5", "lfm2")  # without drafts
FAMILIES: dict[Backend, dict[str, tuple[str, ...]]] = {  # with experts, states, latents, tied heads
    "cpu": {
        "int8": ("llama", "qwen3_5", "deepseek-v3"),
        "int8-32": ("gemma3", "lfm2", "qwen3-moe"),
        "int4": ("llama", "deepseek-v3", "gemma3"),
    },
    "reference": {"int8": ("llama",), "int8-32": ("lfm2", "gemma3"), "int4": ("deepseek-v3",)},
}
CASES = [
    (backend, quantization, family)
    for backend, by_format in FAMILIES.items()
    for quantization, families in by_format.items()
    for family in families
]


def engine(quantization: Any, config: EngineConfig) -> AbstractContextManager[InferenceEngine]:
    return InferenceEngine(replace(config, quantization=quantization))


@pytest.mark.parametrize(("backend", "quantization", "family"), CASES)
def test_same_bits_under_any_schedule(
    tmp_path: Path, backend: Backend, quantization: str, family: str
) -> None:
    folder, make = tiny_model(tmp_path, family), partial(engine, quantization)
    expected: dict[tuple[int, int], Any] = {}
    for place, request in enumerate(WORK):
        lonely = [replace(request, arrives=0)]
        samples, _ = run(folder, "bfloat16", lonely, replace(ALONE, backend=backend), BYTES, make)
        expected |= {(place, index): sample for (_, index), sample in samples.items()}
    known = {key: sample.completion_tokens for key, sample in expected.items()}
    for schedule in SCHEDULES.values():
        if schedule.drafts == "none" or family not in STATES:
            schedule = replace(schedule, backend=backend)
            together, _ = run(folder, "bfloat16", WORK, schedule, BYTES, make, known=known)
            require_same_samples(WORK, together, expected)
