"""`CudaRunner` on the host: equal to the plain runner, and one copy per step in steady decode."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.device.cuda_runner import CudaRunner
from nano_inference.device.graphs import row_by_row
from nano_inference.device.units import UnitMap
from nano_inference.kv_cache.block_pool import Block
from nano_inference.kv_cache.sliding_window import BlockLayout, UnitPool
from nano_inference.ops.batches import Rows, batch_of_rows
from tests.device.cuda_cases import CheckingQueue, conventional
from tests.drafts.test_bits import PROMPT, set_drafts
from tests.invariance.scenario import same_bits
from tests.models.tiny import tiny_model
from tests.weights.weight_cases import Build, drain

__all__ = ["conventional"]
pytestmark = pytest.mark.usefixtures("conventional")


def runner(engine: InferenceEngine) -> CudaRunner:
    assert isinstance(engine.runner, CudaRunner)
    return engine.runner


def queue(engine: InferenceEngine) -> CheckingQueue:
    device_queue = runner(engine).queue
    assert isinstance(device_queue, CheckingQueue)
    return device_queue


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10, "seed": 5, "ignore_eos": True} | options))


REQUESTS: list[tuple[list[int], SamplingParams, int]] = [
    (list(range(20, 33)), params(), 3),
    ([1, 2, 3], params(temperature=0.0, max_tokens=14), 1),
    ([5, 6], params(top_k=20, top_p=0.9, seed=6), 2),
    (list(range(20, 40)), params(repetition_penalty=1.2, frequency_penalty=0.3, seed=7), 1),
    ([9], params(logit_bias={4: 2.0}, top_logprobs=3, raw_logprobs=True, seed=8, max_tokens=5), 1),
    ([9, 9, 1], params(top_k=5, sampling_mask=True, seed=9, max_tokens=6), 1),
    (list(range(100, 117)), params(prompt_logprobs=True, prompt_top_logprobs=2, seed=10), 2),
    ([3], params(allowed_token_ids=frozenset([5, 6, 7]), min_tokens=2, seed=11), 1),
    ([44, 45], params(min_p=0.05, temperature=0.7, seed=12, max_tokens=20), 1),
]


def workload(engine: InferenceEngine, gap: int = 2) -> list[TrainingSample]:
    """Add requests one after the other. Abort the second when the fifth arrives."""
    samples: list[TrainingSample] = []
    ids: list[int] = []
    for prompt, how, num_samples in REQUESTS:
        ids.append(engine.add_request(prompt, how, num_samples))
        if len(ids) == 8:
            samples += engine.abort(ids[2])
        for _ in range(gap):
            samples += engine.step()
            engine.loop.check()
    samples += drain(engine)
    assert engine.cache.num_free_blocks() == engine.cache.num_blocks
    return sorted(samples, key=lambda s: (s.request_id, s.sample_index))


def bare(sample: TrainingSample) -> TrainingSample:
    return replace(sample, numerics="", cached_tokens=0, kv_versions=())


OPTIONS: list[dict[str, Any]] = [
    {"lookahead": 0},
    {"lookahead": 1},
    {"lookahead": 1, "max_tokens_per_batch": 7, "max_chunk_tokens": 3, "cache_type": "radix"},
    {"lookahead": 1, "kv_cache_memory": 8 * 4096},
    {"lookahead": 1, "max_chunk_tokens": 1},
]


@pytest.mark.thorough(but=["{'lookahead': 1}"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_graphs_equal_eager_and_the_reference(build: Build, options: dict[str, Any]) -> None:
    plain = build(backend="reference", **options)
    expected = workload(plain)
    eager = build(backend="cuda", cuda_graphs=False, batch_invariant=True, **options)
    replayed = build(backend="cuda", batch_invariant=True, **options)
    for engine in (eager, replayed):
        actual = workload(engine)
        assert [repr(bare(sample)) for sample in actual] == [
            repr(bare(sample)) for sample in expected
        ]
        assert engine.stats().tokens_computed == plain.stats().tokens_computed
        assert engine.stats().prompt_tokens_computed == plain.stats().prompt_tokens_computed
    assert runner(eager).num_replays == 0
    assert runner(replayed).num_replays > 5
    assert runner(replayed).num_trunk_replays > 5
    for engine in (eager, replayed):
        counts = runner(engine)
        steps = counts.num_replays + counts.num_trunk_replays + counts.num_eager_steps
        assert steps == engine.stats().num_steps


def test_workload_covers_the_expected_cases(build: Build) -> None:
    """The equality test covers preemption, and sampling with and without graphs."""
    engine = build(backend="cuda", batch_invariant=True, **OPTIONS[3])
    workload(engine)
    assert engine.stats().num_preemptions > 0
    log = queue(engine).log
    assert log.count("forward") > log.count("draw") > 5


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}], ids=["plain", "filters"])
def test_steady_decode_uploads_one_copy_per_step(
    build: Build, lookahead: int, filters: dict[str, Any]
) -> None:
    engine = build(backend="cuda", lookahead=lookahead)
    for seed in range(3):
        engine.add_request([seed, 4, 5], params(seed=seed, max_tokens=30, **filters), 1)
    for _ in range(4):
        engine.step()
    log = queue(engine).log
    log.clear()
    before = runner(engine).num_replays
    for _ in range(8):
        engine.step()
    assert runner(engine).num_replays == before + 8
    # Reused slots of pinned memory were waited for long ago: two per step, up and down.
    step = ["wait", "upload", "forward", "draw", "wait", "download", "wait"]
    if lookahead:  # the next forward is queued before the host waits for the last sample
        step = ["wait", "upload", "forward", "wait", "draw", "wait", "download"]
    assert log == step * 8


def test_parameters_are_uploaded_when_they_change(build: Build) -> None:
    engine = build(backend="cuda", lookahead=1)
    for seed in range(3):
        engine.add_request([seed, 4, 5], params(seed=seed, max_tokens=30), 1)
    for _ in range(4):
        engine.step()
    uploads = queue(engine).uploads
    before = len(uploads)
    (ended,) = engine.abort(1)
    assert ended.completion_tokens
    for _ in range(6):
        engine.step()
    assert len(uploads) == before + 6 + 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_samples_agree(build: Build, dtype: str) -> None:
    """Cover a step computed but not sampled by a graph. NumPy has no bfloat16."""
    options: dict[str, Any] = {"lookahead": 1, "dtype": dtype}
    expected = build(backend="reference", **options).generate([7, 8, 9], params(top_logprobs=2), 2)
    engine = build(backend="cuda", **options)
    samples = engine.generate([7, 8, 9], params(top_logprobs=2), 2)
    assert [repr(bare(sample)) for sample in samples] == [repr(bare(sample)) for sample in expected]
    assert runner(engine).num_replays > 5


@pytest.mark.parametrize("graphs", [False, True])
def test_shutdown_frees_device_memory(build: Build, graphs: bool) -> None:
    """Memory is freed even if a reference to the engine remains: the next engine of the process
    needs it.
    """
    engine = build(backend="cuda", lookahead=1, cuda_graphs=graphs)
    engine.generate([7, 8, 9], params(), 2)
    storage, model = engine.runner.storage, engine.runner.models["policy"]
    held = [weakref.ref(tensor) for tensor in (storage.keys, storage.values, model.params["embed"])]
    del storage, model
    engine.shutdown()
    gc.collect()
    assert [tensor() for tensor in held] == [None] * 3


def test_group_may_be_wider_than_a_step(build: Build) -> None:
    """The fork's tokens exceed the buffers of graphs, so the next steps read them elsewhere."""
    expected = build(backend="reference", lookahead=1, max_batch_size=3).generate(
        [7, 8, 9], params(), 7
    )
    engine = build(backend="cuda", lookahead=1, max_batch_size=3)
    samples = engine.generate([7, 8, 9], params(), 7)
    assert [repr(bare(sample)) for sample in samples] == [repr(bare(sample)) for sample in expected]
    assert runner(engine).num_replays > 5


