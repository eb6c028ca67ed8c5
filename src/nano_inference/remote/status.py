"""State of replicas for metrics and routes."""

import bisect
from dataclasses import dataclass
from typing import Literal, Protocol

from nano_inference.types import Memory

State = Literal["starting", "syncing", "serving", "draining", "dead"]


# upper bounds in seconds of the histogram of pauses of moved requests
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class MoveCounts:
    """Counts of requests that moved to another replica, including those moved by draining.

    Attributes:
        moved: Number of moved requests.
        counts: Number of pauses per bucket of `BUCKETS`; the last one counts longer pauses.
        seconds: Sum of all pauses.
        longest: Longest pause in seconds.
    """

    def __init__(self) -> None:
        self.moved = 0
        self.counts = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0
        self.longest = 0.0

    def paused(self, seconds: float) -> None:
        """Count a pause that a client saw."""
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


@dataclass(frozen=True)
class ReplicaStatus:
    """Snapshot of a `Replica`. `waiting` and `running` count samples as the router does.
    `weight_version` and `pid` are None unless the replica serves.
    """

    name: str
    state: State
    waiting: int
    running: int
    weight_version: int | None
    num_starts: int
    pid: int | None
    why: str


@dataclass(frozen=True)
class FleetReport:
    """Snapshot of a fleet.

    Attributes:
        weight_version: Weight version that all replicas serve.
        paused: True if a call paused the fleet.
        asleep: Parts of the memory that were released.
        replicas: State of each replica.
        deaths: Number of replicas that died after they were built.
        moves: Counts of requests that moved.
    """

    weight_version: int
    paused: bool
    asleep: tuple[Memory, ...]
    replicas: tuple[ReplicaStatus, ...]
    deaths: int
    moves: MoveCounts


class ManagedReplicas(Protocol):
    """Replicas that can be added and removed by name, as in `FleetClient`."""

    def replica_report(self) -> FleetReport: ...

    async def add(self) -> str: ...

    def drain(self, replica: str, *, move: bool = False, draining: bool = True) -> int: ...

    async def remove(self, replica: str) -> int: ...
