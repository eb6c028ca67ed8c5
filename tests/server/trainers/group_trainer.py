"""A torch-only trainer in a separate process: it executes orders (lines of JSON) from stdin and
answers each.

Run as `python -m tests.server.trainers.group_trainer FOLDER`. It invents new weights for the model
in FOLDER.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from nano_inference.weights.transports.sender import WeightSender
from tests.models.tiny import llama_weights


def new_weights(folder: Path, seed: int, dtype: str = "float32") -> dict[str, Tensor]:
    """Return random weights for the model in a folder."""
    config = json.loads((folder / "config.json").read_text())
    return {
        name: tensor.to(getattr(torch, dtype))
        for name, tensor in llama_weights(config, seed).items()
    }


def ordinary_group(port: int, world_size: int, timeout: timedelta) -> Any:
    """Create the default group of a process."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=0, world_size=world_size, timeout=timeout
    )
    return dist.group.WORLD


def named_group(name: str, port: int, world_size: int, timeout: timedelta) -> Any:
    """Create an additional, named group with its own rendezvous and a prefix for its store."""
    store, rank, size = next(
        dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout)  # pyright: ignore
    )
    store.set_timeout(timeout)
    store = distributed_c10d.PrefixStore(name, store)
    made, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], "gloo", store, group_name=distributed_c10d.GroupName(name), timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[made] = {each: each for each in range(size)}
    return made


class Trainer:
    """Process groups by name, and the weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups: dict[str, Any] = {}

    def join(
        self, name: str, port: int, named: bool = False, world_size: int = 2, seconds: float = 20.0
    ) -> None:
        """Create a group and wait for the engine."""
        timeout = timedelta(seconds=seconds)
        if named:
            self.groups[name] = named_group(name, port, world_size, timeout)
        else:
            self.groups[name] = ordinary_group(port, world_size, timeout)

    def leave(self, name: str) -> None:
        """Destroy a group."""
        dist.destroy_process_group(self.groups.pop(name))

    def leave_all(self) -> None:
        """Destroy all remaining groups."""
        for name in list(self.groups):
            self.leave(name)

    def send(
        self,
        group: str,
        names: list[str] | None = None,
        seed: int = 1,
        dtype: str = "float32",
        packed_bytes: int | None = None,
        then_signal: tuple[int, int] | None = None,
        numbers: int | None = None,
        nan: bool = False,
        dtypes: list[str] | None = None,
    ) -> None:
        """Broadcast tensors one by one or packed. `numbers` falsifies their sizes. With
        `then_signal`, send this process a signal after that many.
        """
        weights = new_weights(self.folder, seed, dtype)
        tensors = [weights[name] for name in (weights if names is None else names)]
        if dtypes is not None:
            tensors = [
                tensor.to(getattr(torch, each))
                for tensor, each in zip(tensors, dtypes, strict=True)
            ]
        if nan:
            tensors[-1][0] = torch.nan
        if packed_bytes is not None:
            tensors = packed(tensors, packed_bytes)
        for count, tensor in enumerate(tensors):
            if then_signal is not None and count == then_signal[0]:
                os.kill(os.getpid(), then_signal[1])
            flat = tensor if numbers is None else torch.ones(numbers)
            dist.broadcast(flat, 0, group=self.groups[group])

    def stream(self, group: str, seed: int, version: int) -> None:
        """Broadcast the tensors with this package's own sender."""
        WeightSender.over(self.groups[group], timeout=20.0).send(
            new_weights(self.folder, seed), version=version
        )


def packed(tensors: Iterable[Tensor], max_bytes: int) -> list[Tensor]:
    """Pack tensors into flat buckets. A bucket ends once it exceeds `max_bytes`."""
    runs: list[list[Tensor]] = []
    size = max_bytes + 1
    for tensor in tensors:
        if size > max_bytes:
            runs.append([])
            size = 0
        runs[-1].append(tensor.contiguous().view(-1).view(torch.uint8))
        size += tensor.nbytes
    return [torch.cat(run) for run in runs]


def main() -> None:
    """Execute orders until stdin ends."""
    torch.set_num_threads(1)
    trainer = Trainer(Path(sys.argv[1]))
    do: dict[str, Callable[..., None]] = {
        "join": trainer.join,
        "leave": trainer.leave,
        "leave_all": trainer.leave_all,
        "send": trainer.send,
        "stream": trainer.stream,
    }
    print("ready", flush=True)
    for line in sys.stdin:
        report = json.loads(line)
        try:
            do[report.pop("do")](**report)
            print("done", flush=True)
        except Exception as problem:
            print(f"failed: {str(problem).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
