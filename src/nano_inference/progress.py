"""How far something long has come, in bytes: one line of a terminal that is written anew, or a line
of the log now and then. What takes less than two seconds says nothing.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

logger = logging.getLogger("nano_inference")

SHORT = 2.0  # seconds in which nothing is said
OFTEN = 0.2  # seconds between two states of a terminal's line
SELDOM = 30.0  # and between two lines of a log
_CLEAR = "\r\x1b[K"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

Show = Callable[[str], None]
_shown_by: list[Show] = []  # the owners of the terminal's line; the last one has it now


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Messages go to `show`, because a spinner has the terminal's last line."""
    _shown_by.append(show)
    try:
        yield
    finally:
        _shown_by.remove(show)


class Progress:
    """A context manager around something long; threads may share it.

        with Progress("loading SmolLM2", total) as progress:
            for tensor in tensors:
                progress.add(tensor.nbytes)

    Attributes:
        total: bytes that there are in all; 0: unknown.
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
        self._began = self._clock()
        self._next = self._began + SHORT
        self._told = False
        return self

    def add(self, count: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done += count
            now = self._clock()
            if now < self._next:
                return
            self._told = True
            self._next = now + (OFTEN if _shown_by or self._stream.isatty() else SELDOM)
            self._say(self._state(now - self._began))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._told:
            return
        seconds = self._clock() - self._began
        self._say(f"{self._what}: {told(self._done)} in {seconds:.0f} s", end=True)

    def _state(self, seconds: float) -> str:
        rate = f"{told(round(self._done / seconds))}/s" if seconds > 0 else ""
        if self.total <= 0:
            return f"{self._what}: {told(self._done)}, {rate}"
        share = min(1.0, self._done / self.total)
        return f"{self._what}: {told(self._done)} of {told(self.total)} ({share:.0%}), {rate}"

    def _say(self, line: str, end: bool = False) -> None:
        if _shown_by:
            _shown_by[-1](line)
        elif self._stream.isatty():
            self._stream.write(_CLEAR + line + "\n" * end)
            self._stream.flush()
        else:
            logger.info("%s", line)


def told(num_bytes: int) -> str:
    """A number of bytes, in the largest unit of which there is one."""
    for size, unit in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
