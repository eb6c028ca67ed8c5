"""Batches on a device, with host arrays or tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from nano_inference.arrays import Device, Dtype, Tensor, namespace
from nano_inference.sampling import sampling_batch as host
from nano_inference.sampling.columns import Arrays, Entries, arrays_of, with_arrays
from nano_inference.sampling.sampling_batch import COLUMNS, SamplingTable
from nano_inference.types import SamplingParams

T = TypeVar("T")
SamplingBatch = host.SamplingBatch[Tensor]

if TYPE_CHECKING:
    TORCH: Arrays[Tensor]
else:

    def __getattr__(name: str) -> Any:
        if name == "TORCH":  # tensors on the CPU
            return arrays_on(None)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def arrays_on(device: Device | None) -> Arrays[Tensor]:
    """Return the factory of a device's batches. It makes host arrays, or tensors on the CPU that
    `to_device` copies to a GPU. None: tensors.
    """
    return _arrays(namespace(device))


@cache
def _arrays(xp: Any) -> Arrays[Tensor]:
    return Arrays(xp.from_numpy)


def dtype_on(device: Device | None, dtype: "np.dtype[Any]") -> Dtype:
    """Return a numpy dtype as a dtype of a device's arrays. None: of tensors."""
    return getattr(namespace(device), dtype.name)


def torch_dtype(dtype: "np.dtype[Any]") -> Dtype:
    """Return the torch dtype that corresponds to a numpy dtype."""
    return dtype_on(None, dtype)


def to_device(batch: T, device: Device) -> T:
    """Return the same batch with its arrays on a device. Does not block the host."""
    if device.type == "cpu":
        return batch
    return with_arrays(batch, [each.to(device, non_blocking=True) for each in arrays_of(batch)])


def masked_samples(batch: SamplingBatch) -> Tensor:
    """Return which samples have masked or banned tokens, bool [R]."""
    return (batch.mask_rows >= 0).index_fill(0, batch.banned.rows, True)


def select(batch: SamplingBatch, samples: Tensor) -> SamplingBatch:
    """Return some of the samples, by ascending indices int64 [n].

    Numbers of the whole batch and host-only columns stay unchanged.
    """
    cut: dict[str, Any] = {}
    for name, declared in COLUMNS.items():
        if declared.sizes[0] == "E":
            cut[name] = _entries_of(getattr(batch, name), samples)
        elif declared.sizes[0] == "R" and not declared.on_host:
            cut[name] = getattr(batch, name)[samples]
    return replace(batch, **cut)


def _entries_of(entries: Entries[Tensor], rows: Tensor) -> Entries[Tensor]:
    """Return the entries of some ascending rows, with each row replaced by its index in `rows`."""
    if not len(rows):
        return Entries(*(part[:0] for part in entries))
    places = namespace(rows).searchsorted(rows, entries.rows)
    inside = rows[places.clamp(max=len(rows) - 1)] == entries.rows
    return Entries(places[inside], entries.ids[inside], entries.values[inside])


class DrawRequest(NamedTuple):
    """One token to draw.

    Attributes:
        params: Sampling parameters.
        row: Row of the logits. Samples of a group share one.
        key: (seed, sample index, position of the token).
        prompt, completion: Preceding token ids, for penalties.
        banned: Token ids that may not be drawn.
        mask: Grammar mask, int32 [W], or None.
    """

    params: SamplingParams
    row: int = 0
    key: tuple[int, int, int] = (0, 0, 0)
    prompt: Sequence[int] = ()
    completion: Sequence[int] = ()
    banned: Iterable[int] = ()
    mask: np.ndarray | None = None


def sampling_batch(draws: Sequence[DrawRequest], device: Device | None = None) -> SamplingBatch:
    """Return a batch of these draws, in their order, on a device. None: tensors on the CPU."""
    table = SamplingTable(arrays_on(device))
    for slot, draw in enumerate(draws):
        table.put(slot, draw.params, *draw.key[:2], draw.prompt)
    slots = np.arange(len(draws))
    for index, counts in table.penalized(slots):
        counts.add(draws[index].completion)
    rows, positions = (
        np.array(column, dtype=np.int64)
        for column in ([d.row for d in draws], [d.key[2] for d in draws])
    )
    batch = table.batch(
        slots,
        rows,
        positions,
        {i: draw.banned for i, draw in enumerate(draws) if draw.banned},
        [(i, draw.mask) for i, draw in enumerate(draws) if draw.mask is not None],
    )
    return batch if device is None else to_device(batch, device)


def greedy_batch(num_rows: int, most_top: int, device: Device | None = None) -> SamplingBatch:
    """Return a batch that draws the most probable token of each of `num_rows` rows.

    It also requests the `most_top` best tokens under the model's own logits. The batch is on a
    device. None: tensors on the CPU.
    """
    table = SamplingTable(arrays_on(device))
    table.put(0, SamplingParams(temperature=0, top_logprobs=most_top), 0, 0, ())
    slots = np.zeros(num_rows, dtype=np.int64)
    batch = table.batch(slots, np.arange(num_rows), slots, {})
    return batch if device is None else to_device(batch, device)
