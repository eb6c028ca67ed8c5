"""Captured trunks of steps with prompts: sizes, padding, memory, and the bits of eager steps."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nano_inference import InferenceEngine
from nano_inference.device.captured_adapters import CapturedAdapters
from nano_inference.device.step_buffers import StepInputs, Uploads
from nano_inference.device.step_graphs import PROBED, StepGraphs
from nano_inference.device.trunk_graphs import LEAST, MOST_ROWS, TrunkGraphs, trunk_sizes
from nano_inference.ops.batches import Rows, batch_of_rows
from tests.device.cuda_cases import JUNK, CheckingQueue, conventional
from tests.device.test_cuda_runner import bare, params, queue, runner
from tests.weights.weight_cases import NEW, Build, drain

__all__ = ["conventional"]


# -- sizes -----------------------------------------------------------------------------------------


@given(largest=st.integers(1, 10_000))
def test_trunk_sizes_waste_at_most_a_fifth(largest: int) -> None:
    sizes = trunk_sizes(largest)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1:] == ((min(largest, MOST_ROWS),) if largest > 1 else ())
    for size, following in pairwise((0, *sizes)):
        assert following - size - 1 <= max(LEAST, following / 5)
    assert len(sizes) <= 24


@given(
    largest=st.integers(2, 3000),
    most_chunks=st.integers(1, 300),
    rows=st.integers(1, 3000),
    chunks=st.integers(1, 300),
)
def test_graphs_compute_all_steps_within_bounds(
    largest: int, most_chunks: int, rows: int, chunks: int
) -> None:
    chunks, model = min(chunks, rows), SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    graphs = TrunkGraphs(
        model,  # type: ignore[arg-type]
        *(nothing, nothing, nothing, nothing, CapturedAdapters(model, 0), nothing),  # type: ignore[arg-type]
        max_rows=largest,
        max_chunks=most_chunks,
        max_blocks=1,
    )
    size = graphs.size_of(rows, chunks)
    if size is None:
        last = graphs.sizes[-1]
        assert rows > last or chunks > min(most_chunks, last - 1)
    else:
        assert rows <= size
        assert chunks <= graphs._chunks(size) < size


# -- buffers ---------------------------------------------------------------------------------------


def test_step_of_chunks_is_padded() -> None:
    queue, size, chunks, max_blocks = CheckingQueue(), 16, 5, 6
    buffer = torch.full((StepInputs.num_words(32, 8, max_blocks),), JUNK)
    inputs = StepInputs(buffer, size, chunks, max_blocks)
    parts = [Rows([7, 8, 9], 0, [2]), Rows([4], 6, [1, 3]), Rows([5, 6], 3, [5, 0])]
    batch = replace(
        batch_of_rows(parts, 4, draws=(3, 5)),
        relay_rows=torch.tensor([3]),
        relay_sources=torch.tensor([1]),
    )
    with queue.current():
        inputs.write(batch, Uploads(queue, torch.device("cpu")))
    assert len(queue.uploads) == 1
    mine = inputs.batch
    assert mine.input_ids.tolist() == [7, 8, 9, 4, 5, 6, *[0] * 10]
    assert mine.positions.tolist() == [0, 1, 2, 6, 3, 4, *[0] * 10]
    assert mine.slot_mapping.tolist() == [*batch.slot_mapping.tolist(), *[-1] * 10]
    assert mine.cu_seqlens_q.tolist() == [0, 3, 4, 6, 6, 6]
    assert mine.seq_lens.tolist() == [3, 7, 5, 0, 0]
    assert inputs.relay_sources.tolist() == [-1, -1, -1, 1, *[-1] * 12]
    assert mine.table_stride is not None
    assert mine.table_stride.tolist() == [2]
    assert mine.block_tables.flatten()[:6].tolist() == [2, 0, 1, 3, 5, 0]
    assert len(mine.row_chunks) == 0, "no kernel reads it"


# -- engines ---------------------------------------------------------------------------------------


def arrivals(engine: InferenceEngine) -> list[Any]:
    """Add prompts of many lengths next to decodes. Return samples."""
    samples: list[Any] = []
    for seed, length in enumerate((3, 30, 1, 17, 40, 2)):
        prompt = [(7 * seed + place) % 90 + 1 for place in range(length)]
        engine.add_request(prompt, params(seed=seed, max_tokens=12, top_p=0.9 if seed % 2 else 1.0))
        for _ in range(2):
            samples += engine.step()
    return sorted([*samples, *drain(engine)], key=lambda each: each.request_id)


@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("most", [19, 8192])
def test_trunks_replay_every_step_with_prompts(build: Build, lookahead: int, most: int) -> None:
    """Cover chunks of prompts that are cut, and rows that await a token of the previous step."""
    options: dict[str, Any] = {"lookahead": lookahead, "max_tokens_per_batch": most}
    expected = arrivals(build(backend="reference", **options))
    engine = build(backend="cuda", batch_invariant=True, **options)
    actual = arrivals(engine)
    assert [repr(bare(each)) for each in actual] == [repr(bare(each)) for each in expected]
    assert runner(engine).num_trunk_replays >= 5  # the prompt of one token is a decode
    assert runner(engine).num_eager_steps == 0


@pytest.mark.usefixtures("conventional")
def test_larger_steps_run_eagerly(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_inference.device.trunk_graphs.MOST_ROWS", 32)
    expected = arrivals(build(backend="reference"))
    engine = build(backend="cuda", batch_invariant=True)
    assert [repr(bare(each)) for each in arrivals(engine)] == [
        repr(bare(each)) for each in expected
    ]
    assert runner(engine).num_trunk_replays > 0
    assert runner(engine).num_eager_steps > 0


@pytest.mark.usefixtures("conventional")
def test_trunks_are_captured_once_per_size(build: Build) -> None:
    engine = build(backend="cuda")
    counts: list[tuple[int, int]] = []
    for turn in range(3):
        before = runner(engine).num_trunk_replays
        engine.flush_cache()
        arrivals(engine)
        counts.append((queue(engine).num_captures, runner(engine).num_trunk_replays - before))
        if turn == 1:
            engine.update_weights(NEW)
    assert counts[0] == counts[1] == (counts[2][0], counts[0][1])


@pytest.mark.usefixtures("conventional")
def test_first_capture_is_the_largest_on_a_gpu(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory holds all others. The same after graphs were dropped."""
    monkeypatch.setattr(CheckingQueue, "captures_early", True)
    engine = build(backend="cuda", max_batch_size=2, max_tokens_per_batch=48)
    graphs: Any = runner(engine)._graphs
    for _ in range(2):
        assert next(iter(engine.model.recorded[graphs.trunks]))[0] == 48
        engine.generate([3, 4, 5], params(max_tokens=3))
        captured = engine.model.recorded[graphs.trunks]
        assert list(captured) == [(48, False), (16, False)]  # without adapters
        engine.model.forget_recorded()
        engine.flush_cache()
        engine.generate([3, 4, 5], params(max_tokens=3))


