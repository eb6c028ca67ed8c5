"""A worker that replays steps builds the batches of rank 0, tensor by tensor, in every random
workload.
"""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

msgspec = pytest.importorskip("msgspec")

from nano_inference.config import SchedulerConfig  # noqa: E402
from nano_inference.core.batch import Chunks  # noqa: E402
from nano_inference.core.loop import Add, EngineLoop  # noqa: E402
from nano_inference.core.sequence import CheckedRequest, Sequence  # noqa: E402
from nano_inference.kv_cache.hash_cache import PagedKVCache  # noqa: E402
from nano_inference.kv_cache.sliding_window import UnitPool  # noqa: E402
from nano_inference.ops.batches import ForwardBatch  # noqa: E402
from nano_inference.ranks.replay import (  # noqa: E402
    Draw,
    Forward,
    StepReplay,
    StepSender,
)
from nano_inference.sampling.sampling_batch import Masks  # noqa: E402
from nano_inference.sampling.tensors import TORCH, SamplingBatch  # noqa: E402
from nano_inference.types import SamplingParams  # noqa: E402
from tests.simulation import workload as workloads  # noqa: E402
from tests.simulation.fake_model import FakeResult, FakeRunner, FakeSampled  # noqa: E402
from tests.simulation.workload import (  # noqa: E402
    FakeDrafts,
    random_workload,
    run,
    with_drafts,
)

DECODER = msgspec.msgpack.Decoder(Forward | Draw)


class WireRunner(FakeRunner):
    """Compute batches built by the other end."""

    arrays = TORCH  # like those of workers

    def __init__(
        self, num_slots: int, block_size: int, units: UnitPool | None = None, relays: bool = True
    ) -> None:
        super().__init__(num_slots, block_size, units, relays)
        self.pool = units
        if units is not None:
            self.units = UnitPool(units.num_units, units.num_blocks, units.layout)
        self.sender = StepSender(block_size, units)
        self.replay = StepReplay(block_size, self.units)
        self.batches: tuple[ForwardBatch, ...] = ()
        self.drawn: SamplingBatch | None = None
        self.sizes: list[int] = []

    def announce(self, *step: Any) -> None:
        message = self.travelled(self.sender.forward(*step))
        self.batches, self.copies = self.replay.forward(message)
        if self.pool is not None:
            assert self.units is not None
            assert self.units.unit_of.tolist() == self.pool.unit_of.tolist()
            self.pool.changed.clear()

    def announce_draw(self, chunks: Chunks, masks: Masks) -> None:  # pyright: ignore
        self.drawn = self.replay.draw(self.travelled(self.sender.draw(chunks, masks)))

    def forward(
        self,
        batches: tuple[ForwardBatch, ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: FakeSampled | None,
    ) -> FakeResult:
        assert self.copies == block_copies
        for mine, theirs in zip(batches, self.batches, strict=True):
            require_same(mine, theirs, but={"scored"})
        return super().forward(self.batches, self.copies, previous)

    def sample(self, result: FakeResult, batch: SamplingBatch) -> FakeSampled:
        assert self.drawn is not None
        require_same(batch, self.drawn)
        return super().sample(result, self.drawn)

    def travelled(self, message: Any) -> Any:
        frame = msgspec.msgpack.encode(message)
        self.sizes.append(len(frame))
        return DECODER.decode(frame)


def require_same(mine: Any, theirs: Any, but: set[str] = frozenset()) -> None:  # pyright: ignore
    for name in {field.name for field in fields(mine)} - but:
        one, other = getattr(mine, name), getattr(theirs, name)
        for a, b in zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]:
            if isinstance(a, Tensor):
                assert a.dtype == b.dtype, name
                assert a.shape == b.shape, name
                assert b.is_contiguous(), name
                assert torch.equal(a, b), name
            else:
                assert a == b, name


@pytest.mark.thorough(cases=["17"])
@pytest.mark.parametrize("seed", range(20))
def test_random_workloads_are_replayed_exactly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "FakeRunner", WireRunner)
    run(random_workload(seed))
    kind = FakeDrafts.KINDS[seed % len(FakeDrafts.KINDS)]
    run(with_drafts(random_workload(1000 + seed), kind, most=1 + seed % 4))


@pytest.mark.thorough
def test_sampling_parameters_of_every_kind_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cover filters, penalties, biases and allowed tokens: the random parameters of the batch
    tests.
    """
    from tests.core import test_batch

    monkeypatch.setattr(test_batch, "FakeRunner", WireRunner)
    for seed in range(4):
        test_batch.test_batch_matches_its_sequences(seed, seed % 2, 3 * (seed % 3 > 0))


@pytest.mark.thorough
def test_sequence_is_sent_once_then_only_its_changes() -> None:
    loop, runner = loop_of(64, prompt=1000)
    runner.sizes.clear()
    for _ in range(40):
        loop.step()
    assert max(runner.sizes) > 1000 * 8, "a prompt"
    loop, runner = loop_of(64, prompt=16)
    while len(loop.sequences.running) < 64 or loop.sequences.waiting:
        loop.step()
    runner.sizes.clear()
    for _ in range(16):
        loop.step()
    assert max(runner.sizes) < 64 * 8 * 12


def test_worker_forgets_ended_sequences() -> None:
    loop, runner = loop_of(1000, prompt=3, max_tokens=2)
    while loop.has_pending():
        loop.step()
    assert len(runner.replay._sequences.by_id) < 200
    assert len(runner.sender._known) < 200


def loop_of(count: int, prompt: int, max_tokens: int = 100) -> tuple[EngineLoop, WireRunner]:
    config = SchedulerConfig(block_size=4, max_batch_size=64)
    runner = WireRunner(80_000, 4)
    loop = EngineLoop(PagedKVCache(20_000, 4), runner, config, 0, "")
    params = SamplingParams(max_tokens=max_tokens)
    for request in range(count):
        ids = [1 + (request + place) % 7 for place in range(prompt)]
        asked = CheckedRequest(request, prompt, params, seed=request)
        loop.inbox.append(Add(Sequence(request, asked, ids)))
    return loop, runner
