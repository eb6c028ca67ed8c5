"""Process groups tested with ranks as threads, which gloo allows."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed

from nano_inference.errors import RankLost
from nano_inference.parallel.process_group import ProcessGroup
from tests.parallel.thread_group import ThreadGroup

dist: Any = torch.distributed
CPU = torch.device("cpu")


def of_processes(size: int, patience: float = 10.0) -> list[Callable[[], ProcessGroup]]:
    store = dist.HashStore()
    return [
        lambda rank=rank: ProcessGroup.meet(store, rank, size, CPU, patience)
        for rank in range(size)
    ]


def of_threads(size: int, patience: float = 10.0) -> list[Callable[[], ProcessGroup]]:
    return [lambda group=group: group for group in ThreadGroup.make(size, patience)]


def together(
    makers: list[Callable[[], ProcessGroup]], run: Callable[[ProcessGroup], Any]
) -> list[Any]:
    """Return each rank's result or exception."""
    results: list[Any] = [None] * len(makers)

    def one(rank: int) -> None:
        try:
            group = makers[rank]()
            results[rank] = run(group)
        except Exception as problem:
            results[rank] = problem

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(makers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("make", [of_threads, of_processes])
@pytest.mark.parametrize("size", [2, 4])
def test_collectives(make: Callable[[int], list[Callable[[], ProcessGroup]]], size: int) -> None:
    shards = [
        torch.randn((3, 5), generator=torch.Generator().manual_seed(rank)) for rank in range(size)
    ]

    def run(group: ProcessGroup) -> Any:
        mine = shards[group.rank]
        gathered = group.all_gather(mine.to(torch.bfloat16))
        total = group.tree_sum(mine)
        parts = [torch.full((peer % 2 * 2, 2), 10 * group.rank + peer) for peer in range(size)]
        parts[group.rank] = torch.empty((0, 2), dtype=torch.int64)
        turned = group.all_to_all(parts)
        group.send(mine, (group.rank + 1) % size)
        group.send(mine + 1, (group.rank + 1) % size)
        before = [group.receive((3, 5), torch.float32, (group.rank - 1) % size) for _ in range(2)]
        group.barrier()
        return gathered, total, turned, before

    results = together(make(size), run)
    assert not [each for each in results if isinstance(each, Exception)]
    for rank, (gathered, total, turned, before) in enumerate(results):
        assert all(
            torch.equal(each, one.to(torch.bfloat16))
            for each, one in zip(gathered, shards, strict=True)
        )
        pairs = [shards[place] + shards[place + 1] for place in range(0, size, 2)]
        assert torch.equal(total, pairs[0] if size == 2 else pairs[0] + pairs[1])
        for peer, part in enumerate(turned):
            rows = 0 if peer == rank else rank % 2 * 2
            assert torch.equal(part, torch.full((rows, 2), 10 * peer + rank))
        assert torch.equal(before[0], shards[rank - 1])
        assert torch.equal(before[1], shards[rank - 1] + 1)


def test_collective_times_out_with_an_error() -> None:
    def run(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.tree_sum(torch.zeros(3))

    results = together(of_processes(2, 2.0), run)  # in which they connect
    assert isinstance(results[0], RankLost)
    assert "rank 0 of a group of 2 waited for another" in str(results[0])


def test_missing_ranks_are_reported() -> None:
    results = together(of_processes(2, 0.5)[:1], lambda group: group.barrier())
    assert isinstance(results[0], RankLost)
    assert "did not meet" in str(results[0])


def test_group_can_be_closed_twice() -> None:
    def run(group: ProcessGroup) -> None:
        group.close()
        group.close()

    assert together(of_processes(2), run) == [None, None]
    for thread in threading.enumerate():
        if thread.name == "end of a group":
            thread.join(10)  # one message is a warning and the other an error
