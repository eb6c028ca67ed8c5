"""Who starts the processes of the other ranks. Each gets its `Begin` in a way that no other
process can read.
"""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from nano_inference.ranks.messages import Begin
from nano_inference.system.child_process import start_child

KILL_PATIENCE = 5.0  # seconds for the system to end a killed process


class Handle(Protocol):
    """A process that was started, here or elsewhere."""

    def alive(self) -> bool:
        """Whether it may still run."""
        ...

    def ended(self) -> str:
        """How it ended, for a sentence that begins with its rank: "was killed by signal 9"."""
        ...

    def kill(self) -> None:
        """End it at once, if it has not ended; return when it has, as far as that can be seen from
        here.
        """
        ...


class Launcher(Protocol):
    """Starts processes that call `run_worker(begin)`.

    Attributes:
        host: the address under which they reach this machine; None: they run on it, and a socket in
            a folder does.
        port: on which rank 0 listens for them; 0: any free one.
        ranks_here: how many ranks of an engine of so many share this machine.
    """

    host: str | None
    port: int

    def ranks_here(self, world_size: int) -> int:
        """How many ranks, of so many, run on this machine."""
        ...

    def start(self, begins: Sequence[Begin]) -> Sequence[Handle]:
        """Start one process each; they are given back in the same order. Raises `ConfigError`."""
        ...


class LocalLauncher:
    """Processes on this machine, which end with this one, however it ends."""

    host: str | None = None
    port = 0

    def ranks_here(self, world_size: int) -> int:
        """All."""
        return world_size

    def start(self, begins: Sequence[Begin]) -> list["LocalHandle"]:
        """See `Launcher`."""
        handles: list[LocalHandle] = []
        try:
            for begin in begins:
                handles.append(LocalHandle(begin))
        except BaseException:
            for handle in handles:
                handle.kill()
            raise
        return handles


class LocalHandle:
    """A child of this process."""

    def __init__(self, begin: Begin) -> None:
        begin = msgspec.structs.replace(begin, parent=os.getpid(), local_rank=begin.rank)
        self._process = start_child("nano_inference.ranks.worker", begin)

    def alive(self) -> bool:
        """See `Handle`."""
        return self._process.poll() is None

    def ended(self) -> str:
        """See `Handle`."""
        code = self._process.poll()
        if code is None:
            return "runs"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """See `Handle`."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_PATIENCE)
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
