"""Trainers in processes of their own, which read orders from their stdin and answer by lines."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, Queue
from typing import Any

PATIENCE = 60.0


class Child:
    """A process of a module of tests, and the lines that it says.

    Args:
        module: what runs, such as `tests.server.trainers.small_trainer`.
        arguments: its own.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._said: Queue[str] = Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def write(self, line: str) -> None:
        """Send an order, without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = PATIENCE) -> str:
        """Return its next line; "ended" after its last one."""
        try:
            return self._said.get(timeout=seconds)
        except Empty:
            raise AssertionError("the trainer's process says nothing") from None

    def interrupt(self, number: signal.Signals) -> None:
        """Kill it, or stop it."""
        self.process.send_signal(number)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self._listener.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line.strip())
        self._said.put("ended")


class GroupTrainer(Child):
    """A `group_trainer`, which has weights of a model's folder and understands JSON."""

    def __init__(self, folder: Path) -> None:
        super().__init__("tests.server.trainers.group_trainer", str(folder))
        self.folder = folder
        assert self.hear() == "ready"

    def say(self, do: str, **told: Any) -> None:
        """Order something, without waiting."""
        self.write(json.dumps({"do": do, **told}))
