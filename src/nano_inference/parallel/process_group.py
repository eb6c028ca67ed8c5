"""`ProcessGroup`: ranks that are processes, over gloo or NCCL: those of an engine, or a trainer and
its engines.

It is made of torch's public classes: a store, and the backend's own (`ProcessGroupGloo`,
`ProcessGroupNCCL`), which needs no default group and registers nothing, so that no other group of
the process knows of it. The private `_new_process_group_helper` is not needed for that.
"""

import atexit
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from nano_inference.errors import RankLost, WeightTransferError
from nano_inference.parallel.deadline import Deadline, before
from nano_inference.parallel.segments import tree_sum

logger = logging.getLogger("nano_inference")

PATIENCE = 60.0  # seconds that a rank of an engine waits for the others
AT_EXIT = 5.0  # seconds that a process waits for its groups to end
MOST_SENDING = 16  # tensors that are on their way to one rank
LOOK = 0.1  # seconds between two looks at whether the trainer still lives
# than a deadline, the backend itself gives up: the thread that waits says it better
LATER = timedelta(seconds=1)

dist: Any = torch.distributed  # its stubs lack much of what it exports


class ProcessGroup:
    """Some ranks, this one among them. What travels lies on the CPU with gloo, on the card with
    NCCL. All ranks call the same collectives in the same order.

    The ranks of an engine wait for each other as long as the group's patience, and what fails is a
    `RankLost`. Between two processes gloo's plain messages take a fourth of the time that its
    collectives do, so those are made of messages here. NCCL's collectives are queued on the current
    stream, and a rank that is gone is seen by the thread that waits for the device; the waits of
    gloo end here.

    A trainer (rank 0) and its engines give each wait a `Deadline`, and what fails is a
    `WeightTransferError`.

    Args:
        group: what `dist` calls a backend or a process group.
        device: where tensors must lie to travel.
        rank, size: this one, of how many.
        alive: called now and then while a collective with a deadline is under way; raises when the
            trainer is gone.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        rank: int = 0,
        size: int = 1,
        alive: Callable[[], object] | None = None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group: Any = group
        self._alive = alive
        # what `send` has begun, by peer: the oldest first
        self._sending: dict[int, deque[tuple[Any, Tensor]]] = {}
        self._is_new = device.type == "cuda"  # NCCL has not met the others yet
        self._travelling: dict[int, tuple[Any, Tensor]] = {}  # on CUDA, by the id of the work

    @classmethod
    def meet(
        cls,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        patience: float = PATIENCE,
        host: str = "",
    ) -> "ProcessGroup":
        """The ranks of an engine.

        Args:
            store: of `torch.distributed`, in which the ranks of this group alone meet.
            rank, size: this one, of how many.
            device: where tensors lie that travel.
            patience: seconds that one waits for another.
            host: the address of this machine that the others reach; for gloo.

        Raises `RankLost` if the others do not come in time.
        """
        backend, limit = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=patience)
        try:
            store.set_timeout(limit)
            # a rank that is lost ends the engine: torch's watchdog may end the process first
            group = make_backend(
                backend, store, rank, size, device, limit, host or "127.0.0.1", survives=False
            )
            made = cls(group, device, rank, size)
            if backend == "gloo":
                made.barrier()  # gloo connects as it is first used; NCCL has met in its constructor
        except RuntimeError as problem:
            raise RankLost(
                f"the ranks of a group of {size} did not meet: {first_line(problem)}"
            ) from problem
        return made

    # -- the ranks of an engine --------------------------------------------------------------------

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The tensor of every rank, by rank; all of one shape and dtype."""
        if self.device.type == "cuda":
            out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
            self._group._allgather_base(out, x.contiguous()).wait()
            return list(out)
        found = [x if peer == self.rank else torch.empty_like(x) for peer in range(self.size)]
        self._swap([x] * self.size, found)
        return found

    def tree_sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's float32 tensor, neighbours first (`segments.tree_sum`): the same
        bits on every rank.

        The number of ranks is a power of two.
        """
        if self.device.type == "cuda":
            return tree_sum(self.all_gather(x))
        total, step = x.to(torch.float32).contiguous(), 1
        # the holder of the sum of so many neighbours meets that of the next ones
        while step < self.size:
            theirs = torch.empty_like(total)
            self._exchange(self.rank ^ step, total, theirs)
            total = total + theirs  # in either order: the same bits
            step *= 2
        return total

    def all_to_all(
        self, parts: Sequence[Tensor], counts: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Give part i to rank i, and get what each rank has for this one, by rank. All are [n, ...]
        of one dtype and of one shape but for n, which the receiver need not know. `counts`: n of
        what each rank gives, where all know it.
        """
        if counts is None:
            given = torch.tensor([len(part) for part in parts], device=self.device)
            counts = [int(each[self.rank]) for each in self.all_gather(given)]
        like = parts[self.rank]
        found = [
            part
            if peer == self.rank
            else torch.empty((count, *like.shape[1:]), dtype=like.dtype, device=like.device)
            for peer, (part, count) in enumerate(zip(parts, counts, strict=True))
        ]
        if self.device.type == "cuda":
            self._group.alltoall(found, [part.contiguous() for part in parts]).wait()
        else:
            self._swap(parts, found)
        return found

    def send(self, x: Tensor, peer: int) -> None:
        """Give a tensor to a rank; may return before it has arrived. The tensor is not written to
        afterwards.
        """
        sending = self._sending.setdefault(peer, deque())
        if len(sending) == MOST_SENDING:  # gloo sends nothing before it is received
            self._finish(sending.popleft()[0])
        x = _flat(x)
        sending.append((self._begun(self._group.send, x, peer, tag=1), x))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Tensor:
        """The next tensor that a rank sent."""
        found = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._finish(self._begun(self._group.recv, _flat(found), peer, tag=1))
        return found

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # -- a trainer and its engines -----------------------------------------------------------------

    def broadcast(self, tensor: Tensor, deadline: Deadline, what: str) -> None:
        """The trainer's numbers into every rank's tensor; `what` names them in the error."""
        self.wait([self.begin_broadcast(tensor, deadline, what)], what, deadline)

    def begin_broadcast(self, tensor: Tensor, deadline: Deadline, what: str) -> Any:
        """The same without waiting: give what it returns to `wait`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, deadline.remaining() + LATER
        group = self._require()
        return self._launched(lambda: group.broadcast([tensor], options), tensor, deadline, what)

    def agree(self, accepted: bool, deadline: Deadline, what: str) -> bool:
        """Whether every rank accepts."""
        flag = torch.tensor([int(accepted)], dtype=torch.int32, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.MIN, deadline.remaining() + LATER
        group = self._require()
        work = self._launched(lambda: group.allreduce([flag], options), flag, deadline, what)
        self.wait([work], what, deadline)
        return bool(flag.item())

    def wait(self, works: Iterable[Any], what: str, deadline: Deadline) -> None:
        """Until collectives are done. Raises `WeightTransferError` at the deadline, or when the
        other side is gone.
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
                f"{what} did not travel, the other side is gone: {first_line(problem)}"
            ) from problem

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the group. What is under way fails on every rank; nothing here waits for it."""
        if self._group is None:
            return
        # What NCCL may still write to is no other tensor's memory until the group has ended.
        holder = [self._group, self._travelling]
        self._group, self._alive, self._sending, self._travelling = None, None, {}, {}
        # The last reference goes on a thread of its own: the destructor waits for the backend's
        # threads, which may be in a collective until its own deadline.
        end = threading.Thread(target=_let_go, args=(holder,), name="end of a group", daemon=True)
        end.start()
        # a destructor that is cut off in the middle would abort the process
        atexit.register(end.join, AT_EXIT)

    # -- inside ------------------------------------------------------------------------------------

    def _exchange(self, peer: int, mine: Tensor, theirs: Tensor) -> None:
        """Give a tensor to a rank and get its own; both contiguous."""
        sent = self._begun(self._group.send, _flat(mine), peer)
        self._finish(self._begun(self._group.recv, _flat(theirs), peer))
        self._finish(sent)

    def _swap(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """Give a tensor to each of the others, and get one of each; of no numbers, none travels."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        flat = {peer: _flat(given[peer]) for peer in others}
        sent = [
            self._begun(self._group.send, flat[peer], peer) for peer in others if flat[peer].numel()
        ]
        for peer in others:
            if taken[peer].numel():
                self._finish(self._begun(self._group.recv, _flat(taken[peer]), peer))
        for work in sent:
            self._finish(work)

    def _begun(self, call: Any, x: Tensor, peer: int, tag: int = 0) -> Any:
        try:
            return call([x], peer, tag)
        except RuntimeError as problem:
            raise self._lost(problem) from problem

    def _finish(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as problem:
            raise self._lost(problem) from problem

    def _lost(self, problem: RuntimeError) -> RankLost:
        return RankLost(
            f"rank {self.rank} of a group of {self.size} waited for another: {first_line(problem)}"
        )

    def _launched(
        self, call: Callable[[], Any], tensor: Tensor, deadline: Deadline, what: str
    ) -> Any:
        """A collective that was begun; on CUDA the tensor is held until it is done, or the group
        has ended.
        """

        def on_device() -> Any:
            with torch.cuda.device(self.device):
                return call()

        try:
            # the first one makes the communicator, and waits for all ranks without a limit
            if self._is_new:
                work = before(deadline, on_device, "a rank of the group")
                self._is_new = False
            else:
                work = call()
        except RuntimeError as problem:
            raise WeightTransferError(f"{what} cannot travel: {first_line(problem)}") from problem
        if self.device.type == "cuda":
            self._travelling[id(work)] = work, tensor
        return work

    def _require(self) -> Any:
        if self._group is None:
            raise WeightTransferError("the group of trainer and engines was closed.")
        return self._group


def make_backend(
    backend: str,
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    limit: timedelta,
    host: str,
    *,
    survives: bool,
) -> Any:
    """Torch's "gloo" or "nccl", whose ranks meet in `store`. Raises `RuntimeError` if they do not
    come in time.

    Args:
        host: this machine's address, for gloo.
        survives: a fault of NCCL is an error of its collectives, for those that ask each whether it
            has failed; else torch's watchdog ends the process.
    """
    if backend == "nccl":
        settings = dist.ProcessGroupNCCL.Options()
        settings._timeout = limit
        with _surviving_faults() if survives else nullcontext(), torch.cuda.device(device):
            return dist.ProcessGroupNCCL(store, rank, size, settings)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


# Left to itself, torch's watchdog ends the whole process when a peer is gone or a collective is
# late, and another thread does when the watchdog itself hangs. 2: it ends the group, and says so to
# the threads that wait. Read as one is made.
_SURVIVING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_settings_lock = threading.Lock()


@contextmanager
def _surviving_faults() -> Iterator[None]:
    """A fault of a group of NCCL that is made in here is an error of its collectives, and not the
    end of the process.
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


def _flat(x: Tensor) -> Tensor:
    """The bytes of a tensor: gloo does not know every dtype. A view, if it is contiguous."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _let_go(holder: list[Any]) -> None:
    try:
        if holder[0] is not None:
            holder[0].abort()
    except RuntimeError as problem:  # of a device that has failed; there is nothing left to end
        logger.warning("a process group did not end in order: %s", first_line(problem))
    finally:
        holder.clear()


def first_line(problem: Exception) -> str:
    """What went wrong, without the place in torch's own sources and the keys of its store."""
    lines = re.sub(r"^\[/[^\]]*\]\s*|, keys: \S+", "", str(problem).strip()).splitlines()
    return lines[0].rstrip(".") if lines else type(problem).__name__
