"""`ThreadGroup`: a process group whose ranks are threads of one process."""

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from nano_inference.errors import RankLost
from nano_inference.parallel.process_group import PATIENCE, ProcessGroup
from nano_inference.parallel.segments import tree_sum


class ThreadGroup(ProcessGroup):
    """A process group whose ranks are threads."""

    def __init__(self, meeting: "_Meeting", rank: int) -> None:
        self.size, self.rank = meeting.size, rank
        self._meeting = meeting

    @classmethod
    def make(cls, size: int, patience: float = PATIENCE) -> "list[ThreadGroup]":
        """Return one group per thread, in rank order."""
        meeting = _Meeting(size, patience)
        return [cls(meeting, rank) for rank in range(size)]

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._meeting.exchange(self.rank, x.clone())

    def tree_sum(self, x: Tensor) -> Tensor:
        return tree_sum(self.all_gather(x))

    def all_to_all(
        self, parts: Sequence[Tensor], counts: Sequence[int] | None = None
    ) -> list[Tensor]:
        sent = self._meeting.exchange(self.rank, [part.clone() for part in parts])
        parts_received = [each[self.rank] for each in sent]
        if counts is not None and [len(each) for each in parts_received] != list(counts):
            raise ValueError(
                f"ranks gave {[len(each) for each in parts_received]}, expected {list(counts)}."
            )
        return parts_received

    def send(self, x: Tensor, peer: int) -> None:
        self._meeting.put(self.rank, peer, x.clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Tensor:
        tensor = self._meeting.take(peer, self.rank)
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise ValueError(
                f"rank {peer} sent {tensor.dtype} {list(tensor.shape)}, expected {dtype} "
                f"{list(shape)}."
            )
        return tensor

    def barrier(self) -> None:
        self._meeting.exchange(self.rank, None)

    def close(self) -> None:
        self._meeting.abandon(self.rank)


class _Meeting:
    """State shared by the threads of a group."""

    def __init__(self, size: int, patience: float) -> None:
        self.size = size
        self._patience = patience
        self._changed = threading.Condition()
        self._gone: int | None = None
        self._brought: dict[int, object] = {}  # tensors of the current exchange, by rank
        self._done: list = []  # tensors of the last exchange
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
        """Wait until the condition holds."""
        there = self._changed.wait_for(lambda: holds() or self._gone is not None, self._patience)
        if not holds():
            who = f"rank {self._gone} has left" if self._gone is not None else "a rank did not come"
            when = "" if there else f" within {self._patience:g} s"
            raise RankLost(f"{who}{when}; rank {rank} of {self.size} waited for it.")
