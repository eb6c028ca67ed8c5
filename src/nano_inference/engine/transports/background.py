"""Weights arrive while requests run: what brings them takes the cores that decoding leaves."""

import os
import sys
import threading
from contextlib import suppress

NICENESS = 10  # about a tenth of a core's time where decoding wants all of it


def step_back() -> None:
    """Let the thread that calls, and those that it starts, as gloo's are by whoever makes a group,
    go behind others.

    There is no way back: only for threads that end soon. Nothing happens where threads have no
    priorities of their own.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
