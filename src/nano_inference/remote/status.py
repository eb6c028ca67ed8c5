"""The state of replicas, as metrics and routes show it."""

import bisect
from dataclasses import dataclass
from typing import Literal, Protocol

from nano_inference.types import Memory

State = Literal["starting", "syncing", "serving", "draining", "dead"]


# seconds; pauses of moved requests are counted by them
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class MoveCounts:
    """Counts of requests that moved to another replica, those of drained replicas included.

    Attributes:
        moved: requests.
        counts: pauses that clients saw, by `BUCKETS` and beyond the last.
        seconds: sum of all pauses.
        longest: the longest pause, in seconds.
    """

    def __init__(self) -> None:
        self.moved = 0
        self.counts = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0
        self.longest = 0.0

    def paused(self, seconds: float) -> None:
        """Count the pause of a client."""
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


@dataclass(frozen=True)
class ReplicaStatus:
    """A `Replica` as it is shown; `waiting` and `running` are samples, as the router counts them.
    `weight_version` and `pid` are None where it does not serve.
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
    """The state of a fleet.

    Attributes:
        weight_version: that all replicas serve.
        paused: whether the fleet was paused by a call.
        asleep: parts of the memory that were given back.
        replicas: the state of each.
        deaths: replicas that died after they were built.
        moves: counts of requests that moved.
    """

    weight_version: int
    paused: bool
    asleep: tuple[Memory, ...]
    replicas: tuple[ReplicaStatus, ...]
    deaths: int
    moves: MoveCounts


class ManagedReplicas(Protocol):
    """Replicas that can be added and removed by name; see `FleetClient`."""

    def replica_report(self) -> FleetReport: ...

    async def add(self) -> str: ...

    def drain(self, replica: str, *, move: bool = False, draining: bool = True) -> int: ...

    async def remove(self, replica: str) -> int: ...
