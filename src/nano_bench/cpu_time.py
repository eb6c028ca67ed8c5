"""CPU seconds of this process and of other process trees."""

import time
from collections.abc import Mapping

import psutil


class CpuMeter:
    """Meter of the CPU seconds of this process ("client") and of named process trees. A tree does
    not include another watched tree.
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
    """Return a process and its descendants, except the subtrees of processes in `without`."""
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
    """Return the CPU seconds of a process and its ended children. 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def server_parts(pid: int) -> dict[str, int]:
    """Return the process ids of a server's parts: `pid` as `api`, its largest child as `engine`."""
    try:
        below = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        below = []
    largest = max(below, key=lambda child: child.memory_info().rss, default=None)
    return {"api": pid} | ({"engine": largest.pid} if largest is not None else {})
