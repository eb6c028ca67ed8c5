"""Small trainers (`small_trainer.py`) as their tests hold them."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from typing import Any

from tests.server.trainers.small_trainer import weights

PATIENCE = 60.0


class Trainer:
    """A process of `small_trainer`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self._said: Queue[str] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line.strip())
        self._said.put("ended")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = PATIENCE) -> str:
        try:
            return self._said.get(timeout=seconds)
        except Empty:
            raise AssertionError("the trainer says nothing") from None

    def update(self, action: str, version: int) -> tuple[int, dict[str, Any]]:
        """Status and reply of the request that it sends."""
        self.tell(f"{action} {version}")
        status, _, reply = self.hear().partition(" ")
        return int(status), json.loads(reply)


@contextmanager
def trainer(kind: str, url: str, port: int, world_size: int = 2) -> Iterator[Trainer]:
    """One, killed at the end."""
    command = [
        sys.executable,
        "-m",
        "tests.server.trainers.small_trainer",
        kind,
        url,
        str(port),
        str(world_size),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        try:
            yield Trainer(process)
        finally:
            process.kill()


def checksums(version: int) -> dict[str, str]:
    """Of the weights that a small trainer sends as this version."""
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in weights(version).items()
    }