def test_step_may_hold_only_scores(build: Build, model: Path) -> None:
    """The reference model scores finished samples, even in steps that sample nothing."""
    engines = [
        build(backend=name, lookahead=1, ref_model_path=str(model))
        for name in ("reference", "cuda")
    ]
    expected, actual = (engine.generate([7, 8, 9], params(), 2) for engine in engines)
    assert actual[0].ref_logprobs is not None
    assert [repr(bare(sample)) for sample in actual] == [repr(bare(sample)) for sample in expected]


@pytest.mark.thorough(cases=["mistral"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_equal_the_reference(build: Build, tmp_path: Path, family: str) -> None:
    """Cover layers whose keys and values are in units reused from other blocks."""
    model = str(tiny_model(tmp_path / family, family))
    options: dict[str, Any] = {"model_path": model, "lookahead": 1, "kv_cache_memory": 2**17}
    expected = workload(build(backend="reference", **options))
    engine = build(backend="cuda", batch_invariant=True, **options)
    assert engine.runner.storage.unit_map is not None
    assert [repr(bare(sample)) for sample in workload(engine)] == [
        repr(bare(sample)) for sample in expected
    ]
    assert runner(engine).num_replays > 5


@pytest.mark.thorough(
    cases=["{}-gemma3", "{'top_p': 0.9}-gemma3", "{'frequency_penalty': 0.5}-gemma3"]
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"frequency_penalty": 0.5}], ids=str)
def test_decode_graphs_compute_drafts(
    build: Build, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """Cover right and wrong drafts; windows move in gemma3."""
    model = str(tiny_model(tmp_path / family, family))
    how: dict[str, Any] = {"model_path": model, "lookahead": 1}
    asked = params(max_tokens=40, **options)
    expected = build(backend="reference", **how).generate([PROMPT], asked, 3)
    engine = build(backend="cuda", batch_invariant=True, **how)
    known = {(0, sample.sample_index): sample.completion_tokens for sample in expected}
    steps: list[int] = []
    for kind in ("changing", "right"):
        set_drafts(engine, kind, known)
        before = runner(engine).num_replays, runner(engine).num_trunk_replays
        engine.flush_cache()
        samples = engine.generate([PROMPT], asked, 3)
        assert all(map(same_bits, samples, expected))
        steps.append(runner(engine).num_replays - before[0])
        assert runner(engine).num_trunk_replays - before[1] == 1  # the prompt
        assert runner(engine).num_eager_steps == 0
    assert steps[1] < 30  # so there were drafts


def test_row_by_row_makes_a_chunk_of_every_row() -> None:
    chunks = [Rows([5, 6, 7], 3, [9, 4]), Rows([8], 6, [2, 1])]
    batch = batch_of_rows(chunks, 4, draws=range(4))
    split = row_by_row(batch)
    assert split.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert split.row_chunks.tolist() == [0, 1, 2, 3]
    assert split.seq_lens.tolist() == [4, 5, 6, 7]
    assert split.block_tables.tolist() == [[9, 4], [9, 4], [9, 4], [2, 1]]
    for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
        assert torch.equal(getattr(split, name), getattr(batch, name))
    assert row_by_row(split) is split


def test_mirror_of_units_keeps_its_address() -> None:
    """Captured graphs hold its address."""
    pool = UnitPool(12, 4, BlockLayout(1, 2, 8))
    units = UnitMap(pool, torch.device("cpu"))
    mirror = units._units = units._host.clone()  # as on a GPU
    blocks = [Block(block_id) for block_id in (2, 0)]
    for block in blocks:
        pool.assign(block)
        assert units.units() is mirror
        assert torch.equal(mirror, units._host)
        assert not pool.changed
    blocks[0].num_users = 0
    pool.offer(blocks[0])
    assert pool.reclaim()
    assert not torch.equal(mirror, units._host)
    assert torch.equal(units.units(), units._host)
