"""A `torch.distributed` group of one trainer and its engines that no other group of the process
knows of.

It is made of public classes: a `TCPStore`, and the backend's own (`ProcessGroupGloo`,
`ProcessGroupNCCL`), which needs no default group and registers nothing. Ranks find each other by
keys of the store. Those of a process's first ordinary group are known ("default_pg", its name "0",
the device), so that an engine can also meet a trainer that called `init_process_group` itself; seen
with torch 2.13. The private `_new_process_group_helper` is not needed for that.
"""

import atexit
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed
from torch import Tensor

from nano_inference.engine.transports.interface import Deadline
from nano_inference.engine.transports.unanswered import before
from nano_inference.errors import WeightTransferError, WeightUpdateError

logger = logging.getLogger("nano_inference")

AT_EXIT = 5.0  # seconds that a process waits for groups to end
LOOK = 0.1  # seconds between two looks at whether the trainer still lives
# than a deadline, the backend itself gives up: who waits says it better
LATER = timedelta(seconds=1)
Address = tuple[str, int]
Made = TypeVar("Made")

dist: Any = torch.distributed  # its stubs lack much of what it exports


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
    """The store that a group meets at, on this host alone or on whatever address is given; port 0:
    any free one.
    """
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

    def join() -> Any:
        socket.create_connection(address, timeout=deadline.at_most()).close()
        # A trainer that came by init_process_group waits until the store has counted all of its
        # workers. It keeps no deadline while it waits for the first word of whatever listens there.
        return before(deadline, lambda: _store_at(address, world_size, deadline), url_of(address))

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
                told = (
                    f"no trainer at {url_of(address)} within {deadline.seconds:g} s: "
                    f"{_said(problem)}"
                )
                raise WeightTransferError(told) from problem
            time.sleep(deadline.at_most(0.05))


def _store_at(address: Address, world_size: int, deadline: Deadline) -> Any:
    return dist.TCPStore(
        address[0], address[1], world_size, False, deadline.remaining(), wait_for_workers=True
    )


