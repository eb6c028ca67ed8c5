"""Launchers of the other ranks' processes.

Each process receives its `Begin` in a way that other processes cannot read.
"""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from nano_inference.ranks.messages import Begin
from nano_inference.system.child_process import start_child

KILL_PATIENCE = 5.0  # seconds to wait for the end of a killed process


class Handle(Protocol):
    """Process of a rank, on this or another machine."""

    def alive(self) -> bool:
        """Return True if the process may still be running."""
        ...

    def ended(self) -> str:
        """Return how the process ended, to follow the rank's name: "was killed by signal 9"."""
        ...

    def kill(self) -> None:
        """Kill the process if it is running. Return after its end, if that is visible from here."""
        ...


class Launcher(Protocol):
    """Launcher of processes that call `run_worker(begin)`.

    Attributes:
        host: Address of this machine for the processes. None if they run on this machine and can
            use a socket in a folder.
        port: Port on which rank 0 listens for them. 0 means any free port.
    """

    host: str | None
    port: int

    def ranks_here(self, world_size: int) -> int:
        """Return how many of an engine's ranks run on this machine."""
        ...

    def start(self, begins: Sequence[Begin]) -> Sequence[Handle]:
        """Start one process for each of `begins`.

        Return them in the same order. Raises `ConfigError`.
        """
        ...


class LocalLauncher:
    """Launcher of processes on this machine, which end together with this process."""

    host: str | None = None
    port = 0

    def ranks_here(self, world_size: int) -> int:
        """Return the number of all ranks."""
        return world_size

    def start(self, begins: Sequence[Begin]) -> list["LocalHandle"]:
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
    """Child of this process."""

    def __init__(self, begin: Begin) -> None:
        begin = msgspec.structs.replace(begin, parent=os.getpid(), local_rank=begin.rank)
        self._process = start_child("nano_inference.ranks.worker", begin)

    def alive(self) -> bool:
        return self._process.poll() is None

    def ended(self) -> str:
        code = self._process.poll()
        if code is None:
            return "is running"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_PATIENCE)
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