# -- memory ----------------------------------------------------------------------------------------


class Costs:
    """Graphs of one kind whose captures take memory of a fake card."""

    def __init__(self, card: "FakeCard", sizes: tuple[int, ...], pool: int, per_graph: int) -> None:
        self.card, self.sizes, self.pool, self.per_graph = card, sizes, pool, per_graph
        self.captured: list[int] = []

    def capture(self, sizes: Any) -> None:
        for size in sorted(set(sizes) - set(self.captured), reverse=True):
            self.card.shared = max(self.card.shared, self.pool * size)
            self.card.driver += self.per_graph
            self.captured.append(size)


class FakeCard:
    """A card with a pool, whose largest graph determines its size, and memory of the driver."""

    def __init__(self) -> None:
        self.shared = self.driver = 0

    def free(self) -> int:
        return 10**12 - self.shared - self.driver


@given(
    kinds=st.tuples(*[st.tuples(st.integers(0, 30), st.integers(0, 1000), st.integers(0, 50))] * 2)
)
def test_few_captures_measure_all_graphs(kinds: Any) -> None:
    card, all_of_them = FakeCard(), FakeCard()
    probed, whole = (
        [Costs(each, tuple(range(1, count + 1)), pool, cost) for count, pool, cost in kinds]
        for each in (card, all_of_them)
    )
    decodes, trunks = probed
    measured = StepGraphs(decodes, trunks).measure(card.free)  # type: ignore[arg-type]
    for graphs in whole:
        graphs.capture(graphs.sizes)
    assert measured == 10**12 - all_of_them.free()
    assert sum(len(graphs.captured) for graphs in probed) <= 2 * (1 + PROBED)
