"""`GrowingMask`: which ids the filters kept, token by token, while a sample grows."""

from array import array
from collections.abc import Iterable, Sequence

from nano_inference.types import SamplingMask


class GrowingMask:
    """Four bytes an id; Python's own integers only when the sample has ended.

    Args:
        most: ids that it may have in all; None: no bound.
        rows: those of the tokens that are known.
    """

    def __init__(self, most: int | None = None, rows: Iterable[Sequence[int]] = ()) -> None:
        self.most = most
        self._ids, self._offsets = array("i"), [0]
        for row in rows:
            self.append(row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GrowingMask) and vars(self) == vars(other)

    def has_room(self, row: Sequence[int]) -> bool:
        """Whether the ids of one more token fit."""
        return self.most is None or len(self._ids) + len(row) <= self.most

    def append(self, row: Sequence[int]) -> None:
        """The ids of the next token."""
        self._ids.extend(row)
        self._offsets.append(len(self._ids))

    def fork(self) -> "GrowingMask":
        """One of a sample that has no token yet, with the same bound."""
        return GrowingMask(self.most)

    def whole(self) -> SamplingMask:
        """All of it."""
        return SamplingMask(tuple(self._offsets), tuple(self._ids))
