"""`Replica`: one engine of a fleet, what is told of it, and whom the fleet's roster tells."""

import bisect
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nano_inference.serving.backoff import Backoff
from nano_inference.serving.client import EngineClient
from nano_inference.serving.messages import EngineInfo

# starting: it is built; syncing: it is brought to what the others have; serving; draining: it takes
# nothing new; dead: it has died, and maybe another one will take its place.
State = Literal["starting", "syncing", "serving", "draining", "dead"]

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(eq=False)
class Replica:
    """One engine.

    Attributes:
        name: of its place in the fleet; a new engine that takes the place of a dead one has it too.
        client: of the engine.
        num_starts: engines that had this place.
        backoff: how long the next one waits.
        why: in what state it is for a reason that is worth telling.
    """

    name: str
    client: EngineClient
    state: State = "starting"
    num_starts: int = 1
    backoff: Backoff = field(default_factory=Backoff)
    why: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether it takes part in what the fleet does."""
        return self.state in ("serving", "draining") and self.client.why_dead is None


@dataclass(frozen=True)
class ReplicaStatus:
    """What is told of a replica: see `Replica`; `waiting` and `running` are samples, as the router
    counts them. `weight_version` and `pid` are None where it does not serve.
    """

    name: str
    state: State
    waiting: int
    running: int
    weight_version: int | None
    num_starts: int
    pid: int | None
    why: str


@dataclass
class Failovers:
    """Requests that went on with another replica, and how long their clients saw nothing.

    Attributes:
        deaths: replicas that died.
        moved: requests that were handed on, also by draining.
        counts: pauses, by `BUCKETS` and beyond them.
        seconds: of all pauses.
        longest: of them.
    """

    deaths: int = 0
    moved: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    seconds: float = 0.0
    longest: float = 0.0

    def paused(self, seconds: float) -> None:
        """A client has waited so long."""
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


class Owner(Protocol):
    """Who has the roster, and is told of what becomes of it."""

    def opened(self, info: EngineInfo, again: bool) -> None:
        """A first replica serves; `again`: after all had died."""
        ...

    def lost(self, why: str, public: str, coming: bool) -> None:
        """None is left; `coming`: another one is on its way."""
        ...

    def hand_on(self, client: EngineClient) -> int:
        """Others are to go on with what this one has; returns how many requests that is."""
        ...

    def changed(self) -> None:
        """Other replicas serve than before, or they have reported."""
        ...
