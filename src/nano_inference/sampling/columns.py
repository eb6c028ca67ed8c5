"""The columns of a step: each quantity of a row, a chunk or a sample is declared once, on the field
of its batch.

`ForwardBatch` of `core.batch` and `SamplingBatch` of `sampling.sampling_batch` are made of columns.
Readers of the declarations need no list of their own: uploads to the device, the fixed places of
captured graphs, the wire between ranks, and the CPU kernels, whose structures name the same
columns.

The host counts in numpy. `Arrays` makes the arrays of a batch in the kind that the runner reads.
"""

from collections.abc import Callable, Iterable, Sized
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, get_origin

import numpy as np

from nano_inference.types import SamplingParams

A = TypeVar("A", bound=Sized)  # an array: `np.ndarray`, or a tensor of a library that computes


class Entries(NamedTuple, Generic[A]):
    """Single entries of a [R, V] matrix: `values[i]` stands at (`rows[i]`, `ids[i]`). Rows rise."""

    rows: A  # int64 [E]
    ids: A  # int64 [E]
    values: A  # float32 [E]


class Arrays(Generic[A]):
    """Makes arrays of one kind.

    Args:
        make: takes over a numpy array, which is not written afterwards. Examples:
            `torch.from_numpy`, or a function that returns its argument.
    """

    def __init__(self, make: Callable[[np.ndarray], A]) -> None:
        self.make = make
        # Empty arrays are shared: most steps have many of them.
        self.no_integers = make(np.empty(0, dtype=np.int64))
        self.no_doubles = make(np.empty(0, dtype=np.float64))
        self.no_masks = make(np.empty((0, 0), dtype=np.int32))
        self.no_entries = Entries(
            self.no_integers, self.no_integers, make(np.empty(0, dtype=np.float32))
        )

    def integers(self, values: Listed[int]) -> A:
        """int64 [len(values)]."""
        if not values:
            return self.no_integers
        return self.make(np.array(values, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Column:
    """What is known of a field that holds numbers.

    Attributes:
        dtype: of an array, or of the values of `Entries`.
        sizes: of an array: N rows, S chunks, R samples and their like, or numbers.
        param: where it says how a sample is drawn, what it is under these parameters. Such columns
            are the same arrays while the same samples are drawn.
        padding: what rows beyond those of the step hold where a graph is captured, whose columns
            have fixed places. None: graphs do without it.
        on_host: it stays there when the batch moves to a device.
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
    """A field of a batch; arguments as in `Column`."""
    declared = Column(np.dtype(dtype), sizes, param, padding, on_host)
    return field(metadata={"column": declared})


@cache
def columns_of(batch: type) -> dict[str, Column]:
    """The columns of a class of batches, by name."""
    return {
        each.name: each.metadata["column"]
        for each in fields(get_origin(batch) or batch)  # `ForwardBatch[Tensor]`, or its class
        if "column" in each.metadata
    }


@cache
def _on_device(batch: type) -> tuple[str, ...]:
    return tuple(name for name, each in columns_of(batch).items() if not each.on_host)


def arrays_of(batch: Any) -> list[Any]:
    """The arrays that move with a batch, in the order of its columns."""
    found: list[Any] = []
    for name in _on_device(type(batch)):
        value = getattr(batch, name)
        found += value if isinstance(value, Entries) else (value,)
    return found


def with_arrays(batch: Any, arrays: Iterable[Any]) -> Any:
    """The same batch with other arrays in the place of `arrays_of`."""
    given, new = iter(arrays), dict[str, Any]()
    for name in _on_device(type(batch)):
        is_entries = isinstance(getattr(batch, name), Entries)
        new[name] = Entries(*islice(given, 3)) if is_entries else next(given)
    return replace(batch, **new)
