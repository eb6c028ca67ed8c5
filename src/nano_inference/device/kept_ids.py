"""Sampling masks and best tokens of a step on the host: one row at a time, so that a step never
holds all of them as Python's numbers.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

# whether the bytes are a bit for each id, from 0 on, or int32 ids; whichever is shorter
PackedRow = tuple[bool, bytes]


Row = TypeVar("Row")


class LazyRows(Sequence[Row]):
    """Rows that are made when they are asked for, one at a time.

    Args:
        count: of rows.
        make: makes a row by its number. Raises `IndexError` beyond the last one.
    """

    def __init__(self, count: int, make: Callable[[int], Row]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: Any) -> Any:
        return self._make(row)


def kept_ids(kept: np.ndarray) -> LazyRows["array[int]"]:
    """Return the ids that filters kept, row by row, rising: of bool [R, V]."""
    return LazyRows(len(kept), lambda row: _array(np.flatnonzero(kept[row])))


def best_rows(
    token_ids: np.ndarray, logprobs: np.ndarray
) -> LazyRows[tuple[list[int], list[float]]]:
    """Return the best tokens and their logprobs, row by row: of int64 and float32 [R, K]."""
    return LazyRows(len(token_ids), lambda row: (token_ids[row].tolist(), logprobs[row].tolist()))


def unpacked(rows: Sequence[PackedRow]) -> LazyRows["array[int]"]:
    """Return the ids of rows that `pack` made bytes of."""
    return LazyRows(len(rows), lambda row: _unpack(*rows[row]))


def _unpack(are_bits: bool, data: bytes) -> "array[int]":
    if are_bits:
        return _array(np.flatnonzero(np.unpackbits(np.frombuffer(data, dtype=np.uint8))))
    return _array(np.frombuffer(data, dtype=np.int32))


def pack(row: Sequence[int]) -> PackedRow:
    """Rising ids as bytes: never more than a bit for each id up to the last one, and a byte."""
    ids = np.array(row, dtype=np.int32)
    length = int(ids[-1]) + 1 if len(ids) else 0
    if ids.nbytes <= length // 8:
        return False, ids.tobytes()
    bits = np.zeros(length, dtype=np.bool_)
    bits[ids] = True
    return True, np.packbits(bits).tobytes()


def _array(ids: np.ndarray) -> "array[int]":
    found = array("i")
    found.frombytes(ids.astype(np.int32).tobytes())
    return found
