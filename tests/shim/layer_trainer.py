"""A trainer with the package `vllm` of shim/ that sends layers as prime-rl's does: `python
layer_trainer.py PORT WHAT`.

`WHAT`: "whole", "executes" (its description would make a folder), "short" (it kills itself after the
first part).
"""

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators.pynccl import connected
from vllm.distributed.utils import StatelessProcessGroup

from nano_inference.parallel.deadline import Deadline
from tests.shim.tensors import layers

PATIENCE = 20.0


class Runs:
    """Object whose pickle makes a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path.cwd() / "ran"),)


def main() -> None:
    """Make the group and send."""
    port, case = int(sys.argv[1]), sys.argv[2]
    group = StatelessProcessGroup.create("127.0.0.1", port, 0, 2)
    communicator = connected(group, torch.device("cpu"), Deadline(PATIENCE))

    def send(tensor: torch.Tensor) -> None:
        deadline = Deadline(PATIENCE)
        queued = communicator.broadcast(tensor, 0, deadline, "a tensor")
        communicator.wait(queued, deadline, "a tensor")

    parts = layers()
    send(torch.tensor([len(parts)]))
    for tensors in parts:
        groups: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            groups.setdefault(tensor.dtype, []).append((name, tensor))
        described: Any = {
            dtype: [(name, tensor.shape, tensor.numel()) for name, tensor in pairs]
            for dtype, pairs in groups.items()
        }
        content = pickle.dumps(Runs() if case == "executes" else described)
        send(torch.tensor([len(content)]))
        send(torch.ByteTensor(list(content)))
        for pairs in groups.values():
            send(torch.cat([tensor.flatten() for _, tensor in pairs]))
        if case == "short":
            os.kill(os.getpid(), signal.SIGKILL)
    print("sent", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
