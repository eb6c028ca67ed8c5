"""A step that travelled is the step that was sent: tensor by tensor, in every random workload."""

import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

msgspec = pytest.importorskip("msgspec")

from nano_inference.batch import ForwardBatch, Rows, batch_of_rows  # noqa: E402
from nano_inference.engine.ranks.step_diff import (  # noqa: E402
    Draw,
    Forward,
    MirroredUnits,
    StepDecoder,
    StepEncoder,
)
from nano_inference.kv_cache.units import UnitPool  # noqa: E402
from nano_inference.sampling.sampling_batch import SamplingBatch  # noqa: E402
from tests.simulation import workload as workloads  # noqa: E402
from tests.simulation.fake_model import FakeResult, FakeRunner, FakeSampled  # noqa: E402
from tests.simulation.workload import random_workload, run  # noqa: E402

DECODER = msgspec.msgpack.Decoder(Forward | Draw)


class WireRunner(FakeRunner):
    """Computes what arrived at the other end."""

    def __init__(
        self, num_slots: int, block_size: int, units: UnitPool | None = None, relays: bool = True
    ) -> None:
        super().__init__(num_slots, block_size, units, relays)
        self.encoder, self.decoder = StepEncoder(), StepDecoder(block_size)
        self.pool = units
        if units is not None:
            self.units: Any = MirroredUnits(units.num_units, units.num_blocks, units.layout)

    def forward(
        self,
        batches: tuple[ForwardBatch, ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: FakeSampled | None,
    ) -> FakeResult:
        message = travelled(self.encoder.forward(batches, block_copies, self.pool))
        if self.pool is not None:
            self.units.follow(message.units)
            assert self.units.unit_of.tolist() == self.pool.unit_of.tolist()
        arrived, copies = self.decoder.forward(message)
        assert copies == block_copies
        for mine, theirs in zip(batches, arrived, strict=True):
            require_same(mine, theirs, but={"scored", "table_rows"})
        return super().forward(arrived, copies, previous)

    def sample(self, result: FakeResult, batch: SamplingBatch) -> FakeSampled:
        arrived = self.decoder.draw(travelled(self.encoder.draw(batch)))
        require_same(batch, arrived)
        return super().sample(result, arrived)


def travelled(message: Any) -> Any:
    return DECODER.decode(msgspec.msgpack.encode(message))


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


@pytest.mark.parametrize("seed", range(20))
def test_random_workloads_arrive_as_they_were_sent(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "FakeRunner", WireRunner)
    run(random_workload(seed))


def test_how_samples_are_drawn_travels_with_every_kind_of_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Filters, penalties, biases, allowed tokens: the random parameters of the batch tests."""
    from tests import test_batch

    monkeypatch.setattr(test_batch, "FakeRunner", WireRunner)
    for seed in range(4):
        test_batch.test_batches_say_what_the_sequences_say(seed, seed % 2)


def test_rows_that_no_scheduler_knows_travel_with_their_tables() -> None:
    batch = batch_of_rows(
        [Rows([5, 6, 7], 3, [4, 1, 9]), Rows([8], 0, [2])], 2, draws=[2, 3], scores=[(0, 6)]
    )
    ((arrived,), _) = StepDecoder(2).forward(travelled(StepEncoder().forward((batch,), ())))
    require_same(batch, arrived)


def test_of_a_table_only_what_changed_travels() -> None:
    r = random.Random(0)
    encoder, decoder = StepEncoder(), StepDecoder(4)
    tables = [[r.randrange(1000) for _ in range(50)] for _ in range(256)]
    sizes: list[int] = []
    for step in range(3):
        for place in range(step, 256, 16):
            tables[place].append(r.randrange(1000))
        width = max(map(len, tables))
        rows = [
            Rows([1], len(table) * 4 - 1, [*table, *[0] * (width - len(table))]) for table in tables
        ]
        batch = batch_of_rows(rows, 4)
        marks = np.array([len(table) for table in tables])
        batch = replaced(batch, np.arange(256), marks)
        message = msgspec.msgpack.encode(encoder.forward((batch,), ()))
        sizes.append(len(message))
        require_same(batch, decoder.forward(DECODER.decode(message))[0][0], but={"table_rows"})
    assert sizes[0] > 256 * 50 * 8
    assert max(sizes[1:]) < 256 * 8 * 6


def replaced(batch: ForwardBatch, rows: np.ndarray, marks: np.ndarray) -> ForwardBatch:
    from dataclasses import replace

    from nano_inference.batch import TableRows

    return replace(batch, table_rows=TableRows(rows, marks, len(rows)))
