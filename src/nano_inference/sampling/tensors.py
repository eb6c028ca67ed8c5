"""Batches whose arrays are tensors of torch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from nano_inference.sampling import sampling_batch as host
from nano_inference.sampling.columns import Arrays, Entries, arrays_of, with_arrays
from nano_inference.sampling.sampling_batch import COLUMNS, SamplingTable
from nano_inference.types import SamplingParams

T = TypeVar("T")
TORCH = Arrays[Tensor](torch.from_numpy)
SamplingBatch = host.SamplingBatch[Tensor]


def torch_dtype(dtype: "np.dtype[Any]") -> torch.dtype:
    """Torch's name of a dtype of numpy."""
    return getattr(torch, dtype.name)


def to_device(batch: T, device: torch.device) -> T:
    """The same batch with its tensors on a device; the host waits for nothing."""
    if device.type == "cpu":
        return batch
    return with_arrays(batch, [each.to(device, non_blocking=True) for each in arrays_of(batch)])


def masked_samples(batch: SamplingBatch) -> Tensor:
    """Samples that may not draw some token, bool [R]."""
    return (batch.mask_rows >= 0).index_fill(0, batch.banned.rows, True)


def select(batch: SamplingBatch, samples: Tensor) -> SamplingBatch:
    """Some of the samples, rising places int64 [n]. Numbers of a whole batch stay, and columns that
    only the host reads.
    """
    cut: dict[str, Any] = {}
    for name, declared in COLUMNS.items():
        if declared.sizes[0] == "E":
            cut[name] = _entries_of(getattr(batch, name), samples)
        elif declared.sizes[0] == "R" and not declared.on_host:
            cut[name] = getattr(batch, name)[samples]
    return replace(batch, **cut)


def _entries_of(entries: Entries[Tensor], rows: Tensor) -> Entries[Tensor]:
    """The entries of some rows, which rise, counted by their place in `rows`."""
    if not len(rows):
        return Entries(*(part[:0] for part in entries))
    places = torch.searchsorted(rows, entries.rows)
    found = rows[places.clamp(max=len(rows) - 1)] == entries.rows
    return Entries(places[found], entries.ids[found], entries.values[found])


class DrawRequest(NamedTuple):
    """One token to draw.

    Attributes:
        params: how.
        row: row of the logits; samples of a group share one.
        key: (seed, sample index, position of the token).
        prompt, completion: ids before it, for penalties.
        banned: ids that may not be drawn here.
        mask: of a grammar, int32 [W]; None: there is none.
    """

    params: SamplingParams
    row: int = 0
    key: tuple[int, int, int] = (0, 0, 0)
    prompt: Sequence[int] = ()
    completion: Sequence[int] = ()
    banned: Iterable[int] = ()
    mask: np.ndarray | None = None


def sampling_batch(draws: Sequence[DrawRequest]) -> SamplingBatch:
    """The batch of these draws, in their order."""
    table = SamplingTable(TORCH)
    for slot, draw in enumerate(draws):
        table.put(slot, draw.params, *draw.key[:2], draw.prompt)
    slots = np.arange(len(draws))
    for place, counts in table.penalized(slots):
        counts.add(draws[place].completion)
    rows, positions = (
        np.array(column, dtype=np.int64)
        for column in ([d.row for d in draws], [d.key[2] for d in draws])
    )
    return table.batch(
        slots,
        rows,
        positions,
        {i: draw.banned for i, draw in enumerate(draws) if draw.banned},
        [(i, draw.mask) for i, draw in enumerate(draws) if draw.mask is not None],
    )


def greedy_batch(num_rows: int, most_top: int) -> SamplingBatch:
    """The most probable token of each of so many rows, and with it the `most_top` best under the
    model's own logits.
    """
    table = SamplingTable(TORCH)
    table.put(0, SamplingParams(temperature=0, top_logprobs=most_top), 0, 0, ())
    slots = np.zeros(num_rows, dtype=np.int64)
    return table.batch(slots, np.arange(num_rows), slots, {})
