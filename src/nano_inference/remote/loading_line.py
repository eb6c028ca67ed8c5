"""A line of the terminal that shows that an engine is being built, and for how long."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from nano_inference.system.progress import shown_by

TICK = 0.25  # seconds between two states of the line
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[K"


@contextmanager
def loading_line(
    name: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """While the block runs, a terminal's last line shows the model's name, or how far a part of the
    work is, and the seconds. Nothing is written to anything but a terminal.

    Args:
        name: the model's.
        stream: the terminal; None: standard error.
        clock: gives seconds.
    """
    terminal: TextIO = sys.stderr if stream is None else stream
    if not terminal.isatty():
        yield
        return
    doing, over, began = [f"loading {name}"], threading.Event(), clock()

    def show(line: str) -> None:
        doing[0] = line

    def tick() -> None:
        for frame in itertools.cycle(_FRAMES):
            terminal.write(f"{_CLEAR}{frame} {doing[0]} ({clock() - began:.0f} s)")
            terminal.flush()
            if over.wait(TICK):
                return

    thread = threading.Thread(target=tick, name="loading line", daemon=True)
    thread.start()
    try:
        with shown_by(show):
            yield
    finally:
        over.set()
        thread.join()
        terminal.write(_CLEAR)
        terminal.flush()
