"""Names of blocks that come and go, gathered for a directory of several caches."""

from collections.abc import Iterable
from dataclasses import dataclass

SHORT = (1 << 64) - 1


def short_name(name: int) -> int:
    """64 bits of a block's name: enough to look it up. Who fetches a block compares the whole name,
    and its tokens.
    """
    return name & SHORT


@dataclass(frozen=True, slots=True)
class BlockReport:
    """What has changed since the report before.

    Attributes:
        number: one more than that of the report before.
        published: short names that can be matched now.
        dropped: short names that no longer can.
        whole: `published` is all that there is, whatever was told before.
    """

    number: int
    published: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    whole: bool = False


class BlockChanges:
    """Changes since the last report. A name that came and went within it is not told.

    Not thread-safe: the cache that tells it and the reader of reports share a lock.

    Args:
        most: changes that are kept; beyond that the next report is whole.
    """

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        # short name -> whether it came; None: too many, or never told
        self._changes: dict[int, bool] | None = None
        self._number = 0

    def published(self, name: int) -> None:
        """A block has a name."""
        self._note(short_name(name), came=True)

    def dropped(self, name: int) -> None:
        """A name has no block any more."""
        self._note(short_name(name), came=False)

    def forget(self) -> None:
        """The next report is whole: one was lost."""
        self._changes = None

    def take(self, names: Iterable[int]) -> BlockReport:
        """The next report. `names` are all that the cache has; they are read only for a whole
        one.
        """
        changes, self._changes = self._changes, {}
        self._number += 1
        if changes is None:
            return BlockReport(self._number, tuple(map(short_name, names)), whole=True)
        came = tuple(name for name, there in changes.items() if there)
        went = tuple(name for name, there in changes.items() if not there)
        return BlockReport(self._number, came, went)

    def _note(self, name: int, *, came: bool) -> None:
        if self._changes is None:
            return
        # else the opposite of what has not been told: nothing is left of it
        if self._changes.pop(name, came) == came:
            self._changes[name] = came
        if len(self._changes) > self._most:
            self._changes = None
