"""`BlockChanges`: published and dropped block names, for a directory of several caches."""

from collections.abc import Iterable
from dataclasses import dataclass

SHORT = (1 << 64) - 1


def short_name(name: int) -> int:
    """Return the low 64 bits of a block's name, which suffice to look it up.

    An engine that fetches a block compares the whole name and the tokens.
    """
    return name & SHORT


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Changes since the previous report.

    Attributes:
        number: One more than the number of the previous report.
        published: Short names that have become matchable.
        dropped: Short names that are no longer matchable.
        whole: True if `published` lists all matchable names. Earlier reports are then obsolete.
    """

    number: int
    published: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    whole: bool = False


class BlockChanges:
    """Changes since the last report. A name that was published and dropped in between is omitted.

    Not thread-safe: the cache and the reader of reports must share a lock.

    Args:
        most: Maximum number of changes to keep. Beyond that the next report is whole.
    """

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        # short name -> True if published, False if dropped; None: the next report is whole
        self._changes: dict[int, bool] | None = None
        self._number = 0

    def published(self, name: int) -> None:
        """Record that a block got a name."""
        self._note(short_name(name), came=True)

    def dropped(self, name: int) -> None:
        """Record that a name no longer has a block."""
        self._note(short_name(name), came=False)

    def forget(self) -> None:
        """Make the next report whole, because one was lost."""
        self._changes = None

    def take(self, names: Iterable[int]) -> BlockReport:
        """Return the next report.

        `names` are all names in the cache. They are read only for a whole report.
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
        # the opposite change of the same name cancels an unreported one
        if self._changes.pop(name, came) == came:
            self._changes[name] = came
        if len(self._changes) > self._most:
            self._changes = None
