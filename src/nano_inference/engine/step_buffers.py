"""Memory that a step's numbers travel through: pinned buffers used in turn, and the fixed places of
a decode step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nano_inference.batch import NO_TEMPERATURES, NOTHING, ForwardBatch
from nano_inference.engine.device import DeviceQueue, Event
from nano_inference.sampling.sampling_batch import ON_HOST, Entries
from nano_inference.scheduling.sequence import POLICY

WORD = 8  # bytes
# words: where a tensor may begin. Triton compiles other code for an address that 16 does not divide
ALIGNED = 2


class Column(NamedTuple):
    """The shape and type of one tensor among others in a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_words(self) -> int:
        """Words that it takes."""
        return _num_words(math.prod(self.shape) * self.dtype.itemsize)


def _num_words(num_bytes: int) -> int:
    return -(-num_bytes // (WORD * ALIGNED)) * ALIGNED


def columns_of(tensors: Sequence[Tensor]) -> list[Column]:
    """What these tensors are."""
    return [Column(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def carve(buffer: Tensor, columns: Sequence[Column]) -> list[Tensor]:
    """Views of an int64 buffer, one after the other."""
    ends = accumulate(column.num_words for column in columns)
    return [
        buffer[end - column.num_words : end]
        .view(column.dtype)[: math.prod(column.shape)]
        .view(column.shape)
        for column, end in zip(columns, ends, strict=True)
    ]


class Slot:
    """One pinned buffer of a ring, and the copy that used it last."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # int64
        self.words: np.ndarray = memory.numpy()
        self.event: Event | None = None


class Ring:
    """Pinned buffers used in turn. One is handed out again only when the copy that used it is
    done.
    """

    def __init__(self, queue: DeviceQueue, num_slots: int, num_words: int) -> None:
        self._queue = queue
        self._slots = [Slot(queue.pinned(num_words)) for _ in range(num_slots)]
        self._next = 0

    def take(self, num_words: int) -> Slot:
        """The next buffer, of at least so many words. Whoever copies from or to it notes the event
        in it.
        """
        slot = self._slots[self._next]
        if slot.event is not None:
            self._queue.wait(slot.event)  # long passed, where steps wait for each other
        if len(slot.words) < num_words:
            slot = self._slots[self._next] = Slot(
                self._queue.pinned(max(num_words, 2 * len(slot.words)))
            )
        self._next = (self._next + 1) % len(self._slots)
        return slot


class Uploads:
    """Copies to the device, each of many tensors at once; the host waits for none of them."""

    def __init__(self, queue: DeviceQueue, device: torch.device) -> None:
        self._queue, self._device = queue, device
        # A step makes two at most, inputs and parameters, and the one before may still be on its
        # way.
        self._ring = Ring(queue, num_slots=4, num_words=4096)

    def write(self, parts: Sequence[Tensor], target: Tensor) -> None:
        """Put tensors of the host one after the other, each from a whole word on, to where `target`
        (int64) begins.
        """
        sizes = [_num_words(part.nbytes) for part in parts]

        def fill(words: np.ndarray) -> None:
            memory = words.view(np.uint8)
            start = 0
            for part, size in zip(parts, sizes, strict=True):
                if size:
                    memory[start : start + part.nbytes] = part.numpy().reshape(-1).view(np.uint8)
                start += size * WORD

        self.write_words(sum(sizes), fill, target)

    def write_words(self, count: int, fill: Callable[[np.ndarray], None], target: Tensor) -> None:
        """Put what `fill` writes into int64 [count] to where `target` begins."""
        slot = self._ring.take(count)
        fill(slot.words[:count])
        slot.event = self._queue.upload(slot.memory[:count], target[:count])

    def send(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors, on the device."""
        columns = columns_of(parts)
        total = sum(column.num_words for column in columns)
        target = torch.empty(total, dtype=torch.int64, device=self._device)
        if total:
            self.write(parts, target)
        return carve(target, columns)

    def send_all(self, values: Sequence[Any]) -> list[Any]:
        """The same batches (`ForwardBatch` or `SamplingBatch`), with their tensors on the device,
        by one copy.
        """
        found = [_tensors(value) for value in values]
        moved = iter(
            self.send([tensor for parts in found for part in parts.values() for tensor in part])
        )
        return [
            replace(
                value,
                **{
                    name: _like(getattr(value, name), [next(moved) for _ in part])
                    for name, part in own.items()
                },
            )
            for value, own in zip(values, found, strict=True)
        ]


def _tensors(value: Any) -> dict[str, list[Tensor]]:
    """The tensors of a batch, by field."""
    parts = {
        field.name: getattr(value, field.name)
        for field in fields(value)
        if field.name not in ON_HOST
    }
    found = {name: [part] for name, part in parts.items() if isinstance(part, Tensor)}
    return found | {name: list(part) for name, part in parts.items() if isinstance(part, Entries)}


def _like(old: Tensor | Entries, new: list[Tensor]) -> Tensor | Entries:
    return Entries(*new) if isinstance(old, Entries) else new[0]


class Fetched(NamedTuple):
    """Tensors on their way to the host."""

    arrays: list[np.ndarray]  # good after the event, until the next but one is fetched
    event: Event


class Downloads:
    """Copies from the device, beside its work."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        # a step's are read before the next one's are fetched
        self._ring = Ring(queue, num_slots=2, num_words=4096)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Tensors of the device, which must stay as they are until the event."""
        columns = columns_of(tensors)
        slot = self._ring.take(sum(column.num_words for column in columns))
        places = carve(slot.memory, columns)
        copies = [
            (tensor, place) for tensor, place in zip(tensors, places, strict=True) if tensor.numel()
        ]
        slot.event = self._queue.download(copies)
        return Fetched([place.numpy() for place in places], slot.event)


class DecodeInputs:
    """Where a captured forward of `size` rows, one of each sequence, finds them: fixed places in a
    device buffer.

    Rows beyond those of a step are padding. Nothing of a padded row is stored (slot -1), its chunk
    has no rows and no context, and nobody looks at what comes of it. Block tables stand last and as
    close as this step's are, so that only the part which is used travels; `table_stride` says how
    close.

    Args:
        buffer: int64, of at least `num_words(size, max_blocks)`; graphs of other sizes use the
            same.
        size: rows.
        max_blocks: of a block table.
    """

    def __init__(self, buffer: Tensor, size: int, max_blocks: int) -> None:
        self.size = size
        self._buffer = buffer
        columns = _decode(size, max_blocks)
        ids, positions, slots, sources, seq_lens, cu_seqlens, stride, tables = carve(
            buffer, columns
        )
        self._starts = [0, *accumulate(column.num_words for column in columns[:-1])]
        self._padding = np.zeros(self._starts[-1], dtype=np.int64)
        for column in (2, 3):  # no slot, no source
            self._padding[self._starts[column] :][:size] = -1
        rows = torch.arange(size, device=buffer.device)
        nothing, no_temperatures = NOTHING.to(buffer.device), NO_TEMPERATURES.to(buffer.device)
        # place in the newest tokens; -1: the host knew the row's token
        self.relay_sources = sources
        self.batch = ForwardBatch(
            weight_set=POLICY,
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
            row_chunks=rows,
            block_tables=tables,
            cu_seqlens_q=cu_seqlens,
            seq_lens=seq_lens,
            logits_indices=rows,
            score_rows=nothing,
            score_targets=nothing,
            score_temperatures=no_temperatures,
            scored=(),
            relay_rows=nothing,
            relay_sources=nothing,
            num_prompt_tokens=0,
            table_stride=stride,
        )

    @staticmethod
    def num_words(size: int, max_blocks: int) -> int:
        """Words that a step of so many rows takes at most."""
        return sum(column.num_words for column in _decode(size, max_blocks))

    def clear(self) -> None:
        """Padding alone: what is captured and warmed up touches no keys and values."""
        self._buffer[: self.num_words(self.size, 0)].zero_()
        self.batch.slot_mapping.fill_(-1)
        self.relay_sources.fill_(-1)

    def write(self, batch: ForwardBatch, uploads: Uploads) -> None:
        """Bring a step here, at most `size` rows of it: one copy. By numpy: small operations of
        torch take longer.
        """
        count = self._starts[-1] + _num_words(batch.block_tables.nbytes)
        uploads.write_words(count, lambda words: self._fill(words, batch), self._buffer)

    def _fill(self, words: np.ndarray, batch: ForwardBatch) -> None:
        rows, stride = batch.block_tables.shape
        ids, positions, slots, sources, seq_lens, cu_seqlens, the_stride, tables = (
            words[at:] for at in self._starts
        )
        words[: len(self._padding)] = self._padding
        ids[:rows] = batch.input_ids.numpy()
        positions[:rows] = batch.positions.numpy()
        slots[:rows] = batch.slot_mapping.numpy()
        sources[batch.relay_rows.numpy()] = batch.relay_sources.numpy()
        seq_lens[:rows] = batch.seq_lens.numpy()
        cu_seqlens[: rows + 1] = batch.cu_seqlens_q.numpy()
        cu_seqlens[rows + 1 : self.size + 1] = rows
        the_stride[0] = stride
        tables[: rows * stride] = batch.block_tables.numpy().reshape(-1)


def _decode(size: int, max_blocks: int) -> list[Column]:
    return [
        Column(shape, torch.int64)
        for shape in [(size,)] * 5 + [(size + 1,), (1,), (size, max_blocks)]
    ]
