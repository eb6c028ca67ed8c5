"""Context parallel: ranks that share a sequence's keys and values equal one rank bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("msgspec")

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.config import Backend
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.kv_cache.block_hash import NO_PREFIX
from nano_inference.models import decoder
from nano_inference.models.sharding import context as shared_context
from nano_inference.models.sharding.context import SharedContext
from nano_inference.parallel.mesh import Mesh
from nano_inference.ranks import parts
from tests.invariance.scenario import Request, Schedule, run, same_bits, threads_restored
from tests.models.families import CASES
from tests.models.strong import strong_model
from tests.models.tiny import tiny_llama, tiny_model
from tests.ranks.rank_threads import ThreadLauncher

TOKEN = 2 * 2 * 16  # keys and values, layers, head_dim of the tiny model
DTYPES = {"float32": 4, "bfloat16": 2}
STEM = tuple((i * 7919) % 290 + 3 for i in range(2600))
TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_llama(folder, num_heads=2, num_kv_heads=1, hidden=32, inner=48, max_position=4096)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer in four has full attention, the others a window of 600 tokens."""
    folder = tmp_path_factory.mktemp("windowed")
    return tiny_model(folder, "gemma3", **TINY, sliding_window=600, max_position_embeddings=4096)


def work() -> list[Request]:
    """Return long and short requests: shared prefixes, groups, prompt scores and filters."""
    return [
        Request(STEM[:1300], SamplingParams(max_tokens=6, seed=1, temperature=0.8), num_samples=2),
        Request(
            (*STEM[:1100], 5),
            SamplingParams(max_tokens=3, seed=2, top_p=0.8, raw_logprobs=True),
            arrives=5,
        ),
        Request(
            (9, *STEM[:530]),
            SamplingParams(
                max_tokens=4,
                temperature=0,
                prompt_logprobs=True,
                prompt_top_logprobs=3,
                top_logprobs=2,
            ),
        ),
        Request((4, 5, 6), SamplingParams(max_tokens=8, seed=3, repetition_penalty=1.3), arrives=3),
    ]


@cache
def alone(
    model: Path, dtype: str, request: Request, backend: Backend
) -> dict[tuple[int, int], TrainingSample]:
    lonely = Request(request.prompt, request.params, request.num_samples)
    samples, _ = run(model, dtype, [lonely], Schedule(backend=backend), TOKEN * DTYPES[dtype])
    assert all(sample.finish_reason != "abort" for sample in samples.values())
    return samples


class Shared(NamedTuple):
    """Results of requests on the ranks of a mesh."""

    samples: dict[tuple[int, int], TrainingSample]
    num_preemptions: int
    num_cached_tokens: int
    rows_computed: list[int]  # per rank, descending
    kv_bytes: list[int]  # of each rank


class WatchedStorage(KVStorage):
    """Storage filled with NaN until written."""

    made: ClassVar[list[KVStorage]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keys.fill_(torch.nan)
        self.values.fill_(torch.nan)
        self.made.append(self)


class WatchedContext(SharedContext):
    made: ClassVar[list[SharedContext]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made.append(self)


def poison(engine: InferenceEngine) -> None:
    """Fill unheld, unmatchable blocks with NaN on every rank."""
    free = [
        block.block_id
        for block in engine.cache.blocks
        if block.ref_count == 0 and block.hash == NO_PREFIX
    ]
    if engine.cache.units is not None:
        free = list(engine.cache.units.free)
    for storage in WatchedStorage.made:
        storage.keys[:, :, free] = torch.nan
        storage.values[:, :, free] = torch.nan


def shared(
    model: Path, requests: list[Request], schedule: Schedule, mesh: Mesh, dtype: str = "float32"
) -> Shared:
    """Run the requests on the ranks of a mesh, one thread per rank."""
    made: list[InferenceEngine] = []
    kv_bytes: list[int] = []

    @contextmanager
    def make(config: EngineConfig) -> Iterator[InferenceEngine]:
        assert config.kv_cache_memory is not None
        # as many blocks as one rank would have
        memory = config.kv_cache_memory // mesh.context // mesh.pipeline
        sizes = {
            "tensor_parallel": mesh.tensor,
            "pipeline_parallel": mesh.pipeline,
            "context_parallel": mesh.context,
        }
        lookahead = None if mesh.pipeline > 1 else config.lookahead
        config = replace(config, **sizes, kv_cache_memory=memory, lookahead=lookahead)
        with InferenceEngine(config, ThreadLauncher()) as engine:
            made.append(engine)
            kv_bytes.extend(
                storage.keys.nbytes + storage.values.nbytes for storage in WatchedStorage.made
            )
            yield engine

    WatchedStorage.made.clear()
    WatchedContext.made.clear()
    with (
        patch.object(parts, "KVStorage", WatchedStorage),
        patch.object(decoder, "SharedContext", WatchedContext),
    ):
        samples, preemptions = run(
            model, dtype, requests, schedule, TOKEN * DTYPES[dtype], make, poison
        )
    rows = sorted((context.rows_computed for context in WatchedContext.made), reverse=True)
    return Shared(samples, preemptions, made[0].loop.num_cached_tokens, rows, kv_bytes)


def check(
    model: Path, requests: list[Request], schedule: Schedule, mesh: Mesh, dtype: str = "float32"
) -> Shared:
    """Check that each request has the same bits on several ranks as by itself on one."""
    together = shared(model, requests, schedule, mesh, dtype)
    for number, request in enumerate(requests):
        for (_, index), expected in alone(model, dtype, request, schedule.backend).items():
            assert same_bits(together.samples[number, index], expected), (
                f"request {number}, sample {index}: other bits"
            )
    return together


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("reference", 2),
        ("cpu", 4),
        pytest.param("reference", 4, marks=pytest.mark.slow),
        pytest.param("cpu", 2, marks=pytest.mark.slow),
    ],
)
def test_context_ranks_equal_one_rank_bit_for_bit(model: Path, backend: Backend, size: int) -> None:
    """Cover chunks of any length, prefix hits, lookahead, and both caches."""
    schedule = Schedule(
        block_size=512 * size,
        max_chunk_tokens=391,
        max_tokens_per_batch=700,
        lookahead=size // 2 - 1,
        cache_type="paged" if size == 2 else "radix",
        backend=backend,
        num_threads=size // 2,
    )
    dtype = "bfloat16" if backend == "cpu" and size == 4 else "float32"
    together = check(model, work(), schedule, Mesh(context=size), dtype)
    # a block of 1,024 matches, one of 2,048 does not
    assert (together.num_cached_tokens > 0) == (size == 2)


