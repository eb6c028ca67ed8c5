"""Test helpers for `small_trainer.py`."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.trainers.children import Child
from tests.server.trainers.small_trainer import weights


class Trainer(Child):
    """A process of `small_trainer`."""

    def update(self, action: str, version: int) -> tuple[int, dict[str, Any]]:
        """Send an update and return the request's status and reply."""
        self.write(f"{action} {version}")
        status, _, reply = self.hear().partition(" ")
        return int(status), json.loads(reply)


@contextmanager
def trainer(kind: str, url: str, port: int, world_size: int = 2) -> Iterator[Trainer]:
    """Run a trainer and kill it at the end."""
    module = "tests.server.trainers.small_trainer"
    own = Trainer(module, kind, url, str(port), str(world_size))
    try:
        yield own
    finally:
        own.close()


def checksums(version: int) -> dict[str, str]:
    """Return the checksums of the weights that a small trainer sends as this version."""
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in weights(version).items()
    }
