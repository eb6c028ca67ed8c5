"""Sampling masks and best tokens of a step on the host: one row at a time, so that a step never
holds all of them as Python's numbers.
"""

from array import array
from collections.abc import Sequence
from typing import overload

import numpy as np

# whether the bytes are a bit for each id, from 0 on, or int32 ids; whichever is shorter
PackedRow = tuple[bool, bytes]


class KeptIds(Sequence["array[int]"]):
    """The ids that filters kept, row by row, rising; made when a row is asked for.

    Args:
        kept: bool [R, V].
    """

    def __init__(self, kept: np.ndarray) -> None:
        self._kept = kept

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, row: int) -> "array[int]": ...
    @overload
    def __getitem__(self, row: slice) -> "Sequence[array[int]]": ...
    def __getitem__(self, row: int | slice) -> "array[int] | Sequence[array[int]]":
        return (
            KeptIds(self._kept[row])
            if isinstance(row, slice)
            else _array(np.flatnonzero(self._kept[row]))
        )


class PackedIds(Sequence["array[int]"]):
    """The same of rows that have travelled."""

    def __init__(self, rows: Sequence[PackedRow]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> "array[int]": ...
    @overload
    def __getitem__(self, row: slice) -> "Sequence[array[int]]": ...
    def __getitem__(self, row: int | slice) -> "array[int] | Sequence[array[int]]":
        if isinstance(row, slice):
            return PackedIds(self._rows[row])
        are_bits, data = self._rows[row]
        if are_bits:
            return _array(np.flatnonzero(np.unpackbits(np.frombuffer(data, dtype=np.uint8))))
        return _array(np.frombuffer(data, dtype=np.int32))


BestRow = tuple[list[int], list[float]]


class BestRows(Sequence[BestRow]):
    """The most probable tokens and their logprobs, row by row; made when a row is asked for.

    Args:
        token_ids: int64 [R, K].
        logprobs: float32 [R, K].
    """

    def __init__(self, token_ids: np.ndarray, logprobs: np.ndarray) -> None:
        self._ids, self._logprobs = token_ids, logprobs

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, row: int) -> BestRow: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[BestRow]: ...
    def __getitem__(self, row: int | slice) -> BestRow | Sequence[BestRow]:
        ids, logprobs = self._ids[row], self._logprobs[row]
        return (
            BestRows(ids, logprobs) if isinstance(row, slice) else (ids.tolist(), logprobs.tolist())
        )


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
