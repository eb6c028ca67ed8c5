"""Helpers of the CUDA runner tests: a queue that checks and poisons, and operations with its
conventions.

The operations are the reference's plus the attention conventions of a captured step: block tables
by `table_stride`, and untouched padding. Kernels have separate tests. These tests cover the runner
at full speed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.device import cuda_runner
from nano_inference.device.queues import Captured, Copies, Event, HostQueue, Pool
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda import backend
from nano_inference.ops.interface import KvcacheView, Ops, RopeArgs
from nano_inference.ops.reference import attention as reference_attention
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.reference.backend import reference_ops

JUNK = 2**61 + 12345  # invalid in any column of a step: no token, block or position


class CheckingQueue(HostQueue):
    """Count copies and poison every value that must not be read."""

    warms_up = True  # before a capture, as on a GPU

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[int] = []  # words of each
        self.num_downloads = 0
        self.num_captures = 0
        self.open = 0
        self.log: list[str] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def pinned(self, num_words: int) -> Tensor:
        return super().pinned(num_words).fill_(JUNK)

    def upload(self, source: Tensor, target: Tensor) -> Event:
        assert self.open, "the device is not current"
        assert source.shape == target.shape
        whole = target.new_empty(0).set_(target.untyped_storage())
        if target.storage_offset() == 0 and len(whole) > len(target):
            whole[len(target) :].fill_(JUNK)  # words not copied in this step
        self.uploads.append(len(target))
        self.log.append("upload")
        event = super().upload(source, target)
        source.fill_(JUNK)
        return event

    def download(self, copies: Copies) -> Event:
        self.num_downloads += 1
        self.log.append("download")
        return super().download(copies)

    def wait(self, event: Event) -> None:
        self.log.append("wait")
        super().wait(event)

    def capture(self, run: Callable[[], Any], pool: Pool) -> Captured:
        self.num_captures += 1
        captured = super().capture(run, pool)
        if self.warms_up:
            captured.replay()
        return _Poisoned(captured, self.log)


class _Poisoned(Captured):
    """A graph whose results are NaN until it is replayed."""

    def __init__(self, captured: Captured, log: list[str]) -> None:
        self._captured = captured
        self._log = log

    @property
    def output(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._captured.output

    def replay(self) -> None:
        if self.output is not None:
            self.output.fill_(torch.nan)
        self._captured.replay()
        self._log.append("draw" if self.output is None else "forward")


class _WithoutPadding:
    """A view of the KV tensors that ignores rows with a negative slot."""

    def __init__(self, view: KvcacheView) -> None:
        self._view, self.format = view, view.format

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        stored = slots >= 0
        self._view.write(layer, slots[stored], keys[stored], values[stored])


def _rope_and_store(
    qkv: Tensor, rope: RopeArgs, positions: Tensor, slots: Tensor, view: Any, layer: int
) -> Tensor:
    stored: Any = _WithoutPadding(view)
    return reference.rope_and_store(qkv, rope, positions, slots, stored, layer)


def _plan(batch: ForwardBatch, block_size: int, window: int = 0) -> Any:
    rows = int(batch.cu_seqlens_q[-1])
    if not rows:
        return 0, None
    lengths = batch.cu_seqlens_q.diff()
    chunks = int((lengths > 0).sum())
    tables = batch.block_tables
    if batch.table_stride is not None:
        stride = int(batch.table_stride)
        tables = tables.as_strided((chunks, stride), (stride, 1))
    plan = replace(
        batch,
        positions=batch.positions[:rows],
        slot_mapping=batch.slot_mapping[:rows],
        row_chunks=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        block_tables=tables,
    )
    return rows, reference_attention.plan_attention(plan, block_size, window)


def _attention(q: Tensor, view: KvcacheView, layer: int, plan: Any, *how: Any) -> Tensor:
    rows, attention_plan = plan
    out = torch.full((len(q), q.shape[1] * q.shape[2]), torch.nan, dtype=q.dtype)
    if rows:
        out[:rows] = reference_attention.attention(q[:rows], view, layer, attention_plan, *how)
    return out


def conventional_ops(*, batch_invariant: bool, overlaps: bool = False) -> Ops:
    """Return operations with the conventions of `nano_inference.ops.cuda.backend.cuda_ops`."""
    return replace(
        reference_ops(),
        name="cuda",
        allocate=backend.CudaOps(batch_invariant=batch_invariant).allocate,
        version=0,
        schedule_invariant=batch_invariant,
        rope_and_store=_rope_and_store,
        plan_attention=_plan,
        attention=_attention,
    )


@pytest.fixture
def conventional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines on the CUDA backend run these operations on a checking queue."""
    monkeypatch.setattr(backend, "cuda_ops", conventional_ops)
    monkeypatch.setattr(cuda_runner, "queue_of", lambda _device: CheckingQueue())
