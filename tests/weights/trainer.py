"""A trainer in a separate process for the broadcast tests. It performs its arguments and prints
results.

Run as `python -m tests.weights.trainer PORT ACTION...`; each action is one update, or a way to fail
in one. It prints the address first, then a line for every action.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from nano_inference.errors import WeightUpdateError
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.weights.staging import WeightPatch
from nano_inference.weights.transports import sender, wire
from tests.weights.weight_cases import EMBEDDING, NEW, NEWER, NORM, UP


def after(count: int, happen: Any) -> None:
    """Run a function instead of broadcast number `count` from now on."""
    begin, left = ProcessGroup.begin_broadcast, [count]

    def begin_broadcast(self: Any, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            happen()
        return begin(self, *arguments)

    setattr(ProcessGroup, "begin_broadcast", begin_broadcast)  # noqa: B010


def lie(content: bytes) -> None:
    """Send a description that does not match the data."""
    wire.encode = lambda _: content


def kill_in_the_middle() -> None:
    # the description, its length, and four runs
    after(6, lambda: os.kill(os.getpid(), signal.SIGKILL))


ENCODE = wire.encode
UPDATES: dict[str, Any] = {
    "new": NEW,
    "newer": NEWER,
    "seven": NEW,
    "patch": [WeightPatch(NORM, torch.tensor([3, 1]), torch.tensor([5.0, 6.0]))],
    "nan": {NORM: torch.full((64,), torch.nan)},
    "name": {UP: NEW[UP], "model.other.weight": torch.ones(3)},
    "shape": {UP: NEW[UP].T},
    "part": {UP: NEW[UP]},
    "extra": {**NEW, "model.layers.9.mlp.up_proj.weight": NEW[UP]},
    "strided": {UP: NEW[UP].T.contiguous().T, EMBEDDING: NEW[EMBEDDING].to(torch.bfloat16)},
    "empty": {},
}
BEFORE: dict[str, Callable[[], Any]] = {
    "long": lambda: lie(b" " * 10_000_000),
    "garbage": lambda: lie(b'{"format": 1, "version": null, "buckets": [[["x"]]]}'),
    "kill": kill_in_the_middle,
    "silent": lambda: after(4, lambda: time.sleep(60)),
}


def act(trainer: sender.WeightSender, action: str) -> None:
    """Perform one action."""
    if action == "stopped":
        trainer.connect()
        time.sleep(60)
    wire.encode = ENCODE
    BEFORE.get(action, lambda: None)()
    trainer.send(UPDATES.get(action, NEW), version=7 if action == "seven" else None)


def main() -> None:
    """Serve, print the address, and perform the actions."""
    torch.set_num_threads(1)
    with sender.WeightSender(
        f"tcp://127.0.0.1:{sys.argv[1]}", bucket_bytes=20_000, timeout=20
    ) as trainer:
        print(trainer.address, flush=True)
        for action in sys.argv[2:]:
            try:
                act(trainer, action)
                print("sent", flush=True)
            except WeightUpdateError as problem:
                print(f"refused: {problem}", flush=True)


def ordinary(address: str) -> None:
    """Return a trainer that uses its default process group."""
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=2)
    sender.WeightSender.over(torch.distributed.group.WORLD, timeout=20).send(NEW)
    mine = torch.ones(3)
    torch.distributed.broadcast(mine, 0)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1].startswith("tcp://"):
        ordinary(sys.argv[1])
    else:
        main()
