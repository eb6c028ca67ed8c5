"""Rendezvous of a trainer and its engines: a `TCPStore` that the trainer serves, and key prefixes
in it at which the ranks of a process group find each other.

An engine can also join a trainer that called `init_process_group` itself, because the keys of a
process's first ordinary group are known: "default_pg", its name "0", the device (as of torch 2.13).
"""

import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from nano_inference.errors import WeightTransferError, WeightUpdateError
from nano_inference.parallel.deadline import Deadline, before
from nano_inference.parallel.process_group import ProcessGroup, dist, first_line, make_backend
from nano_inference.weights.transports.addresses import Address, url_of

Made = TypeVar("Made")


def serve_store(address: Address, timeout: float) -> Any:
    """Return a store for the rendezvous of a group, which listens only on this address. Port 0
    picks a free port. Raises `WeightUpdateError`.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        # By default the store would listen on every address of the machine.
        return dist.TCPStore(
            address[0],
            listener.getsockname()[1],
            None,
            True,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as problem:
        listener.close()
        raise WeightUpdateError(
            f"cannot serve a rendezvous at {url_of(address)}: {problem}"
        ) from problem


def join_store(address: Address, world_size: int, deadline: Deadline) -> Any:
    """Return the trainer's store, once the trainer serves it. Raises `WeightUpdateError`."""

    def store() -> Any:
        return dist.TCPStore(
            *address, world_size, False, deadline.remaining(), wait_for_workers=True
        )

    def join() -> Any:
        socket.create_connection(address, timeout=deadline.at_most()).close()
        # A trainer that called init_process_group waits until the store has counted all of its
        # workers. TCPStore ignores its timeout while it waits for the listener's first reply.
        return before(deadline, store, url_of(address))

    # the store's own wait raises long, vague errors
    return when_served(address, deadline, join)


def when_served(address: Address, deadline: Deadline, connect: Callable[[], Made]) -> Made:
    """Call `connect` until the trainer is reachable, and return its result. Raises
    `WeightTransferError` at the deadline.
    """
    while True:
        try:
            return connect()
        except (OSError, RuntimeError) as problem:
            if not deadline.left():
                # the system's message without its error number
                said = (isinstance(problem, OSError) and problem.strerror) or first_line(problem)
                raise WeightTransferError(
                    f"no trainer at {url_of(address)} within {deadline.seconds:g} s: {said}"
                ) from problem
            time.sleep(deadline.at_most(0.05))


def ask_for_room(store: Any, rank: int, deadline: Deadline) -> str:
    """Announce this engine, and wait until the trainer names the key prefix for the rendezvous.

    Each attempt has its own token, so that neither side uses leftovers of an earlier one.
    """
    here, token = f"engine/{rank}", secrets.token_hex(8)
    room = f"room/{rank}/{token}"
    try:
        store.set(here, token)
        while not store.check([room]):
            if not deadline.left():
                store.delete_key(here)
            deadline.check("the trainer connected but began no update")
            time.sleep(deadline.at_most(0.01))
        return store.get(room).decode()
    except RuntimeError as problem:
        raise WeightTransferError(f"lost the trainer: {first_line(problem)}") from problem


def open_room(store: Any, num_receivers: int, name: str, deadline: Deadline) -> None:
    """Wait until every engine has announced itself, and send each the key prefix for the
    rendezvous.
    """
    try:
        for rank in range(1, num_receivers + 1):
            while not store.check([f"engine/{rank}"]):
                deadline.check(f"engine {rank} of {num_receivers} did not join")
                time.sleep(deadline.at_most(0.01))
        for rank in range(1, num_receivers + 1):
            token = store.get(f"engine/{rank}").decode()
            store.delete_key(f"engine/{rank}")
            store.set(f"room/{rank}/{token}", name)
    except RuntimeError as problem:
        raise WeightTransferError(f"lost the engines: {first_line(problem)}") from problem


def default_room(backend: str) -> str:
    """Return the key prefix at which the ranks of a process's first ordinary group find
    each other.
    """
    return "default_pg/" + device_room("0", backend)


def device_room(group_name: str, backend: str) -> str:
    """Return the key prefix of a group with this name in torch, below the prefix that its maker
    adds.
    """
    return f"{group_name}//" + ("cpu/" if backend == "gloo" else "cuda/")


def join_group(
    store: Any,
    room: str,
    rank: int,
    world_size: int,
    backend: str,
    device: torch.device,
    host: str,
    deadline: Deadline,
    alive: Callable[[], object] | None = None,
) -> ProcessGroup:
    """Join the group whose ranks find each other at a key prefix of a store. `alive` is as in
    `ProcessGroup`. Raises `WeightUpdateError` if the ranks do not connect in time.
    """
    store = dist.PrefixStore(room, store)
    limit = deadline.remaining()
    try:
        group = make_backend(backend, store, rank, world_size, device, limit, host, survives=True)
    except RuntimeError as problem:
        raise WeightTransferError(
            f"rank {rank} of {world_size} could not join its group within {deadline.seconds:g} s: "
            f"{first_line(problem)}"
        ) from problem
    return ProcessGroup(group, device, rank, world_size, alive)


def device_for(backend: str, device: str | torch.device | None) -> torch.device:
    """Return the device of transferred tensors: the given one, else the CPU with gloo and the
    current CUDA device with NCCL.

    A CUDA device gets its number here, because the current device differs between threads.
    """
    resolved = torch.device(device or ("cuda" if backend == "nccl" else "cpu"))
    if resolved.type == "cuda" and resolved.index is None and torch.cuda.is_available():
        resolved = torch.device("cuda", torch.cuda.current_device())
    return resolved


def check_backend(backend: str) -> None:
    """Raise `WeightUpdateError` for a backend that is unknown or not part of this torch build."""
    if backend not in ("gloo", "nccl"):
        raise WeightUpdateError(f"backend={backend!r} must be 'gloo' or 'nccl'.")
    if not (dist.is_gloo_available() if backend == "gloo" else dist.is_nccl_available()):
        raise WeightUpdateError(
            f"backend={backend!r} is not part of this build of torch; use another one."
        )
