"""Trainer processes that read orders from stdin and answer in lines."""

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
    """A process of a test module and the lines it prints.

    Args:
        module: Module to run, such as `tests.server.trainers.small_trainer`.
        arguments: Arguments of the module.
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
        """Send an order without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = PATIENCE) -> str:
        """Return the next line, or "ended" after the last one."""
        try:
            return self._said.get(timeout=seconds)
        except Empty:
            raise AssertionError("the trainer's process says nothing") from None

    def interrupt(self, number: signal.Signals) -> None:
        """Send a signal, such as SIGKILL or SIGSTOP."""
        self.process.send_signal(number)

    def close(self) -> None:
        """Kill the process and close its pipes."""
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
    """A `group_trainer` that has the weights of a model's folder and reads JSON."""

    def __init__(self, folder: Path) -> None:
        super().__init__("tests.server.trainers.group_trainer", str(folder))
        self.folder = folder
        assert self.hear() == "ready"

    def say(self, do: str, **told: Any) -> None:
        """Send an order without waiting."""
        self.write(json.dumps({"do": do, **told}))
