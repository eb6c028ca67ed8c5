"""The state of replicas, as metrics and routes show it."""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Literal, Protocol

State = Literal["starting", "syncing", "serving", "draining", "dead"]


class MoveCounts(Protocol):
    """Counts of requests that moved to another replica.

    Attributes:
        deaths: replicas that died.
        moved: moved requests, those of drained replicas included.
        counts: pauses that clients saw, by `failover.BUCKETS` and beyond the last.
        seconds: sum of all pauses.
        longest: the longest pause, in seconds.
        waiting: requests without an output since their move.
    """

    deaths: int
    moved: int
    counts: list[int]
    seconds: float
    longest: float

    @property
    def waiting(self) -> Sized: ...


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
