"""A trainer with the package `vllm` of shim/, as vLLM's trainers are written: `python
pynccl_trainer.py PORT WORLD_SIZE WHAT`. It sends two broadcasts over NCCL and waits for stdin's end.

`WHAT`: nothing, or the number of broadcasts after which the process kills itself.
"""

import os
import signal
import sys

import torch
from vllm.distributed.device_communicators.pynccl import connected
from vllm.distributed.utils import StatelessProcessGroup

from nano_inference.parallel.deadline import Deadline
from tests.shim.tensors import sent

PATIENCE = 20.0


def main() -> None:
    """Make the group and send."""
    port, world_size = int(sys.argv[1]), int(sys.argv[2])
    kills_after = int(sys.argv[3]) if len(sys.argv) > 3 else None
    group = StatelessProcessGroup.create("127.0.0.1", port, 0, world_size)
    communicator = connected(group, torch.device("cpu"), Deadline(PATIENCE))
    for count, tensor in enumerate(sent()):
        if count == kills_after:
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = Deadline(PATIENCE)
        queued = communicator.broadcast(tensor, 0, deadline, "a tensor")
        communicator.wait(queued, deadline, "a tensor")
    print("sent", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
