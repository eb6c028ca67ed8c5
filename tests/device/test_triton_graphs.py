"""Graphs, their sizes and buffers, under new weights, sleep, and hanging or failing devices."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference import EngineDead, InferenceEngine, TrainingSample
from nano_inference.core.failures import DeviceHangs, is_device_failure
from nano_inference.device import sleep as sleeping
from nano_inference.device.graphs import DrawResults, graph_sizes
from nano_inference.device.queues import Event, HostQueue, wait_for
from nano_inference.device.step_buffers import Downloads, StepInputs, Uploads, carve, specs_of
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.sampling.sample import Draw
from tests.device.cuda_cases import JUNK, CheckingQueue, conventional
from tests.device.test_cuda_runner import bare, params, queue, runner
from tests.weights.weight_cases import NEW, NEWER, Build, drain

__all__ = ["conventional"]

PROMPTS = [[5, 6, 7], [8, 9], list(range(30, 41))]


@pytest.mark.parametrize(
    "largest", [*range(1, 40), 64, 100, 255, 256, 257, 511, 512, 513, 1000, 1024, 4096]
)
def test_graph_sizes_cover_every_batch(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 38
    assert set(sizes[:-1]) >= {size for size in (1, 2, 4, 8, 16) if size < largest}
    if largest <= 512:
        assert all(size in sizes for size in range(16, largest, 16))
    gaps = np.diff([0, *sizes])
    assert gaps.max() <= max(16, largest / 16)


class LateEvent(Event):
    """An event that completes after a number of queries, or never."""

    def __init__(self, asks: float) -> None:
        self.left = asks

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_wait_ends_at_its_deadline() -> None:
    wait_for(LateEvent(5), 10.0)
    start = time.monotonic()
    with pytest.raises(DeviceHangs, match=r"hangs: it has not finished a step in 0\.05 seconds"):
        wait_for(LateEvent(float("inf")), 0.05)
    assert time.monotonic() - start < 30


def test_failure_is_attributed_to_device_or_caller() -> None:
    of_device = (
        DeviceHangs(""),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    )
    assert all(map(is_device_failure, of_device))
    assert not any(
        map(is_device_failure, (RuntimeError("shape"), ValueError("CUDA error"), MemoryError()))
    )


# -- buffers ---------------------------------------------------------------------------------------


def test_uploads_arrive_contiguously() -> None:
    queue = CheckingQueue()
    uploads = Uploads(queue, torch.device("cpu"))
    parts = [
        torch.arange(3),
        torch.tensor([0.5, 1.5, 2.5]),
        torch.zeros((0, 4), dtype=torch.int64),
        torch.tensor([True]),
        torch.tensor([0.1], dtype=torch.float64),
        torch.arange(12).view(3, 4),
    ]
    with queue.current():
        actual = uploads.send(parts)
        big = uploads.send([torch.arange(100_000)])  # more than the buffer's capacity
        assert uploads.send([]) == []
    assert len(queue.uploads) == 2
    for part, mine in zip(parts, actual, strict=True):
        assert part.dtype == mine.dtype
        assert torch.equal(part, mine)
        assert not mine.numel() or mine.data_ptr() % 16 == actual[0].data_ptr() % 16
    assert torch.equal(big[0], torch.arange(100_000))


def test_pinned_buffer_waits_for_the_copy_that_reads_it() -> None:
    class Slow(HostQueue):
        waited: list[Any]

        def upload(self, source: torch.Tensor, target: torch.Tensor) -> Any:
            super().upload(source, target)
            return LateEvent(1)

        def wait(self, event: Any) -> None:
            self.waited.append(event)
            super().wait(event)

    queue = Slow()
    queue.waited = []
    uploads = Uploads(queue, torch.device("cpu"))
    for _ in range(8):
        uploads.send([torch.arange(5)])
    assert len(queue.waited) == 2
    assert all(event.left < 0 for event in queue.waited)


def test_results_are_downloaded_unchanged() -> None:
    downloads = Downloads(CheckingQueue())
    results = DrawResults(3, torch.device("cpu"))
    logprobs, raw, mass = torch.arange(6.0).view(3, 2)
    nothing = torch.zeros(2, 0)
    draw = Draw(torch.tensor([4, 5]), logprobs, raw, mass, None, nothing, nothing, nothing)
    results.write(draw)
    fetched = downloads.fetch([results.buffer])
    columns = results.on_host(fetched.tensors[0], 2)
    assert [column.tolist() for column in columns] == [[4, 5], [0, 1], [2, 3], [4, 5]]
    assert results.keep_tokens(replace(draw, token_ids=torch.arange(4))).tolist() == [0, 1, 2, 3]
    assert results.token_ids.tolist() == [4, 5, 0], "there was no room"


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_step_is_padded(rows: int) -> None:
    queue, size, max_blocks = CheckingQueue(), 4, 6
    buffer = torch.full((StepInputs.num_words(8, 8, max_blocks),), JUNK)
    inputs = StepInputs(buffer, size, size, max_blocks)
    chunks = [Rows([7 + row], 2 * row + 1, [row, 9, 3][: 1 + row]) for row in range(rows)]
    batch = replace(
        batch_of_rows(chunks, 4, draws=range(rows)),
        relay_rows=torch.tensor([rows - 1]),
        relay_sources=torch.tensor([2]),
    )
    uploads = Uploads(queue, torch.device("cpu"))
    with queue.current():
        inputs.write(batch, uploads)
    assert len(queue.uploads) == 1
    mine, width = inputs.batch, batch.block_tables.shape[1]
    missing = size - rows
    assert mine.input_ids.tolist() == [*batch.input_ids.tolist(), *[0] * missing]
    assert mine.positions.tolist() == [*batch.positions.tolist(), *[0] * missing]
    assert mine.slot_mapping.tolist() == [*batch.slot_mapping.tolist(), *[-1] * missing]
    assert mine.seq_lens.tolist() == [*batch.seq_lens.tolist(), *[0] * missing]
    assert mine.cu_seqlens_q.tolist() == [*range(rows + 1), *[rows] * missing]
    assert inputs.relay_sources.tolist() == [*[-1] * (rows - 1), 2, *[-1] * missing]
    assert mine.table_stride is not None
    assert mine.table_stride.tolist() == [width]
    tables = mine.block_tables.flatten()
    assert tables[: rows * width].tolist() == batch.block_tables.flatten().tolist()
    assert set(tables[rows * width + rows * width % 2 :].tolist()) <= {JUNK}, (
        "only what is used travels"
    )
    for column in (mine.input_ids, mine.positions, mine.slot_mapping, mine.cu_seqlens_q, tables):
        assert (column.data_ptr() - buffer.data_ptr()) % 16 == 0


def test_columns_do_not_overlap() -> None:
    tensors = [
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(5),
        torch.zeros((2, 3), dtype=torch.int64),
    ]
    buffer = torch.zeros(100, dtype=torch.int64)
    views = carve(buffer, specs_of(tensors))
    for index, view in enumerate(views):
        view.fill_(index + 1)
    assert [set(view.flatten().tolist()) for view in views] == [{True}, {2.0}, {3}]


# -- engines with graphs ---------------------------------------------------------------------------


def start(engine: InferenceEngine, steps: int = 6) -> None:
    for seed, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params(seed=seed, max_tokens=16, top_p=0.9 if seed else 1.0))
    for _ in range(steps):
        engine.step()


def num_graphs(engine: InferenceEngine) -> int:
    """Return the number of graphs that the model holds."""
    graphs: Any = runner(engine)._graphs
    decodes, trunks = (engine.model.recorded.get(each, {}) for each in graphs)
    return 3 * len(decodes) + len(trunks)


def both(
    build: Build, change: Callable[[InferenceEngine], object], **options: Any
) -> InferenceEngine:
    """Apply a change to a running reference engine and to one with graphs. Check equal samples.
    Return the second engine.
    """
    results: list[list[TrainingSample]] = []
    engines = [build(backend=name, lookahead=1, **options) for name in ("reference", "cuda")]
    for engine in engines:
        start(engine)
        change(engine)
        results.append(drain(engine))
    expected, mine = ([repr(bare(sample)) for sample in samples] for samples in results)
    assert mine == expected
    return engines[1]


@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_new_weights_need_no_new_graphs(build: Build, policy: Any) -> None:

    def change(engine: InferenceEngine) -> None:
        for weights in (NEW, NEWER):
            engine.update_weights(weights, kv_policy=policy)
            engine.step()

    engine = both(build, change)
    assert runner(engine).num_replays > 10
    assert queue(engine).num_captures == num_graphs(engine), "graphs read weights in place"


@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("newcomer", [False, True])
def test_old_weights_have_no_graphs(build: Build, newcomer: bool) -> None:
    """Cover requests that finish on old weights, with and without requests on the new weights."""
    before: list[int] = []

    def change(engine: InferenceEngine) -> None:
        engine.update_weights(NEW, kv_policy="finish_old")
        if newcomer:
            engine.add_request([1, 2, 3], params(seed=9, max_tokens=24))
        replays = getattr(engine.runner, "num_replays", 0)
        for _ in range(5):
            engine.step()
        assert getattr(engine.runner, "num_replays", 0) == replays
        before.append(replays)

    engine = both(build, change)
    assert (runner(engine).num_replays > before[1]) is newcomer, "again once the old ones are gone"


@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("moves", [False, True])
def test_sleep_changes_no_bit_under_graphs(
    build: Build, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """Graphs are dropped and captured again if memory moves."""
    if moves:
        forget = sleeping.Sleep._forget_recorded

        def as_on_a_gpu(self: sleeping.Sleep) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(sleeping, "on_cpu", lambda _held: False)
                forget(self)

        monkeypatch.setattr(sleeping.Sleep, "_forget_recorded", as_on_a_gpu)

    def change(engine: InferenceEngine) -> None:
        engine.sleep(weights=True)
        engine.wake()

    engine = both(build, change)
    assert (queue(engine).num_captures > num_graphs(engine)) is moves


@pytest.mark.usefixtures("conventional")
def test_capture_between_steps_changes_no_bit(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capture all graphs while the device holds tokens that the next step needs."""
    monkeypatch.setattr(CheckingQueue, "captures_early", True)

    def change(engine: InferenceEngine) -> None:
        if engine.numerics.backend == "cuda":
            before = queue(engine).num_captures
            assert before == num_graphs(engine) >= 3 * len(graph_sizes(5)) + 1, "at the start"
            assert engine.loop.in_flight
            engine.model.forget_recorded()
            engine.step()
            assert num_graphs(engine) == 3 * len(graph_sizes(5))
            assert queue(engine).num_captures == before + num_graphs(engine)
        else:
            engine.step()

    both(build, change, max_batch_size=5)


