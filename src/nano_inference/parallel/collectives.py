"""`Group`: what ranks can do together. `ThreadGroup`: ranks that are threads of one process, for
tests and to read. `ProcessGroup`: ranks that are processes, over gloo or NCCL.
"""

import atexit
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from nano_inference.errors import RankLost
from nano_inference.parallel.segments import tree_sum

PATIENCE = 60.0  # seconds that a rank waits for the others
AT_EXIT = 5.0  # seconds that a process waits for its groups to end
MOST_SENDING = 16  # tensors that are on their way to one rank

dist: Any = torch.distributed  # its stubs lack much of what it exports


class Group(Protocol):
    """Some ranks, this one among them. Every wait ends at the group's deadline, with `RankLost`.

    All ranks call the same collectives in the same order.
    """

    size: int
    rank: int

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Everybody's tensor, by rank; all of one shape and dtype."""
        ...

    def tree_sum(self, x: Tensor) -> Tensor:
        """The sum of everybody's float32 tensor, neighbours first (`segments.tree_sum`): the same
        bits on every rank.

        The number of ranks is a power of two.
        """
        ...

    def all_to_all(
        self, parts: Sequence[Tensor], counts: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Give part i to rank i, and get what each rank has for this one, by rank. All are [n, ...]
        of one dtype and of one shape but for n, which the receiver need not know. `counts`: n of
        what each rank gives, where all know it.
        """
        ...

    def send(self, x: Tensor, peer: int) -> None:
        """Give a tensor to a rank; may return before it has arrived. The tensor is not written to
        afterwards.
        """
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Tensor:
        """The next tensor that a rank sent."""
        ...

    def barrier(self) -> None:
        """Wait until everybody is here."""
        ...

    def close(self) -> None:
        """Leave. Whoever waits for this rank is told."""
        ...


class ThreadGroup:
    """Ranks that are threads of one process."""

    def __init__(self, meeting: "_Meeting", rank: int) -> None:
        self.size, self.rank = meeting.size, rank
        self._meeting = meeting

    @classmethod
    def make(cls, size: int, patience: float = PATIENCE) -> "list[ThreadGroup]":
        """A group, by rank: one for each thread."""
        meeting = _Meeting(size, patience)
        return [cls(meeting, rank) for rank in range(size)]

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `Group`."""
        return self._meeting.exchange(self.rank, x.clone())

    def tree_sum(self, x: Tensor) -> Tensor:
        """See `Group`."""
        return tree_sum(self.all_gather(x))

    def all_to_all(
        self, parts: Sequence[Tensor], counts: Sequence[int] | None = None
    ) -> list[Tensor]:
        """See `Group`."""
        given = self._meeting.exchange(self.rank, [part.clone() for part in parts])
        found = [each[self.rank] for each in given]
        if counts is not None and [len(each) for each in found] != list(counts):
            raise ValueError(
                f"ranks gave {[len(each) for each in found]}, expected {list(counts)}."
            )
        return found

    def send(self, x: Tensor, peer: int) -> None:
        """See `Group`."""
        self._meeting.put(self.rank, peer, x.clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Tensor:
        """See `Group`."""
        found = self._meeting.take(peer, self.rank)
        if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
            raise ValueError(
                f"rank {peer} sent {found.dtype} {list(found.shape)}, expected {dtype} "
                f"{list(shape)}."
            )
        return found

    def barrier(self) -> None:
        """See `Group`."""
        self._meeting.exchange(self.rank, None)

    def close(self) -> None:
        """See `Group`."""
        self._meeting.abandon(self.rank)


class _Meeting:
    """What the threads of a group share."""

    def __init__(self, size: int, patience: float) -> None:
        self.size = size
        self._patience = patience
        self._changed = threading.Condition()
        self._gone: int | None = None
        self._brought: dict[int, object] = {}  # of the exchange that goes on, by rank
        self._done: list = []  # of the last one
        self._round = 0
        self._sent: dict[tuple[int, int], deque[Tensor]] = {}

    def exchange(self, rank: int, mine: object) -> list:
        with self._changed:
            self._require(lambda: rank not in self._brought, rank)
            self._brought[rank] = mine
            mine_is = self._round
            if len(self._brought) == self.size:
                self._done = [self._brought[each] for each in range(self.size)]
                self._brought, self._round = {}, self._round + 1
                self._changed.notify_all()
            self._require(lambda: self._round > mine_is, rank)
            return list(self._done)

    def put(self, source: int, target: int, x: Tensor) -> None:
        with self._changed:
            self._sent.setdefault((source, target), deque()).append(x)
            self._changed.notify_all()

    def take(self, source: int, target: int) -> Tensor:
        with self._changed:
            self._require(lambda: bool(self._sent.get((source, target))), target)
            return self._sent[source, target].popleft()

    def abandon(self, rank: int) -> None:
        with self._changed:
            self._gone = rank
            self._changed.notify_all()

    def _require(self, holds, rank: int) -> None:
        """Wait until it does."""
        there = self._changed.wait_for(lambda: holds() or self._gone is not None, self._patience)
        if not holds():
            who = f"rank {self._gone} has left" if self._gone is not None else "a rank did not come"
            when = "" if there else f" within {self._patience:g} s"
            raise RankLost(f"{who}{when}; rank {rank} of {self.size} waited for it.")


class ProcessGroup:
    """Ranks that are processes. What travels lies on the CPU with gloo, on the card with NCCL.

    Between two processes gloo's plain messages take a fourth of the time that its collectives do,
    so those are made of messages here. NCCL's collectives are queued on the current stream, and a
    rank that is gone is seen by whoever waits for the device; the waits of gloo end here.

    Args:
        store: of `torch.distributed`, in which the ranks of this group alone meet.
        rank, size: this one, of how many.
        device: where tensors lie that travel.
        patience: seconds that one waits for another.
        host: the address of this machine that the others reach; for gloo.

    Raises `RankLost` if the others do not come in time.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        patience: float = PATIENCE,
        host: str = "",
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._patience = patience
        # what `send` has begun, by peer: the oldest first
        self._sending: dict[int, deque[tuple[Any, Tensor]]] = {}
        try:
            self._group: Any = self._made(store, host)
            if device.type != "cuda":
                self.barrier()  # gloo connects as it is first used; NCCL has met in its constructor
        except RuntimeError as problem:
            raise RankLost(
                f"the ranks of a group of {size} did not meet: {_first_line(problem)}"
            ) from problem

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `Group`."""
        if self.device.type == "cuda":
            out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
            self._group._allgather_base(out, x.contiguous()).wait()
            return list(out)
        found = [x if peer == self.rank else torch.empty_like(x) for peer in range(self.size)]
        self._swap([x] * self.size, found)
        return found

    def tree_sum(self, x: Tensor) -> Tensor:
        """See `Group`."""
        if self.device.type == "cuda":
            return tree_sum(self.all_gather(x))
        total, step = x.to(torch.float32).contiguous(), 1
        # who holds the sum of so many neighbours meets who holds that of the next ones
        while step < self.size:
            theirs = torch.empty_like(total)
            self._exchange(self.rank ^ step, total, theirs)
            total = total + theirs  # in either order: the same bits
            step *= 2
        return total

    def all_to_all(
        self, parts: Sequence[Tensor], counts: Sequence[int] | None = None
    ) -> list[Tensor]:
        """See `Group`."""
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
        """See `Group`."""
        sending = self._sending.setdefault(peer, deque())
        if len(sending) == MOST_SENDING:  # gloo sends nothing before it is received
            self._finish(sending.popleft()[0])
        x = _flat(x)
        sending.append((self._begun(self._group.send, x, peer, tag=1), x))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Tensor:
        """See `Group`."""
        found = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._finish(self._begun(self._group.recv, _flat(found), peer, tag=1))
        return found

    def barrier(self) -> None:
        """See `Group`."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """See `Group`."""
        if self._group is None:
            return
        # The last reference goes on a thread of its own: the destructor waits for the backend's
        # threads, which may be in a collective until its own deadline.
        holder, self._group, self._sending = [self._group], None, {}
        end = threading.Thread(target=_let_go, args=(holder,), name="end of a group", daemon=True)
        end.start()
        # a destructor that is cut off in the middle would abort the process
        atexit.register(end.join, AT_EXIT)

    def _made(self, store: Any, host: str) -> Any:
        patience = timedelta(seconds=self._patience)
        store.set_timeout(patience)
        if self.device.type == "cuda":
            settings = dist.ProcessGroupNCCL.Options()
            settings._timeout = patience
            with torch.cuda.device(self.device):
                return dist.ProcessGroupNCCL(store, self.rank, self.size, settings)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = patience
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host or "127.0.0.1")]
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

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
            f"rank {self.rank} of a group of {self.size} waited for another: {_first_line(problem)}"
        )


def _flat(x: Tensor) -> Tensor:
    """The bytes of a tensor: gloo does not know every dtype. A view, if it is contiguous."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _let_go(holder: list[Any]) -> None:
    with suppress(RuntimeError):  # of a device that has failed; there is nothing left to end
        holder[0].abort()
    holder.clear()


def _first_line(problem: Exception) -> str:
    """What went wrong, without the place in torch's own sources."""
    lines = str(problem).strip().splitlines()
    return lines[0].rpartition("] ")[2].rstrip(".") if lines else type(problem).__name__
