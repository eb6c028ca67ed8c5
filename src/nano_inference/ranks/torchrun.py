"""Ranks that torchrun has started: rank 0 builds the engine, all others call `serve_rank`.

    torchrun --nproc-per-node=2 script.py

    # script.py
    if int(os.environ["RANK"]) == 0:
        with InferenceEngine(EngineConfig(model, tensor_parallel=2), TorchrunLauncher()) as engine:
            ...
    else:
        serve_rank()

The ranks find each other through torchrun's store, which holds each rank's `Begin`. Any process
with access to that store can read the engine's token, just as it could join a `torch.distributed`
group. Use a private network.
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
WAIT_SECONDS = 120.0  # timeout of waits for the other ranks
_engines_served = 0  # engines that this process has served
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunLauncher:
    """Launcher for rank 0, for processes that torchrun has already started.

    Supports one engine at a time, with as many ranks as torchrun has started.

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
            "127.0.0.1" if everybody else own_address(self._environment["MASTER_ADDR"])
        )
        self._store: Any = None

    def ranks_here(self, world_size: int) -> int:
        """Return how many ranks torchrun has started on this machine."""
        started = int(self._environment["WORLD_SIZE"])
        if started != world_size:
            raise ConfigError(
                f"torchrun has started {started} processes, but the config has {world_size} ranks."
            )
        return int(self._environment["LOCAL_WORLD_SIZE"])

    def start(self, begins: Sequence[Begin]) -> list["TorchrunHandle"]:
        self._store = self._store or torchrun_store()
        round_ = self._store.add(f"{ROOM}/engines", 1)
        for begin in begins:
            self._store.set(f"{ROOM}/{round_}/{begin.rank}", msgspec.json.encode(begin))
        return [TorchrunHandle() for _ in begins]


class TorchrunHandle:
    """Process managed by torchrun, which ends when its link is closed."""

    def alive(self) -> bool:
        return True

    def ended(self) -> str:
        return "may be running"

    def kill(self) -> None:
        """Do nothing: torchrun manages the process, which ends by itself without rank 0."""


def serve_rank() -> None:
    """Serve as one rank of the engine that rank 0 builds. Return when the engine is shut down.

    If rank 0 is lost during a step, this process ends. Raises `ConfigError` if the process cannot
    be part of the engine.
    """
    global _engines_served
    variables = environment()
    rank = variables["RANK"]
    if rank == "0":
        raise ConfigError(
            "rank 0 must build the engine, with TorchrunLauncher(); other ranks call serve_rank()."
        )
    store = torchrun_store()
    round_ = _engines_served + 1
    try:
        begin = msgspec.json.decode(store.get(f"{ROOM}/{round_}/{rank}"), type=Begin)
    except RuntimeError as problem:
        raise ConfigError(f"rank 0 did not build an engine within {WAIT_SECONDS:g} s.") from problem
    _engines_served += 1
    alone = variables["LOCAL_WORLD_SIZE"] == variables["WORLD_SIZE"]
    host = "" if alone else own_address(variables["MASTER_ADDR"])
    run_worker(msgspec.structs.replace(begin, local_rank=int(variables["LOCAL_RANK"]), host=host))


def environment(read: Callable[[str], str | None] = os.environ.get) -> dict[str, str]:
    """Return torchrun's environment variables. Raise `ConfigError` if some are missing."""
    variables = {name: read(name) for name in NEEDED}
    missing = [name for name, value in variables.items() if value is None]
    if missing:
        raise ConfigError(
            f"torchrun has not set {', '.join(missing)}: start the script with torchrun."
        )
    return {name: value for name, value in variables.items() if value is not None}


def torchrun_store() -> Any:
    """Return torchrun's store, or the store that its rank 0 serves."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=WAIT_SECONDS)))
    store.set_timeout(timedelta(seconds=WAIT_SECONDS))
    return store


def own_address(towards: str) -> str:
    """Return this machine's address on the route to another machine. Nothing is sent."""
    family, _, _, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        one.connect(where)
        return str(one.getsockname()[0])