# -- a device that fails ---------------------------------------------------------------------------


@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("lookahead", [0, 1])
def test_hanging_device_ends_the_engine(
    build: Build, monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    engine = build(backend="cuda", lookahead=lookahead)
    results: list[BaseException | list[TrainingSample]] = []

    def generate() -> None:
        try:
            results.append(engine.generate(PROMPTS, params(max_tokens=200)))
        except BaseException as problem:
            results.append(problem)

    threads = [threading.Thread(target=generate) for _ in range(2)]
    for thread in threads:
        thread.start()
    while runner(engine).num_replays < 3 and all(thread.is_alive() for thread in threads):
        time.sleep(0.001)
    queue(engine).deadline = 0.05
    monkeypatch.setattr(CheckingQueue, "download", lambda *_: LateEvent(float("inf")))
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(results) == 2
    for problem in results:
        assert isinstance(problem, EngineDead)
        assert "the device hangs" in str(problem)
    with pytest.raises(EngineDead, match="hangs"):
        engine.add_request([1], params())
    began = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - began < 15, "the device was waited for again"


FAILURES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("where", ["upload", "capture", "download", "wait"])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_failing_device_ends_the_engine(
    build: Build, monkeypatch: pytest.MonkeyPatch, where: str, failure: Exception, lookahead: int
) -> None:
    """Requests must not fail one after the other for a device fault."""
    engine = build(backend="cuda", lookahead=lookahead)
    for seed, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params(seed=seed))
    calls: list[int] = []

    def fail(*_: Any) -> Any:
        calls.append(1)
        raise failure

    if where != "capture":
        engine.step()
        engine.step()
    monkeypatch.setattr(CheckingQueue, where, fail)
    with pytest.raises(EngineDead, match=str(failure)[:30]):
        drain(engine)
    assert len(calls) == 1
    with pytest.raises(EngineDead, match=str(failure)[:30]):
        engine.generate([1], params())


@pytest.mark.usefixtures("conventional")
def test_device_failure_during_fault_attribution_ends_the_engine(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(backend="cuda")
    calls: list[Exception] = []

    def fail(*_: Any) -> Any:
        calls.append(FAILURES[0] if calls else ValueError("somebody's own"))
        raise calls[-1]

    for seed, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params(seed=seed))
    monkeypatch.setattr(engine.runner, "sample", fail)
    with pytest.raises(EngineDead, match="CUDA out of memory"):
        drain(engine)
    assert len(calls) == 2
