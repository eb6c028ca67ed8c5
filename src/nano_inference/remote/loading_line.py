"""A terminal line that shows the progress of building an engine."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from nano_inference.system.progress import shown_by

TICK = 0.25  # seconds between updates of the line
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[K"


@contextmanager
def loading_line(
    name: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Show progress on the terminal's last line while the block runs.

    The line has the model's name or the current work, and the elapsed seconds. Nothing is written
    if `stream` is not a terminal.

    Args:
        name: The model's name.
        stream: The terminal. None: standard error.
        clock: Returns the time in seconds.
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
