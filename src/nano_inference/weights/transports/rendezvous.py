"""How a trainer and its engines find each other: a `TCPStore` that the trainer serves, and keys in
it below which the ranks of a process group meet.

The keys of a process's first ordinary group are known ("default_pg", its name "0", the device; seen
with torch 2.13), so that an engine can also meet a trainer that called `init_process_group` itself.
"""

import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from nano_inference.errors import WeightTransferError, WeightUpdateError
from nano_inference.parallel.deadline import Deadline, before
from nano_inference.parallel.process_group import ProcessGroup, dist, first_line, make_backend

Address = tuple[str, int]
Made = TypeVar("Made")


def parse_address(address: str) -> Address:
    """(host, port) of "tcp://host:port". Raises `WeightUpdateError`."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except (ValueError, TypeError, AttributeError):
        host, port, parts = None, None, None
    if parts is None or parts.scheme != "tcp" or not host or port is None or parts.path:
        raise WeightUpdateError(f"address={address!r} must be tcp://host:port.")
    check_host(host)
    return host, port


def check_host(host: str) -> None:
    """Raise `WeightUpdateError` for what can be no name or address of a machine."""
    try:
        fits = (
            0 < len(host.encode("idna")) <= 255
            and host.isprintable()
            and not set(host) & set(" /?#@%\\")
        )
    except UnicodeError:
        fits = False
    if not fits:
        raise WeightUpdateError(f"{host!r:.80} is no name or address of a machine.")


def url_of(address: Address) -> str:
    """What `parse_address` reads."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"tcp://{host}:{address[1]}"


def serve_store(address: Address, timeout: float) -> Any:
    """The store that a group meets at. It listens on this address alone; port 0: any free one."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        # Left to itself the store would listen on every address of the machine.
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
        raise WeightUpdateError(f"no group can meet at {url_of(address)}: {problem}") from problem


def join_store(address: Address, world_size: int, deadline: Deadline) -> Any:
    """The store that the trainer serves, as soon as it does. Raises `WeightUpdateError`."""

    def store() -> Any:
        return dist.TCPStore(
            *address, world_size, False, deadline.remaining(), wait_for_workers=True
        )

    def join() -> Any:
        socket.create_connection(address, timeout=deadline.at_most()).close()
        # A trainer that came by init_process_group waits until the store has counted all of its
        # workers. It keeps no deadline while it waits for the first word of the listener there.
        return before(deadline, store, url_of(address))

    # the store's own way to wait says little and in many lines
    return when_served(address, deadline, join)


def when_served(address: Address, deadline: Deadline, connect: Callable[[], Made]) -> Made:
    """What `connect` returns, tried again until the trainer is there. Raises `WeightTransferError`
    at the deadline.
    """
    while True:
        try:
            return connect()
        except (OSError, RuntimeError) as problem:
            if not deadline.left():
                # without the number of a system's error
                said = (isinstance(problem, OSError) and problem.strerror) or first_line(problem)
                raise WeightTransferError(
                    f"no trainer at {url_of(address)} within {deadline.seconds:g} s: {said}"
                ) from problem
            time.sleep(deadline.at_most(0.05))


def ask_for_room(store: Any, rank: int, deadline: Deadline) -> str:
    """Say that this engine is here, and wait until the trainer names the place in the store where
    both meet.

    Each try has a token of its own, so that neither takes what is left of an earlier one for the
    other's.
    """
    here, token = f"engine/{rank}", secrets.token_hex(8)
    room = f"room/{rank}/{token}"
    try:
        store.set(here, token)
        while not store.check([room]):
            if not deadline.left():
                store.delete_key(here)
            deadline.check("the trainer came, and began no update")
            time.sleep(deadline.at_most(0.01))
        return store.get(room).decode()
    except RuntimeError as problem:
        raise WeightTransferError(f"the trainer is gone: {first_line(problem)}") from problem


def open_room(store: Any, num_receivers: int, name: str, deadline: Deadline) -> None:
    """Wait until every engine is here, and tell them where to meet."""
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
        raise WeightTransferError(
            f"the engines cannot be found: {first_line(problem)}"
        ) from problem


def default_room(backend: str) -> str:
    """Where the ranks of a process's first ordinary group meet."""
    return "default_pg/" + device_room("0", backend)


def device_room(group_name: str, backend: str) -> str:
    """Where the ranks of a group that torch knows by this name meet, below what its maker put in
    front of its store.
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
    """The group whose ranks meet in a room of a store; `alive` as in `ProcessGroup`. Raises
    `WeightUpdateError` if they do not in time.
    """
    store = dist.PrefixStore(room, store)
    limit = deadline.remaining()
    try:
        made = make_backend(backend, store, rank, world_size, device, limit, host, survives=True)
    except RuntimeError as problem:
        raise WeightTransferError(
            f"rank {rank} of {world_size} found no group within {deadline.seconds:g} s: "
            f"{first_line(problem)}"
        ) from problem
    return ProcessGroup(made, device, rank, world_size, alive)


def device_for(backend: str, device: str | torch.device | None) -> torch.device:
    """Where what travels must lie: the CPU with gloo, the current CUDA device with NCCL, or the one
    that is given.

    A CUDA device gets its number here: on another thread the current one is another.
    """
    found = torch.device(device or ("cuda" if backend == "nccl" else "cpu"))
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def check_backend(backend: str) -> None:
    """Raise `WeightUpdateError` for one that is unknown or not part of this torch."""
    if backend not in ("gloo", "nccl"):
        raise WeightUpdateError(f"backend={backend!r} must be 'gloo' or 'nccl'.")
    if not (dist.is_gloo_available() if backend == "gloo" else dist.is_nccl_available()):
        raise WeightUpdateError(f"backend={backend!r} is not part of this build of torch.")
