"""Invariance with adapters: a token's bits depend on the weights, its adapter and the tokens before
it. Other requests in the step, adapter updates and unloads do not matter.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.checkpoints.loading import load_spec
from nano_inference.checkpoints.lora import LoraSettings, targets_of
from nano_inference.config import Backend
from tests.depth import at_depth
from tests.invariance.scenario import Request, Schedule, require_same_samples, run
from tests.models.tiny import tiny_model

BYTES = 2**10  # of a token
NAMES = (None, "small", "large", "layers")
BACKENDS: tuple[Backend, ...] = ("cpu", "reference")
FAMILIES = ("llama", "gemma3", "deepseek-v3", "qwen3_5", "nanochat")


@cache
def adapter(folder: Path, name: str) -> tuple[dict[str, Tensor], LoraSettings]:
    """Return a random adapter: of rank 3 with the head, of rank 20, or of only some layers."""
    rank = {"small": 3, "large": 20, "layers": 8}[name]
    generator = torch.Generator().manual_seed(rank)
    tensors: dict[str, Tensor] = {}
    for slot, target in targets_of(load_spec(folder)).items():
        if name == "layers" and not slot.startswith("layers.1"):
            continue
        out, width = target.slot.shape
        for half, shape in (("A", (rank, width)), ("B", (out, rank))):
            numbers = torch.randn(shape, generator=generator) * 0.1
            tensors[f"base_model.model.{target.module}.lora_{half}.weight"] = numbers
    return tensors, LoraSettings(alpha=rank)


@contextmanager
def engine_with_adapters(config: EngineConfig) -> Iterator[InferenceEngine]:
    with InferenceEngine(replace(config, max_loras=3)) as engine:
        for name in NAMES[1:]:
            engine.load_adapter(name, *adapter(Path(config.model_path), name))
        yield engine


@contextmanager
def changing(config: EngineConfig) -> Iterator[InferenceEngine]:
    """Load and unload unused adapters, and load new versions of the others, which running requests
    do not use.
    """
    with engine_with_adapters(config) as engine:
        folder, step = Path(config.model_path), engine.step
        tensors, how = adapter(folder, "large")
        engine.unload_adapter("small")  # all its later requests have arrived

        def step_and_change() -> list[TrainingSample]:
            samples = step()
            if engine.loop.num_steps == 2:
                engine.load_adapter("large", {n: t * 2 for n, t in tensors.items()}, how)
                engine.load_adapter("other", tensors, how)
            return samples

        engine.step = step_and_change  # pyright: ignore[reportAttributeAccessIssue]
        yield engine


@st.composite
def requests(draw: Any) -> list[Request]:
    """Return up to five requests with a shared stem."""
    stem = draw(st.lists(st.integers(3, 299), min_size=30, max_size=30)) * 3
    return [
        Request(
            prompt=tuple(stem[: draw(st.sampled_from([0, 16, 33, 70]))])
            + tuple(draw(st.lists(st.integers(3, 299), min_size=1, max_size=9))),
            params=SamplingParams(
                adapter=draw(st.sampled_from(NAMES)),
                temperature=draw(st.sampled_from([0.0, 1.0])),
                max_tokens=draw(st.integers(1, 9)),
                seed=draw(st.integers(0, 3)),
                raw_logprobs=True,
                top_logprobs=draw(st.sampled_from([0, 3])),
                prompt_logprobs=draw(st.booleans()),
                ignore_eos=True,
            ),
            num_samples=draw(st.sampled_from([1, 2])),
            arrives=draw(st.sampled_from([0, 0, 2])),
        )
        for _ in range(draw(st.integers(2, 5)))
    ]


schedules = st.builds(
    Schedule,
    block_size=st.sampled_from([4, 16]),
    max_batch_size=st.sampled_from([2, 256]),
    max_tokens_per_batch=st.sampled_from([17, 8192]),
    max_chunk_tokens=st.sampled_from([None, 7, 33]),
    enable_prefix_caching=st.booleans(),
    lookahead=st.sampled_from([0, 1]),
    num_threads=st.sampled_from([1, 2]),
    num_blocks=st.sampled_from([None, 1]),
    cache_type=st.sampled_from(["paged", "radix"]),
    drafts=st.sampled_from(["none", "right", "wrong", "real"]),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_model(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@cache
def alone(folder: Path, dtype: str, backend: Backend, request: Request) -> Any:
    schedule = Schedule(backend=backend, num_blocks=24, num_threads=1)
    lonely = replace(request, arrives=0)
    return run(folder, dtype, [lonely], schedule, BYTES, engine_with_adapters)[0]


def expected_of(folder: Path, dtype: str, backend: Backend, work: list[Request]) -> Any:
    return {
        (place, index): sample
        for place, request in enumerate(work)
        for (_, index), sample in alone(folder, dtype, backend, request).items()
    }


@pytest.mark.thorough(cases=["reference-bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=at_depth(12), suppress_health_check=[HealthCheck.too_slow])
@given(work=requests(), schedule=schedules)
def test_adapter_bits_do_not_depend_on_neighbors(
    folders: dict[str, Path], backend: Backend, dtype: str, work: list[Request], schedule: Schedule
) -> None:
    folder = folders["llama"]
    expected = expected_of(folder, dtype, backend, work)
    if schedule.num_blocks is not None:  # makes preemption and eviction certain
        longest = max(len(each.prompt) + each.params.max_tokens for each in work)
        schedule = replace(schedule, num_blocks=-(-longest // schedule.block_size) + 2)
    known = {key: sample.completion_tokens for key, sample in expected.items()}
    schedule = replace(schedule, backend=backend)
    together, _ = run(folder, dtype, work, schedule, BYTES, engine_with_adapters, known=known)
    require_same_samples(work, together, expected)


def mixed(*names: str | None) -> list[Request]:
    params = SamplingParams(max_tokens=9, raw_logprobs=True, prompt_logprobs=True, ignore_eos=True)
    return [
        Request(tuple(range(3, 43 + place)), replace(params, adapter=name, seed=place), 2)
        for place, name in enumerate(names)
    ]


@pytest.mark.thorough(but=["reference-deepseek-v3"])
@pytest.mark.parametrize("family", FAMILIES[1:-1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_adapter_bits_hold_in_every_family(
    folders: dict[str, Path], backend: Backend, family: str
) -> None:
    folder, work = folders[family], mixed(None, "large", "small", "layers", "large")
    expected = expected_of(folder, "bfloat16", backend, work)
    schedule = Schedule(backend=backend, num_blocks=16, max_tokens_per_batch=17, max_batch_size=3)
    together, _ = run(folder, "bfloat16", work, schedule, BYTES, engine_with_adapters)
    require_same_samples(work, together, expected)
    tokens = {name: [] for name in NAMES}
    for (request, _), sample in expected.items():
        tokens[work[request].params.adapter] += sample.prompt_logprobs[1:10]
    assert len({tuple(each[:9]) for each in tokens.values()}) == 4  # the adapters change tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_logit_cap_is_unchanged_by_a_head_adapter(
    folders: dict[str, Path], backend: Backend
) -> None:
    folder, work = folders["nanochat"], mixed(None, "layers", "small", None, "layers")
    expected = expected_of(folder, "float32", backend, work)
    schedule = Schedule(backend=backend, num_blocks=64)
    together, _ = run(folder, "float32", work, schedule, BYTES, engine_with_adapters)
    require_same_samples(work, together, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_updates_and_unloads_change_no_bit_of_running_requests(
    folders: dict[str, Path], backend: Backend
) -> None:
    folder, work = folders["llama"], mixed("large", None, "layers", "large")
    expected = expected_of(folder, "float32", backend, work)
    schedule = Schedule(backend=backend, block_size=4, num_blocks=64, cache_type="radix")
    together, _ = run(folder, "float32", work, schedule, BYTES, changing)
    require_same_samples(work, together, expected)
