"""Ranks that torchrun has started: rank 0 builds the engine, all others call `serve_rank`.

    torchrun --nproc-per-node=2 script.py

    # script.py
    if int(os.environ["RANK"]) == 0:
        with InferenceEngine(EngineConfig(model, tensor_parallel=2), TorchrunLauncher()) as engine:
            ...
    else:
        serve_rank()

They find each other through torchrun's own store, which brings each its `Begin`. What reaches
that store can read the engine's token there, as they could join a group of `torch.distributed`: its
network must be one's own.
"""

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed

from nano_inference.errors import ConfigError
from nano_inference.ranks.messages import Begin
from nano_inference.ranks.worker import run_worker

dist: Any = torch.distributed

ROOM = "nano-inference/ranks"
WAIT_SECONDS = 120.0  # for the others to come
_engines_served = 0  # by this process
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunLauncher:
    """For rank 0: the other processes are there already. One engine at a time, of as many ranks as
    torchrun started.

    Raises `ConfigError` outside of torchrun.
    """

    port = 0

    def __init__(self) -> None:
        self._environment = environment()
        if self._environment["RANK"] != "0":
            raise ConfigError("TorchrunLauncher is for rank 0; the other ranks call serve_rank().")
        here = int(self._environment["LOCAL_WORLD_SIZE"])
        everybody = here == int(self._environment["WORLD_SIZE"])
        self.host: str | None = (
            "127.0.0.1" if everybody else _own_address(self._environment["MASTER_ADDR"])
        )
        self._store: Any = None

    def ranks_here(self, world_size: int) -> int:
        """As many as torchrun has started on this machine."""
        started = int(self._environment["WORLD_SIZE"])
        if started != world_size:
            raise ConfigError(
                f"torchrun has started {started} processes, and the config has {world_size} ranks."
            )
        return int(self._environment["LOCAL_WORLD_SIZE"])

    def start(self, begins: Sequence[Begin]) -> list["TorchrunHandle"]:
        """See `Launcher`."""
        self._store = self._store or _store()
        round_ = self._store.add(f"{ROOM}/engines", 1)
        for begin in begins:
            self._store.set(f"{ROOM}/{round_}/{begin.rank}", msgspec.json.encode(begin))
        return [TorchrunHandle() for _ in begins]


class TorchrunHandle:
    """A process that torchrun looks after. It ends when its link does."""

    def alive(self) -> bool:
        """See `Handle`."""
        return True

    def ended(self) -> str:
        """See `Handle`."""
        return "may run"

    def kill(self) -> None:
        """See `Handle`. That is torchrun's business; without rank 0 it ends by itself."""


def serve_rank() -> None:
    """Be one rank of the engine that rank 0 builds; returns when that is shut down.

    When rank 0 is lost amid a step this process ends. Raises `ConfigError` where it cannot be part
    of the engine.
    """
    global _engines_served
    told = environment()
    rank = told["RANK"]
    if rank == "0":
        raise ConfigError(
            "rank 0 builds the engine, with TorchrunLauncher(); serve_rank() is for the others."
        )
    store = _store()
    round_ = _engines_served + 1
    try:
        begin = msgspec.json.decode(store.get(f"{ROOM}/{round_}/{rank}"), type=Begin)
    except RuntimeError as problem:
        raise ConfigError(f"rank 0 has built no engine within {WAIT_SECONDS:g} s.") from problem
    _engines_served += 1
    alone = told["LOCAL_WORLD_SIZE"] == told["WORLD_SIZE"]
    host = "" if alone else _own_address(told["MASTER_ADDR"])
    run_worker(msgspec.structs.replace(begin, local_rank=int(told["LOCAL_RANK"]), host=host))


def environment(read: Callable[[str], str | None] = os.environ.get) -> dict[str, str]:
    """What torchrun has set. Raises `ConfigError` where it has not."""
    found = {name: read(name) for name in NEEDED}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ConfigError(
            f"torchrun has not set {', '.join(missing)}: start the script with torchrun."
        )
    return {name: value for name, value in found.items() if value is not None}


def _store() -> Any:
    """That of torchrun, or the one that its rank 0 serves."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=WAIT_SECONDS)))
    store.set_timeout(timedelta(seconds=WAIT_SECONDS))
    return store


def _own_address(towards: str) -> str:
    """The address of this machine on the way to another one. Nothing is sent."""
    family, _, _, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        one.connect(where)
        return str(one.getsockname()[0])
