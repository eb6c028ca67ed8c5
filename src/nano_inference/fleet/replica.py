"""`Replica`: one place of a fleet, and the events that a supervisor reports."""

from dataclasses import dataclass, field

from nano_inference.remote import time_limits
from nano_inference.remote.client import EngineClient
from nano_inference.remote.messages import EngineInfo
from nano_inference.remote.status import State

_MOST_DOUBLINGS = 10  # by then it is the longest


@dataclass
class Backoff:
    """Of one place: when its engine was ready, and how many in a row did not last. Reads no
    clock.
    """

    _num_short: int = 0
    _ready_at: float | None = None

    def ready(self, now: float) -> None:
        """An engine serves, since this second of a monotonic clock."""
        self._ready_at = now

    def died(self, now: float) -> float:
        """It has died, or was never ready; returns seconds to wait before the next one is
        started.
        """
        lasted = self._ready_at is not None and now - self._ready_at > time_limits.LASTING
        self._num_short = 0 if lasted else self._num_short + 1
        self._ready_at = None
        doublings = min(max(0, self._num_short - 1), _MOST_DOUBLINGS)
        return min(time_limits.FIRST_RESTART * 2**doublings, time_limits.LONGEST_RESTART)


# starting: it is built; syncing: it is brought to what the others have; serving; draining: it takes
# nothing new; dead: it has died, and maybe another one will take its place.
@dataclass(eq=False)
class Replica:
    """One engine.

    Attributes:
        name: of its place in the fleet; a new engine that takes the place of a dead one has it too.
        client: of the engine.
        num_starts: engines that had this place.
        backoff: how long the next one waits.
        why: the reason for its state, where there is one worth telling.
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


@dataclass(frozen=True, slots=True)
class Opened:
    """A first replica serves.

    Attributes:
        info: of its engine.
        again: all replicas had died before.
    """

    info: EngineInfo
    again: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """No replica is left.

    Attributes:
        why: the reason.
        public: the reason as strangers may hear it.
        coming: another replica is being built.
    """

    why: str
    public: str
    coming: bool


@dataclass(frozen=True, slots=True)
class Left:
    """A replica does not serve any more; others are to resume its requests."""

    client: EngineClient


@dataclass(frozen=True, slots=True)
class Changed:
    """Other replicas serve than before, or they have reported."""


FleetEvent = Opened | Lost | Left | Changed