class Group:
    """Rank `rank` of a group whose rank 0 is the trainer. Every wait has a deadline; whatever fails
    ends the group.

    Args:
        process_group: what `dist` calls a backend or a process group.
        device: where tensors must lie to travel.
        alive: called now and then while a collective is under way; raises when the trainer is gone.
    """

    def __init__(
        self, process_group: Any, device: torch.device, alive: Callable[[], object] | None = None
    ) -> None:
        self.device = device
        self._group = process_group
        self._alive = alive
        self._is_new = device.type == "cuda"  # NCCL has not met the others yet
        self._travelling: dict[int, tuple[Any, Tensor]] = {}  # on CUDA, by the id of the work

    def broadcast(self, tensor: Tensor, deadline: Deadline, what: str) -> None:
        """The trainer's numbers into everybody's tensor; `what` names them in the error."""
        self.wait([self.begin_broadcast(tensor, deadline, what)], what, deadline)

    def begin_broadcast(self, tensor: Tensor, deadline: Deadline, what: str) -> Any:
        """The same without waiting: give what it returns to `wait`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, deadline.remaining() + LATER
        group = self._require()
        return self._begun(lambda: group.broadcast([tensor], options), tensor, deadline, what)

    def agree(self, accepted: bool, deadline: Deadline, what: str) -> bool:
        """Whether everybody accepts."""
        flag = torch.tensor([int(accepted)], dtype=torch.int32, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.MIN, deadline.remaining() + LATER
        group = self._require()
        work = self._begun(lambda: group.allreduce([flag], options), flag, deadline, what)
        self.wait([work], what, deadline)
        return bool(flag.item())

    def wait(self, works: Iterable[Any], what: str, deadline: Deadline) -> None:
        """Until collectives are done. Raises `WeightUpdateError` at the deadline, or when the other
        side is gone.
        """
        try:
            for work in works:
                while not _completed(work, self.device):
                    deadline.check(f"{what} did not travel")
                    alive = self._alive
                    if alive is not None:
                        alive()
                self._travelling.pop(id(work), None)
        except RuntimeError as problem:
            raise WeightTransferError(
                f"{what} did not travel, the other side is gone: {_first_line(problem)}"
            ) from problem

    def close(self) -> None:
        """End the group. What is under way fails on every side; nothing here waits for it."""
        # What NCCL may still write to is nobody else's memory until the group has ended.
        holder, self._group, self._alive = [self._group, self._travelling], None, None
        self._travelling = {}
        # The last reference must go on a thread of its own: the destructor waits for the backend's
        # threads, which may be in a collective until its own deadline.
        end = threading.Thread(target=_let_go, args=(holder,), name="weight-group-end", daemon=True)
        end.start()
        # a destructor that is cut off in the middle would abort the process
        atexit.register(end.join, AT_EXIT)

    def _begun(self, call: Callable[[], Any], tensor: Tensor, deadline: Deadline, what: str) -> Any:
        """A collective that was begun; on CUDA the tensor is held until it is done, or the group
        has ended.
        """
        try:
            # the first one makes the communicator, and waits for all ranks without a limit
            if self._is_new:
                work = before(
                    deadline, lambda: _on_device(call, self.device), "a rank of the group"
                )
                self._is_new = False
            else:
                work = call()
        except RuntimeError as problem:
            raise WeightTransferError(f"{what} cannot travel: {_first_line(problem)}") from problem
        if self.device.type == "cuda":
            self._travelling[id(work)] = work, tensor
        return work

    def _require(self) -> Any:
        if self._group is None:
            raise WeightTransferError("the group of trainer and engines was closed.")
        return self._group


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
        raise WeightTransferError(f"the trainer is gone: {_first_line(problem)}") from problem


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
            f"the engines cannot be found: {_first_line(problem)}"
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
) -> Any:
    """A backend whose ranks meet in a room of a store. Raises `WeightUpdateError` if they do not in
    time.
    """
    store = dist.PrefixStore(room, store)
    try:
        if backend == "nccl":
            settings = dist.ProcessGroupNCCL.Options()
            settings._timeout = deadline.remaining()
            with _surviving_faults(), torch.cuda.device(device):
                return dist.ProcessGroupNCCL(store, rank, world_size, settings)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = deadline.remaining()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return dist.ProcessGroupGloo(store, rank, world_size, options)
    except RuntimeError as problem:
        raise WeightTransferError(
            f"rank {rank} of {world_size} found no group within {deadline.seconds:g} s: "
            f"{_first_line(problem)}"
        ) from problem


# Left to itself, torch's watchdog ends the whole process when a peer is gone or a collective is
# late, and another thread does when the watchdog itself hangs. 2: it ends the group, and says so to
# whoever waits. Read as one is made.
_SURVIVING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_settings_lock = threading.Lock()


@contextmanager
def _surviving_faults() -> Iterator[None]:
    """A fault of a group of NCCL that is made in here is an error of its update, and not the end of
    the process.
    """
    with _settings_lock:
        before_it = {name: os.environ.get(name) for name in _SURVIVING}
        os.environ.update(_SURVIVING)
        try:
            yield
        finally:
            for name, value in before_it.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


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


def _completed(work: Any, device: torch.device) -> bool:
    """Whether a collective is done, after a wait of at most `LOOK` seconds. Raises what it failed
    with.
    """
    if device.type == "cpu":
        try:
            work.wait(timedelta(seconds=LOOK))
        except RuntimeError:
            if not work.is_completed():  # it is only late
                return False
            # raises what it failed with, if it did, and not because that wait was over a moment
            # before
            work.wait()
        return True
    until = time.monotonic() + LOOK  # on a device, to wait means to let the stream wait
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(1e-4)
    if not work.is_completed():
        return False
    with torch.cuda.device(device):
        return work.wait()  # raises what it failed with


def _on_device(call: Callable[[], Any], device: torch.device) -> Any:
    with torch.cuda.device(device):
        return call()


def _let_go(holder: list[Any]) -> None:
    try:
        if holder[0] is not None:
            holder[0].abort()
    except RuntimeError as problem:  # of a device that has failed; there is nothing left to end
        logger.warning(
            "a group of trainer and engines did not end in order: %s", _first_line(problem)
        )
    finally:
        holder.clear()


def _said(problem: Exception) -> str:
    """Without the number of a system's error."""
    return (isinstance(problem, OSError) and problem.strerror) or _first_line(problem)


def _first_line(problem: Exception) -> str:
    """What went wrong, without the place in torch's own sources and the keys of its store."""
    lines = re.sub(r"^\[/[^\]]*\]\s*|, keys: \S+", "", str(problem).strip()).splitlines()
    return lines[0] if lines else type(problem).__name__
