"""Progress of long work, on an overwritten line of the terminal or occasionally in the log. Work of
less than two seconds shows nothing.
"""

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

logger = logging.getLogger("nano_inference")

SHORT = 2.0  # seconds before anything is shown
OFTEN = 0.2  # seconds between updates of a terminal line
SELDOM = 30.0  # seconds between log lines
_CLEAR = "\r\x1b[K"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

Show = Callable[[str], None]
_shown_by: list[Show] = []  # owners of the terminal's last line; the last entry has it now
_heard_by: list[Show] = []  # listeners in addition to the terminal and the log


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Send messages to `show` instead of the terminal, because a spinner has its last line."""
    _shown_by.append(show)
    try:
        yield
    finally:
        _shown_by.remove(show)


@contextmanager
def heard_by(hear: Show) -> Iterator[None]:
    """Pass every state of the work inside to `hear`, in addition to the terminal and the log.
    `hear` is called in the thread that works.
    """
    _heard_by.append(hear)
    try:
        yield
    finally:
        _heard_by.remove(hear)


class Progress:
    """Progress of long work in bytes, as a context manager around it. Threads may share it.

    ```python
    with Progress("loading SmolLM2", total) as progress:
        for tensor in tensors:
            progress.add(tensor.nbytes)
    ```

    Attributes:
        total: Total number of bytes. 0 if unknown.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._what, self._done, self._clock = what, 0, clock
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._began = self._next_heard = self._clock()
        self._next = self._began + SHORT
        self._has_shown = False
        self.add(0)
        return self

    def add(self, count: int) -> None:
        """Count more bytes as done."""
        with self._lock:
            self._done += count
            now = self._clock()
            if now >= self._next_heard:
                self._next_heard = now + OFTEN
                for hear in _heard_by:
                    hear(self._state(now - self._began))
            if now < self._next:
                return
            self._has_shown = True
            self._next = now + (OFTEN if _shown_by or self._stream.isatty() else SELDOM)
            self._say(self._state(now - self._began))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._has_shown:
            return
        seconds = self._clock() - self._began
        self._say(f"{self._what}: {self._all()} in {seconds:.0f} s", end=True)

    def _all(self) -> str:
        return told(self._done)

    def _state(self, seconds: float) -> str:
        rate = f", {told(round(self._done / seconds))}/s" if seconds > 0 else ""
        if self.total <= 0:
            return f"{self._what}: {told(self._done)}{rate}"
        share = min(1.0, self._done / self.total)
        return f"{self._what}: {_told_of(self._done, self.total)} ({share:.0%}){rate}"

    def _say(self, line: str, end: bool = False) -> None:
        if _shown_by:
            _shown_by[-1](line)
        elif self._stream.isatty():
            self._stream.write(_CLEAR + line + "\n" * end)
            self._stream.flush()
        else:
            logger.info("%s", line)


def say(line: str) -> None:
    """Announce work without measurable progress, such as waiting, on the terminal's line if there
    is one, otherwise in the log.
    """
    for hear in _heard_by:
        hear(line)
    if _shown_by:
        _shown_by[-1](line)
    else:
        logger.info("%s", line)


class FileProgress(Progress):
    """Progress of work on files: the number done, and an estimate of the seconds left.

    ```python
    with FileProgress("compiling", {"a.cpp": 4000, "b.cpp": 1000}) as progress:
        for name in ("a.cpp", "b.cpp"):
            ...
            progress.finish(name)
    ```

    Args:
        what: Name of the work for the line.
        work: Amount of work per file, in any unit, in the order in which the files are begun.
        ready: Files that were done before.
        at_once: Number of files worked on at a time, which count as half done.
        stream: Output stream. None is standard error.
        clock: Function that returns seconds.
    """

    def __init__(
        self,
        what: str,
        work: Mapping[str, int],
        ready: Collection[str] = (),
        at_once: int = 1,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(what, sum(work.values()), stream=stream, clock=clock)
        self._work, self._at_once = work, at_once
        self._finished = {*ready}
        self._done = self._before = sum(work[name] for name in ready)
        self._seconds = 0.0  # from the beginning until the last file finished

    def finish(self, name: str) -> None:
        """Count a file as done."""
        with self._lock:
            self._finished.add(name)
            self._seconds = self._clock() - self._began
        self.add(self._work[name])

    def tick(self) -> None:
        """Show the state again if it is due, because the estimate changes with time."""
        self.add(0)

    def _state(self, seconds: float) -> str:
        state = f"{self._what}: {self._all()}"
        done = self._done - self._before
        if not done or self._done == self.total or not self._seconds:
            return state
        others = (work for name, work in self._work.items() if name not in self._finished)
        running = sum(itertools.islice(others, self._at_once)) / 2
        rate = (done + running) / self._seconds
        left = (self.total - self._done - running) / rate - (seconds - self._seconds)
        return f"{state}, about {_rounded(left)} s left"

    def _all(self) -> str:
        return f"{len(self._finished)} of {len(self._work)} files"


def _rounded(seconds: float) -> int:
    """Return seconds rounded to the precision of an estimate: multiples of five above ten."""
    return 5 * round(seconds / 5) if seconds > 10 else max(round(seconds), 1)


def told(num_bytes: int) -> str:
    """Return a size in the largest unit that fits, such as `1.5 GiB` or `257 MiB`."""
    size, unit = _unit(num_bytes)
    return f"{_in_units(num_bytes, num_bytes, size)} {unit}"


def _told_of(part: int, total: int) -> str:
    """Return a part of a size, both in the unit of the whole: `155 of 257 MiB`."""
    size, unit = _unit(total)
    return f"{_in_units(part, total, size)} of {_in_units(total, total, size)} {unit}"


def _unit(num_bytes: int) -> tuple[int, str]:
    return next((row for row in _UNITS if num_bytes >= row[0]), (1, "bytes"))


def _in_units(num_bytes: int, total: int, size: int) -> str:
    digits = 1 if size > 1 and total < 10 * size else 0
    return f"{num_bytes / size:.{digits}f}"
