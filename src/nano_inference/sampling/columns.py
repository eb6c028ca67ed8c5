"""The columns of a step: each quantity of a row, a chunk or a sample is declared once, on the field
of its batch.

`batch.ForwardBatch` and `sampling.sampling_batch.SamplingBatch` are made of columns. What reads the
declarations needs no list of its own: uploads to the device, the fixed places of captured graphs,
the wire between ranks, and the CPU kernels, whose structures name the same columns.
"""

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nano_inference.types import SamplingParams

T = TypeVar("T")


class Entries(NamedTuple):
    """Single entries of a [R, V] matrix: `values[i]` stands at (`rows[i]`, `ids[i]`). Rows rise."""

    rows: Tensor  # int64 [E]
    ids: Tensor  # int64 [E]
    values: Tensor  # float32 [E]

    def of(self, rows: Tensor) -> "Entries":
        """The entries of some rows, which rise, counted as they stand there."""
        if not len(rows):
            return Entries(*(part[:0] for part in self))
        places = torch.searchsorted(rows, self.rows)
        found = rows[places.clamp(max=len(rows) - 1)] == self.rows
        return Entries(places[found], self.ids[found], self.values[found])


@dataclass(frozen=True, slots=True)
class Column:
    """What is known of a field that holds numbers.

    Attributes:
        dtype: of a tensor, or of the values of `Entries`.
        sizes: of a tensor: N rows, S chunks, R samples and their like, or numbers.
        param: where it says how a sample is drawn, what it is under these parameters. Such columns
            are the same tensors while the same samples are drawn.
        padding: what rows beyond those of the step hold where a graph is captured, whose columns
            have fixed places. None: graphs do without it.
        on_host: it stays there when the batch moves to a device.
    """

    dtype: torch.dtype
    sizes: tuple[str | int, ...]
    param: Callable[[SamplingParams], Any] | None = None
    padding: float | None = None
    on_host: bool = False


def column(
    dtype: torch.dtype,
    *sizes: str | int,
    param: Callable[[SamplingParams], Any] | None = None,
    padding: float | None = None,
    on_host: bool = False,
    default: Any = MISSING,
) -> Any:
    """A field of a batch; arguments as in `Column`."""
    declared = Column(dtype, sizes, param, padding, on_host)
    return field(default=default, metadata={"column": declared})


@cache
def columns_of(batch: type) -> dict[str, Column]:
    """The columns of a class of batches, by name."""
    return {
        each.name: each.metadata["column"] for each in fields(batch) if "column" in each.metadata
    }


@cache
def _on_device(batch: type) -> tuple[str, ...]:
    return tuple(name for name, each in columns_of(batch).items() if not each.on_host)


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors that move with a batch, in the order of its columns."""
    found: list[Tensor] = []
    for name in _on_device(type(batch)):
        value = getattr(batch, name)
        found += value if isinstance(value, Entries) else (value,)
    return found


def with_tensors(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """The same batch with other tensors in the place of `tensors_of`."""
    given, new = iter(tensors), dict[str, Any]()
    for name in _on_device(type(batch)):
        is_entries = isinstance(getattr(batch, name), Entries)
        new[name] = Entries(*islice(given, 3)) if is_entries else next(given)
    return replace(batch, **new)


def to_device(batch: T, device: torch.device) -> T:
    """The same batch with its tensors on a device; the host waits for nothing."""
    if device.type == "cpu":
        return batch
    return with_tensors(batch, [each.to(device, non_blocking=True) for each in tensors_of(batch)])
