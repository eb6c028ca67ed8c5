"""Ranks as threads of the test's process. Everything except the processes is real."""

import threading
from collections.abc import Sequence

from nano_inference.errors import NanoInferenceError
from nano_inference.ranks.messages import Begin
from nano_inference.ranks.worker import run_worker


class ThreadLauncher:
    """Run each rank on a thread."""

    host: str | None = None
    port = 0

    def __init__(self) -> None:
        self.handles: list[ThreadHandle] = []

    def ranks_here(self, world_size: int) -> int:
        """Return all ranks."""
        return world_size

    def start(self, begins: Sequence[Begin]) -> "list[ThreadHandle]":
        """Start a thread per rank."""
        self.handles = [ThreadHandle(begin) for begin in begins]
        return self.handles


class ThreadHandle:
    """A rank on a thread. It cannot be killed and ends when its link does."""

    def __init__(self, begin: Begin) -> None:
        self.problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(begin,), daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """Return True while the thread runs."""
        return self._thread.is_alive()

    def ended(self) -> str:
        return f"ended: {self.problem}"

    def kill(self) -> None:
        self._thread.join(1.0)

    def _run(self, begin: Begin) -> None:
        try:
            run_worker(begin, end=lambda _: None)
        except NanoInferenceError as problem:
            self.problem = problem
