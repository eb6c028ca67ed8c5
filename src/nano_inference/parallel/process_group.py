"""`ProcessGroup`: processes that communicate by gloo or NCCL: an engine's ranks, or a trainer and
its engines.

The class uses torch's public classes: a store, and the backend (`ProcessGroupGloo`,
`ProcessGroupNCCL`), which needs no default group and registers nothing. So it is independent of
other groups in the process, and does not need the private `_new_process_group_helper`.
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
AT_EXIT = 5.0  # seconds that an exiting process waits for its groups to end
MOST_SENDING = 16  # tensors in transit to one rank
LOOK = 0.1  # seconds between two checks that the trainer is alive
# added to a deadline for the backend's timeout, because the waiting thread has a better message
LATER = timedelta(seconds=1)

dist: Any = torch.distributed  # its stubs lack much of what it exports


class ProcessGroup:
    """Ranks of a process group, including this one.

    Tensors are exchanged on the CPU with gloo and on the GPU with NCCL. All ranks call the same
    collectives in the same order.

    The ranks of an engine wait for each other for at most `patience`, and failures raise
    `RankLost`. Between two processes, gloo's point-to-point messages take a fourth of the time of
    its collectives, so collectives are implemented with messages. With gloo, this class detects a
    lost rank. NCCL's collectives are queued on the current stream, so the thread that waits for the
    device detects a lost rank.

    A trainer (rank 0) and its engines give each wait a `Deadline`, and failures raise
    `WeightTransferError`.

    Args:
        group: Backend or process group of `dist`.
        device: Device of exchanged tensors.
        rank, size: This rank, and the number of ranks.
        alive: Function that raises if the trainer is gone. Called repeatedly during a collective
            with a deadline.
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
        # sends in progress by peer, the oldest first
        self._sending: dict[int, deque[tuple[Any, Tensor]]] = {}
        self._is_new = device.type == "cuda"  # NCCL has not connected yet
        self._travelling: dict[int, tuple[Any, Tensor]] = {}  # on CUDA, by id of the work

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
        """Connect the ranks of an engine.

        Args:
            store: Store of `torch.distributed` for the ranks of this group only.
            rank, size: This rank, and the number of ranks.
            device: Device of exchanged tensors.
            patience: Timeout of each wait for another rank in seconds.
            host: Address of this machine for the other ranks; used by gloo.

        Raises `RankLost` if the others do not connect in time.
        """
        backend, limit = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=patience)
        try:
            store.set_timeout(limit)
            # a lost rank ends the engine, so torch's watchdog may end the process first
            group = make_backend(
                backend, store, rank, size, device, limit, host or "127.0.0.1", survives=False
            )
            made = cls(group, device, rank, size)
            if backend == "gloo":
                made.barrier()  # gloo connects on first use, NCCL in its constructor
        except RuntimeError as problem:
            raise RankLost(
                f"the ranks of a group of {size} did not meet: {first_line(problem)}"
            ) from problem
        return made

    # -- the ranks of an engine --------------------------------------------------------------------

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in order. All have the same shape and dtype."""
        if self.device.type == "cuda":
            out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
            self._group._allgather_base(out, x.contiguous()).wait()
            return list(out)
        tensors = [x if peer == self.rank else torch.empty_like(x) for peer in range(self.size)]
        self._swap([x] * self.size, tensors)
        return tensors

    def tree_sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' float32 tensors, neighbors first (`segments.tree_sum`).

        All ranks get the same bits. The number of ranks must be a power of two.
        """
        if self.device.type == "cuda":
            return tree_sum(self.all_gather(x))
        total, step = x.to(torch.float32).contiguous(), 1
        # each rank exchanges its partial sum with the neighboring group of `step` ranks
        while step < self.size:
            theirs = torch.empty_like(total)
            self._exchange(self.rank ^ step, total, theirs)
            total = total + theirs  # addition is commutative bit for bit
            step *= 2
        return total

    def all_to_all(
        self, parts: Sequence[Tensor], counts: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Send part i to rank i, and return the parts from all ranks in order.

        All parts are [n, ...] with the same dtype and trailing shape. `counts` holds n of the part
        from each rank, if known. Otherwise the counts are exchanged first.
        """
        if counts is None:
            lengths = torch.tensor([len(part) for part in parts], device=self.device)
            counts = [int(each[self.rank]) for each in self.all_gather(lengths)]
        like = parts[self.rank]
        received = [
            part
            if peer == self.rank
            else torch.empty((count, *like.shape[1:]), dtype=like.dtype, device=like.device)
            for peer, (part, count) in enumerate(zip(parts, counts, strict=True))
        ]
        if self.device.type == "cuda":
            self._group.alltoall(received, [part.contiguous() for part in parts]).wait()
        else:
            self._swap(parts, received)
        return received

    def send(self, x: Tensor, peer: int) -> None:
        """Send a tensor to a rank, possibly returning before it arrives.

        Do not modify the tensor afterwards.
        """
        sending = self._sending.setdefault(peer, deque())
        if len(sending) == MOST_SENDING:  # gloo sends only once the peer receives
            self._finish(sending.popleft()[0])
        x = _flat(x)
        sending.append((self._begun(self._group.send, x, peer, tag=1), x))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Tensor:
        """Return the next tensor from a rank."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._finish(self._begun(self._group.recv, _flat(tensor), peer, tag=1))
        return tensor

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # -- a trainer and its engines -----------------------------------------------------------------

    def broadcast(self, tensor: Tensor, deadline: Deadline, what: str) -> None:
        """Copy the trainer's tensor to all ranks. `what` names it in error messages."""
        self.wait([self.begin_broadcast(tensor, deadline, what)], what, deadline)

    def begin_broadcast(self, tensor: Tensor, deadline: Deadline, what: str) -> Any:
        """Start a broadcast without waiting. Pass the result to `wait`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, deadline.remaining() + LATER
        group = self._require()
        return self._launched(lambda: group.broadcast([tensor], options), tensor, deadline, what)

    def agree(self, accepted: bool, deadline: Deadline, what: str) -> bool:
        """Return True if every rank accepts."""
        flag = torch.tensor([int(accepted)], dtype=torch.int32, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.MIN, deadline.remaining() + LATER
        group = self._require()
        work = self._launched(lambda: group.allreduce([flag], options), flag, deadline, what)
        self.wait([work], what, deadline)
        return bool(flag.item())

    def wait(self, works: Iterable[Any], what: str, deadline: Deadline) -> None:
        """Wait for collectives.

        Raises `WeightTransferError` at the deadline, or if the other side is gone.
        """
        try:
            for work in works:
                while not _completed(work, self.device):
                    deadline.check(f"{what} did not arrive")
                    alive = self._alive
                    if alive is not None:
                        alive()
                self._travelling.pop(id(work), None)
        except RuntimeError as problem:
            raise WeightTransferError(
                f"{what} did not arrive, the other side is gone: {first_line(problem)}"
            ) from problem

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the group. Collectives in progress fail on every rank, without a wait here."""
        if self._group is None:
            return
        # Hold the memory that NCCL may still write to until the group has ended.
        holder = [self._group, self._travelling]
        self._group, self._alive, self._sending, self._travelling = None, None, {}, {}
        # Release the last reference on a separate thread: the destructor waits for the backend's
        # threads, which may be in a collective until its timeout.
        end = threading.Thread(target=_let_go, args=(holder,), name="end of a group", daemon=True)
        end.start()
        # an interrupted destructor would abort the process
        atexit.register(end.join, AT_EXIT)

    # -- inside ------------------------------------------------------------------------------------

    def _exchange(self, peer: int, mine: Tensor, theirs: Tensor) -> None:
        """Exchange contiguous tensors with a rank."""
        sent = self._begun(self._group.send, _flat(mine), peer)
        self._finish(self._begun(self._group.recv, _flat(theirs), peer))
        self._finish(sent)

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Exchange a tensor with each of the other ranks. Empty tensors are not sent."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        flat = {peer: _flat(outgoing[peer]) for peer in others}
        sent = [
            self._begun(self._group.send, flat[peer], peer) for peer in others if flat[peer].numel()
        ]
        for peer in others:
            if incoming[peer].numel():
                self._finish(self._begun(self._group.recv, _flat(incoming[peer]), peer))
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
        """Start a collective.

        On CUDA its tensor is held until the collective or the group has ended.
        """

        def on_device() -> Any:
            with torch.cuda.device(self.device):
                return call()

        try:
            # the first collective creates the communicator, which waits for all ranks without limit
            if self._is_new:
                work = before(deadline, on_device, "a rank of the group")
                self._is_new = False
            else:
                work = call()
        except RuntimeError as problem:
            raise WeightTransferError(f"{what} cannot be sent: {first_line(problem)}") from problem
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
    """Create torch's "gloo" or "nccl" backend, whose ranks connect through `store`.

    Raises `RuntimeError` if they do not connect in time.

    Args:
        host: Address of this machine, for gloo.
        survives: True to report a fault of NCCL as an error of its collectives, for callers that
            poll them. Otherwise torch's watchdog ends the process.
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


# By default, torch's watchdog ends the whole process if a peer is gone or a collective is late, and
# another thread does so if the watchdog itself hangs. With 2, the watchdog ends the group and
# reports an error to waiting threads. torch reads these variables when it creates a group.
_SURVIVING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_settings_lock = threading.Lock()


@contextmanager
def _surviving_faults() -> Iterator[None]:
    """Make faults of NCCL groups created within this context errors of their collectives."""
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
    """Return True if a collective finishes within `LOOK` seconds. Raises the collective's error."""
    if device.type == "cpu":
        try:
            work.wait(timedelta(seconds=LOOK))
        except RuntimeError:
            if not work.is_completed():  # not failed, only late
                return False
            # raises the collective's error, unless only the wait above had timed out
            work.wait()
        return True
    until = time.monotonic() + LOOK  # on a device, `wait` would only block the stream
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(1e-4)
    if not work.is_completed():
        return False
    with torch.cuda.device(device):
        return work.wait()  # raises the collective's error


def _flat(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, because gloo does not support every dtype.

    The bytes of a contiguous tensor are a view.
    """
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _let_go(holder: list[Any]) -> None:
    try:
        if holder[0] is not None:
            holder[0].abort()
    except RuntimeError as problem:  # the device has failed, so there is nothing left to end
        logger.warning("aborting a process group failed: %s", first_line(problem))
    finally:
        holder.clear()


def first_line(problem: Exception) -> str:
    """Return the first line of an error, without source locations and store keys of torch."""
    lines = re.sub(r"^\[/[^\]]*\]\s*|, keys: \S+", "", str(problem).strip()).splitlines()
    return lines[0].rstrip(".") if lines else type(problem).__name__
