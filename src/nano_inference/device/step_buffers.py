"""Memory for a step's data: rotating pinned buffers, and the fixed addresses of a captured step."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nano_inference.core.sequence import POLICY
from nano_inference.device.queues import Event, HostQueue
from nano_inference.ops.batches import ForwardBatch, forward_batch
from nano_inference.sampling.columns import arrays_of, columns_of, with_arrays
from nano_inference.sampling.tensors import to_device, torch_dtype

WORD = 8  # bytes
# alignment of tensors in words. Triton compiles different code for addresses not divisible by 16
ALIGNED = 2


class TensorPlace(NamedTuple):
    """Shape and dtype of one tensor within a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_words(self) -> int:
        """Words that the tensor takes."""
        return _num_words(math.prod(self.shape) * self.dtype.itemsize)


def _num_words(num_bytes: int) -> int:
    return -(-num_bytes // (WORD * ALIGNED)) * ALIGNED


def specs_of(tensors: Sequence[Tensor]) -> list[TensorPlace]:
    """Return the shapes and dtypes of tensors."""
    return [TensorPlace(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def captured_specs(batch: type, sizes: Mapping[Any, int]) -> dict[str, TensorPlace]:
    """Return the columns of a batch class with fixed addresses in captured graphs."""
    return {
        name: TensorPlace(tuple(sizes[size] for size in each.sizes), torch_dtype(each.dtype))
        for name, each in columns_of(batch).items()
        if each.padding is not None
    }


def carve(buffer: Tensor, specs: Iterable[TensorPlace]) -> list[Tensor]:
    """Return consecutive views of an int64 buffer."""
    views: list[Tensor] = []
    start = 0
    for spec in specs:
        words = buffer[start : start + spec.num_words]
        views.append(words.view(spec.dtype)[: math.prod(spec.shape)].view(spec.shape))
        start += spec.num_words
    return views


class PinnedBuffer:
    """Pinned buffer of a ring, with the event of its latest copy."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # int64
        self.words: np.ndarray = memory.numpy()
        self.event: Event | None = None


class Ring:
    """Pinned buffers in rotation. A buffer is reused only after its copy is done."""

    def __init__(self, queue: HostQueue, num_slots: int, num_words: int) -> None:
        self._queue = queue
        self._slots = [PinnedBuffer(queue.pinned(num_words)) for _ in range(num_slots)]
        self._next = 0

    def take(self, num_words: int) -> PinnedBuffer:
        """Return the next buffer, with at least `num_words` words. Its copy must set `event`."""
        slot = self._slots[self._next]
        if slot.event is not None:
            self._queue.wait(slot.event)  # usually passed long ago
        if len(slot.words) < num_words:
            slot = self._slots[self._next] = PinnedBuffer(
                self._queue.pinned(max(num_words, 2 * len(slot.words)))
            )
        self._next = (self._next + 1) % len(self._slots)
        return slot


class Uploads:
    """Copies to the device. Each one sends many tensors together, and the host waits for none."""

    def __init__(self, queue: HostQueue, device: torch.device) -> None:
        self._queue, self._device = queue, device
        # A step makes at most three uploads (inputs, places of its results, parameters). Those of
        # the previous step may still be in progress.
        self._ring = Ring(queue, num_slots=6, num_words=4096)

    def write(self, parts: Sequence[Tensor], target: Tensor) -> None:
        """Copy host tensors, aligned to words, consecutively into `target` (int64)."""
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
        """Copy int64 [count], written by `fill`, to the beginning of `target`."""
        slot = self._ring.take(count)
        fill(slot.words[:count])
        slot.event = self._queue.upload(slot.memory[:count], target[:count])

    def send(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the tensors on the device."""
        specs = specs_of(parts)
        total = sum(spec.num_words for spec in specs)
        target = torch.empty(total, dtype=torch.int64, device=self._device)
        if total:
            self.write(parts, target)
        return carve(target, specs)

    def send_all(self, batches: Sequence[Any]) -> list[Any]:
        """Return the batches (`ForwardBatch` or `SamplingBatch`) with their tensors on the device.

        All tensors share one copy.
        """
        moved = iter(self.send([tensor for batch in batches for tensor in arrays_of(batch)]))
        return [with_arrays(batch, moved) for batch in batches]


class Fetched(NamedTuple):
    """Tensors on their way to the host."""

    tensors: list[Tensor]  # valid after the event, until the fetch after the next one
    event: Event


class Downloads:
    """Copies from the device, in parallel to its work."""

    def __init__(self, queue: HostQueue) -> None:
        self._queue = queue
        # a step's results are read before those of the next step are fetched
        self._ring = Ring(queue, num_slots=2, num_words=4096)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Queue a copy of device tensors, which must stay unchanged until the event."""
        specs = specs_of(tensors)
        slot = self._ring.take(sum(spec.num_words for spec in specs))
        places = carve(slot.memory, specs)
        copies = [
            (tensor, target)
            for tensor, target in zip(tensors, places, strict=True)
            if tensor.numel()
        ]
        slot.event = self._queue.download(copies)
        return Fetched(places, slot.event)


class StepInputs:
    """Inputs of a captured forward at fixed addresses: up to `size` rows in up to `chunks` chunks.

    Excess rows and chunks are padding. A padding row stores nothing (slot -1), belongs to no chunk,
    and its output is ignored. A padding chunk has no rows and no context. Block tables come last,
    with the row stride of the current step, so that only their used part is uploaded.
    `table_stride` holds that stride. With adapters, each row has the address of its adapter's
    table, or 0.

    Args:
        buffer: Buffer, int64 with at least `num_words(size, chunks, max_blocks)`. Graphs of all
            sizes share it.
        size: Number of rows.
        chunks: Number of chunks. If each row is a chunk, the batch draws from each row.
        max_blocks: Maximum length of a block table.
        adapters: `ForwardBatch.adapters` of the captured batch.
    """

    def __init__(
        self,
        buffer: Tensor,
        size: int,
        chunks: int,
        max_blocks: int,
        adapters: tuple[Any, ...] = (),
    ) -> None:
        self.size, self.chunks = size, chunks
        self._buffer = buffer
        specs = _input_specs(size, chunks, max_blocks, bool(adapters))
        places = dict(zip(specs, carve(buffer, specs.values()), strict=True))
        ends = accumulate(spec.num_words for spec in specs.values())
        self._starts = dict(zip(specs, (0, *ends), strict=False))
        # contents before the block tables if all rows are padding
        self._padding = np.zeros(self._starts["block_tables"], dtype=np.int64)
        for name in ("slot_mapping", "relay_sources"):  # no slot, no source
            self._padding[self._starts[name] :][:size] = -1
        # index into the latest tokens, or -1 if the host knew the row's token
        self.relay_sources, stride = places.pop("relay_sources"), places.pop("table_stride")
        if size == chunks:
            rows = torch.arange(size, device=buffer.device)
            places |= {"row_chunks": rows, "logits_indices": rows}
        places |= {"table_stride": stride, "adapters": adapters}
        self.batch = to_device(forward_batch(POLICY, buffer.device, **places), buffer.device)

    @staticmethod
    def num_words(size: int, chunks: int, max_blocks: int, *, adapted: bool = False) -> int:
        """Return the maximum number of words of a step with `size` rows in `chunks` chunks."""
        specs = _input_specs(size, chunks, max_blocks, adapted)
        return sum(spec.num_words for spec in specs.values())

    def clear(self) -> None:
        """Fill all rows with padding, so that capture and warm-up touch no keys and values."""
        self._buffer[: len(self._padding)].zero_()
        self.batch.slot_mapping.fill_(-1)
        self.relay_sources.fill_(-1)

    def write(
        self, batch: ForwardBatch, uploads: Uploads, addresses: np.ndarray | None = None
    ) -> None:
        """Upload a step of at most `size` rows and `chunks` chunks in one copy.

        Uses numpy, which is faster than torch for small operations. `addresses` [N] are those of
        the rows' adapters.
        """
        count = len(self._padding) + _num_words(batch.block_tables.nbytes)
        uploads.write_words(count, lambda words: self._fill(words, batch, addresses), self._buffer)

    def _fill(self, words: np.ndarray, batch: ForwardBatch, addresses: np.ndarray | None) -> None:
        chunks, stride = batch.block_tables.shape
        places = {name: words[start:] for name, start in self._starts.items()}
        words[: len(self._padding)] = self._padding
        places["relay_sources"][batch.relay_rows.numpy()] = batch.relay_sources.numpy()
        places["table_stride"][0] = stride
        places["cu_seqlens_q"][chunks + 1 : self.chunks + 1] = len(batch.input_ids)
        if addresses is not None:
            places["row_adapters"][: len(addresses)] = addresses
        for name in _CAPTURED:
            column = getattr(batch, name).numpy().reshape(-1)
            places[name][: len(column)] = column


def _input_specs(size: int, chunks: int, max_blocks: int, adapted: bool) -> dict[str, TensorPlace]:
    """Return the fixed layout of all inputs. The block tables come last."""
    shapes = {"relay_sources": (size,), "table_stride": (1,)}
    shapes |= {"row_adapters": (size,)} if adapted else {}
    extra = {name: TensorPlace(shape, torch.int64) for name, shape in shapes.items()}
    sizes = {"N": size, "S": chunks, "S + 1": chunks + 1, "B": max_blocks}
    return extra | captured_specs(ForwardBatch, sizes)


_CAPTURED = tuple(
    name for name, each in columns_of(ForwardBatch).items() if each.padding is not None
)
