"""Child processes: a module that reads its first message from stdin and ends when the other end of
stdin closes.
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
    """Start `python -m module`, which calls `be_child`. The child's output goes to stderr. It ends
    when this process closes its stdin or exits. Raises `OSError`.

    Args:
        module: Module to run.
        begin: First message to the child.
        keep: File descriptors that the child inherits under the same numbers.
    """
    # The child inherits the mask, so that a signal to the process group cannot end it before it
    # has set its own handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)
    try:
        # -P: do not import modules from the current folder
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=2, pass_fds=keep
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # already ended; the caller will notice
        process.stdin.write(msgspec.json.encode(begin) + b"\n")
        process.stdin.flush()  # stays open, because the child ends when it closes
    return process


def be_child(kind: type[Begin], orphaned: Callable[[Begin], object]) -> Begin:
    """Set up the child process and return its first message. Call it in the child before anything
    else.

    Args:
        kind: Type of the first message.
        orphaned: Function that ends the process. A thread calls it, possibly during a step, when
            the other end of stdin closes for any reason.
    """
    # Ctrl-C in a terminal and SIGTERM from a service manager reach all processes. The parent
    # decides, and lets running work finish first. This process ends when the parent exits.
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
