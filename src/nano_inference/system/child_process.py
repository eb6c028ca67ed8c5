"""Child processes of ours: a module that reads its first message from stdin, and lives no longer
than the other end of that.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TypeVar

import msgspec

_NOT_FOR_IT = (signal.SIGINT, signal.SIGTERM)

Begin = TypeVar("Begin", bound=msgspec.Struct)


def start_child(
    module: str, begin: msgspec.Struct, keep: Collection[int] = ()
) -> "subprocess.Popen[bytes]":
    """Start `python -m module`, which calls `be_child`. Its output goes to stderr. Raises
    `OSError`.

    Args:
        module: that is run.
        begin: its first message.
        keep: file descriptors that it gets too, by the same numbers.

    It ends when its stdin is closed here or, by the system, when this process has ended.
    """
    # A signal for others must not end it before it can say so: it inherits the mask, and lifts it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)
    try:
        # -P: a module in the current folder is not taken for one of ours
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=2, pass_fds=keep
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, and we shall hear of it
        process.stdin.write(msgspec.json.encode(begin) + b"\n")
        process.stdin.flush()  # and stays open: its end is ours
    return process


def be_child(kind: type[Begin], orphaned: Callable[[Begin], object]) -> Begin:
    """In the child, before anything else: what it was started with.

    Args:
        kind: of the first message.
        orphaned: called by a thread, also amid a step, when the other end of stdin is closed, by
            whatever. It ends the process.
    """
    # Ctrl-C in a terminal, and the SIGTERM of a service manager, reach all processes: the parent
    # decides, and lets what runs end first. When it has gone, so does this one.
    for number in _NOT_FOR_IT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOT_FOR_IT)
    faulthandler.enable()
    begin = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)

    def wait() -> None:
        while os.read(0, 4096):
            pass
        orphaned(begin)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()
    return begin
