"""CPU seconds of this process and of others with all that they started."""

import time
from collections.abc import Mapping

import psutil


class CpuMeter:
    """CPU seconds of this process as "client", and of process trees by name. A tree ends where
    another one begins.
    """

    def __init__(self, watched: Mapping[str, int]) -> None:
        self._watched = dict(watched)

    def read(self) -> dict[str, float]:
        roots = set(self._watched.values())
        seen = {"client": time.process_time()}
        for name, pid in self._watched.items():
            seen[name] = sum(cpu_seconds(each) for each in tree(pid, roots - {pid}))
        return seen


def tree(pid: int, without: set[int]) -> list[int]:
    """A process and all below it, but not those in `without` nor what is below them."""
    try:
        below = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return [pid]
    return [
        pid,
        *(
            found
            for child in below
            if child.pid not in without
            for found in tree(child.pid, without)
        ),
    ]


def cpu_seconds(pid: int) -> float:
    """Of a process and of its children that have ended; 0 for one that is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def server_parts(pid: int) -> dict[str, int]:
    """`api`: the server's first process. `engine`: its busiest child with all below it, where it
    has one.
    """
    try:
        below = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        below = []
    busiest = max(below, key=lambda child: child.memory_info().rss, default=None)
    return {"api": pid} | ({"engine": busiest.pid} if busiest is not None else {})
