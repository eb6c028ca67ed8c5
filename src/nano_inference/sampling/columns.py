"""Columns of a step: quantities of a row, a chunk or a sample, each declared once.

A column is a field of `core.batch.ForwardBatch` or `sampling.sampling_batch.SamplingBatch`. Code
that handles all columns reads these declarations: uploads to the device, fixed buffers of captured
graphs, messages between ranks. The structures of the CPU kernels have the same names.

The host computes in numpy. `Arrays` converts a batch's arrays to the type that the runner reads.
"""

from collections.abc import Callable, Iterable, Sized
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, get_origin

import numpy as np

from nano_inference.types import SamplingParams

A = TypeVar("A", bound=Sized)  # array type: `np.ndarray`, or a library's tensor


class Entries(NamedTuple, Generic[A]):
    """Entries of a [R, V] matrix: `values[i]` is at (`rows[i]`, `ids[i]`). Rows are ascending."""

    rows: A  # int64 [E]
    ids: A  # int64 [E]
    values: A  # float32 [E]


class Arrays(Generic[A]):
    """Creates arrays of one type.

    Args:
        make: Function that converts a numpy array, which is not modified afterwards. Examples:
            `torch.from_numpy`, or a function that returns its argument.
    """

    def __init__(self, make: Callable[[np.ndarray], A]) -> None:
        self.make = make
        # Empty arrays are shared, because most steps have many of them.
        self.no_integers = make(np.empty(0, dtype=np.int64))
        self.no_doubles = make(np.empty(0, dtype=np.float64))
        self.no_masks = make(np.empty((0, 0), dtype=np.int32))
        self.no_entries = Entries(
            self.no_integers, self.no_integers, make(np.empty(0, dtype=np.float32))
        )

    def integers(self, values: Listed[int]) -> A:
        """Return an int64 array [len(values)]."""
        if not values:
            return self.no_integers
        return self.make(np.array(values, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Column:
    """Declaration of a batch field that holds numbers.

    Attributes:
        dtype: Type of the array, or of the values of `Entries`.
        sizes: Dimensions of the array: names such as N rows, S chunks, R samples, or numbers.
        param: For a column that depends only on sampling parameters, its value under these
            parameters. Such columns are reused while the samples stay the same.
        padding: Value of unused rows in a captured graph, whose buffers have fixed sizes. None if
            graphs do not use the column.
        on_host: True if the column stays on the host when its batch moves to a device.
    """

    dtype: np.dtype[Any]
    sizes: tuple[str | int, ...]
    param: Callable[[SamplingParams], Any] | None = None
    padding: float | None = None
    on_host: bool = False


def column(
    dtype: str,
    *sizes: str | int,
    param: Callable[[SamplingParams], Any] | None = None,
    padding: float | None = None,
    on_host: bool = False,
) -> Any:
    """Declare a field of a batch. The arguments are those of `Column`."""
    declared = Column(np.dtype(dtype), sizes, param, padding, on_host)
    return field(metadata={"column": declared})


@cache
def columns_of(batch: type) -> dict[str, Column]:
    """Return the columns of a batch class, by name."""
    return {
        each.name: each.metadata["column"]
        for each in fields(get_origin(batch) or batch)  # `ForwardBatch[Tensor]` or `ForwardBatch`
        if "column" in each.metadata
    }


@cache
def _on_device(batch: type) -> tuple[str, ...]:
    return tuple(name for name, each in columns_of(batch).items() if not each.on_host)


def arrays_of(batch: Any) -> list[Any]:
    """Return the arrays that move to a device with a batch, in the order of its columns."""
    arrays: list[Any] = []
    for name in _on_device(type(batch)):
        value = getattr(batch, name)
        arrays += value if isinstance(value, Entries) else (value,)
    return arrays


def with_arrays(batch: Any, arrays: Iterable[Any]) -> Any:
    """Return the same batch with `arrays` in place of those from `arrays_of`."""
    remaining, new = iter(arrays), dict[str, Any]()
    for name in _on_device(type(batch)):
        is_entries = isinstance(getattr(batch, name), Entries)
        new[name] = Entries(*islice(remaining, 3)) if is_entries else next(remaining)
    return replace(batch, **new)