@pytest.mark.thorough(cases=["reference"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_long_prompt_is_computed_by_all_ranks(model: Path, backend: Backend) -> None:
    request = Request(STEM[:2500], SamplingParams(max_tokens=2, seed=4))
    together = check(model, [request], Schedule(block_size=2048, backend=backend), Mesh(context=4))
    # 2,048 positions evenly; the first rank has the rest of the prompt and the completion
    assert together.rows_computed == [512 + 453, 512, 512, 512]
    blocks = together.kv_bytes[0] * 4 // (2048 * TOKEN * DTYPES["float32"])
    assert together.kv_bytes == [blocks * 512 * TOKEN * DTYPES["float32"]] * 4


@pytest.mark.thorough
def test_preempted_sequences_resume_bit_for_bit(model: Path) -> None:
    requests = [
        Request((i + 3, *STEM[: 1020 + i]), SamplingParams(max_tokens=6, seed=i), num_samples=1)
        for i in range(3)
    ]
    tight = Schedule(block_size=1024, num_blocks=4, max_chunk_tokens=600, backend="reference")
    assert check(model, requests, tight, Mesh(context=2)).num_preemptions > 0


@pytest.mark.thorough
def test_traffic_between_ranks_is_bounded(model: Path) -> None:
    """Rows are sent in pieces if their states would be too large, and no bit changes."""
    with patch.object(shared_context, "MOST_NUMBERS", 100 * 2 * (16 + 2)):
        check(
            model,
            [Request(STEM[:1300], SamplingParams(max_tokens=2, seed=1))],
            Schedule(1024, backend="cpu"),
            Mesh(context=2),
        )


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_window_layers_share_their_keys(windowed: Path, backend: Backend) -> None:
    schedule = Schedule(block_size=1024, max_chunk_tokens=433, backend=backend)
    requests = [
        Request(STEM[:1500], SamplingParams(max_tokens=3, seed=1)),
        Request((*STEM[:1100], 5), SamplingParams(max_tokens=3, seed=2), arrives=4),
    ]
    check(windowed, requests, schedule, Mesh(context=2))


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_sink_counts_once(tmp_path: Path, backend: Backend) -> None:
    case = CASES["gpt-oss"]
    more = {"sliding_window": 600, "max_position_embeddings": 4096}
    strong_model(tmp_path, case.class_name, **case.config | more)
    requests = [
        Request(tuple(token % 290 for token in STEM[:1500]), SamplingParams(max_tokens=3, seed=1))
    ]
    schedule = Schedule(block_size=1024, max_chunk_tokens=433, backend=backend)
    check(tmp_path, requests, schedule, Mesh(context=2))


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [Mesh(tensor=2, context=2), Mesh(pipeline=2, context=2)])
def test_context_parallel_combines_with_other_options(model: Path, mesh: Mesh) -> None:
    check(
        model,
        [work()[0], work()[2]],
        Schedule(block_size=1024, max_chunk_tokens=700, num_threads=1),
        mesh,
    )


@pytest.mark.thorough
def test_processes_share_a_sequence(model: Path) -> None:
    """Use the option: the engine starts its second rank."""
    prompts = [list(STEM[:1600]), [5, 6, 7]]
    params = SamplingParams(max_tokens=5, seed=3, prompt_logprobs=True)
    options: dict[str, Any] = {
        "block_size": 1024,
        "max_chunk_tokens": 700,
        "num_threads": 1,
        "device": "cpu",
    }
    runs: list[list[TrainingSample]] = []
    for size in (1, 2):
        config = EngineConfig(
            model_path=str(model), context_parallel=size, kv_cache_memory=2**21, **options
        )
        with threads_restored(), InferenceEngine(config) as engine:
            runs.append(engine.generate(prompts, params, 2))
            assert engine.memory_budget.bytes_per_token == TOKEN * DTYPES["float32"] // size
    alone, together = runs
    assert all(map(same_bits, alone, together))
    assert [each.prompt_logprobs[1:] for each in alone if each.prompt_logprobs] == [
        each.prompt_logprobs[1:] for each in together if each.prompt_logprobs
    ]
    assert alone[0].numerics == together[0].numerics
