"""Sampling masks and top tokens of a step on the host.

Rows are unpacked one at a time, so a step never holds all of them as Python numbers.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

# (are_bits, data): one bit per id from 0 on, or int32 ids, whichever is shorter
PackedRow = tuple[bool, bytes]


Row = TypeVar("Row")


class LazyRows(Sequence[Row]):
    """Sequence whose rows are computed on each access.

    Args:
        count: Number of rows.
        make: Function that computes a row by its index. Raises `IndexError` beyond the last row.
    """

    def __init__(self, count: int, make: Callable[[int], Row]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: Any) -> Any:
        return self._make(row)


def kept_ids(kept: np.ndarray) -> LazyRows["array[int]"]:
    """Return the ids that filters kept, ascending, for each row of `kept` (bool [R, V])."""
    return LazyRows(len(kept), lambda row: _array(np.flatnonzero(kept[row])))


def best_rows(
    token_ids: np.ndarray, logprobs: np.ndarray
) -> LazyRows[tuple[list[int], list[float]]]:
    """Return the top tokens and their logprobs for each row (int64 and float32 [R, K])."""
    return LazyRows(len(token_ids), lambda row: (token_ids[row].tolist(), logprobs[row].tolist()))


def unpacked(rows: Sequence[PackedRow]) -> LazyRows["array[int]"]:
    """Return the ids of rows that `pack` has packed."""
    return LazyRows(len(rows), lambda row: _unpack(*rows[row]))


def _unpack(are_bits: bool, data: bytes) -> "array[int]":
    if are_bits:
        return _array(np.flatnonzero(np.unpackbits(np.frombuffer(data, dtype=np.uint8))))
    return _array(np.frombuffer(data, dtype=np.int32))


def pack(row: Sequence[int]) -> PackedRow:
    """Pack ascending ids into at most one bit per id up to the last one, rounded up to bytes."""
    ids = np.array(row, dtype=np.int32)
    length = int(ids[-1]) + 1 if len(ids) else 0
    if ids.nbytes <= length // 8:
        return False, ids.tobytes()
    bits = np.zeros(length, dtype=np.bool_)
    bits[ids] = True
    return True, np.packbits(bits).tobytes()


def _array(ids: np.ndarray) -> "array[int]":
    values = array("i")
    values.frombytes(ids.astype(np.int32).tobytes())
    return values
