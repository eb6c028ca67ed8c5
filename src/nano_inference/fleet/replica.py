"""`Replica`: one engine of a fleet, and the events that a supervisor reports."""

from dataclasses import dataclass, field

from nano_inference.remote import time_limits
from nano_inference.remote.client import EngineClient
from nano_inference.remote.messages import EngineInfo
from nano_inference.remote.status import State

_MOST_DOUBLINGS = 10  # enough to reach the longest delay


@dataclass
class Backoff:
    """Restart delay of one replica, from the number of engines in a row that died early. Pure: the
    caller passes the time.
    """

    _num_short: int = 0
    _ready_at: float | None = None

    def ready(self, now: float) -> None:
        """Record that an engine serves since `now`, in seconds of a monotonic clock."""
        self._ready_at = now

    def died(self, now: float) -> float:
        """Record that the engine died or was never ready. Return the seconds to wait before the
        next one is started.
        """
        lasted = self._ready_at is not None and now - self._ready_at > time_limits.LASTING
        self._num_short = 0 if lasted else self._num_short + 1
        self._ready_at = None
        doublings = min(max(0, self._num_short - 1), _MOST_DOUBLINGS)
        return min(time_limits.FIRST_RESTART * 2**doublings, time_limits.LONGEST_RESTART)


# States:
# starting: its engine is being built
# syncing: it gets the weights, adapters and pause of the other replicas
# serving
# draining: it accepts no new requests
# dead: its engine has died; a new one may replace it
@dataclass(eq=False)
class Replica:
    """One engine of a fleet, and its successors after a death.

    Attributes:
        name: Name in the fleet. A new engine that replaces a dead one keeps it.
        client: Client of the current engine.
        state: State, as listed above.
        num_starts: Number of engines so far.
        backoff: Restart delay of the next engine.
        why: Reason for the state, or "".
    """

    name: str
    client: EngineClient
    state: State = "starting"
    num_starts: int = 1
    backoff: Backoff = field(default_factory=Backoff)
    why: str = ""

    @property
    def is_alive(self) -> bool:
        """True if the replica takes part in the fleet's operations."""
        return self.state in ("serving", "draining") and self.client.why_dead is None


@dataclass(frozen=True, slots=True)
class Opened:
    """The first replica serves.

    Attributes:
        info: Info of its engine.
        again: True if all replicas had died before.
    """

    info: EngineInfo
    again: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The last replica has stopped serving.

    Attributes:
        why: Reason.
        public: Reason without internal details, for clients.
        coming: True if another replica is being built.
    """

    why: str
    public: str
    coming: bool


@dataclass(frozen=True, slots=True)
class Left:
    """A replica stopped serving, so others must resume its requests."""

    client: EngineClient


@dataclass(frozen=True, slots=True)
class Changed:
    """The set of serving replicas has changed, or their statistics have."""


FleetEvent = Opened | Lost | Left | Changed
