"""Whether the server serves: it starts, serves, drains; its engine may stall or die."""

from dataclasses import dataclass
from typing import Literal

from nano_inference.serving.client import EngineClient
from nano_inference.serving.errors import NO_RETRY, ApiError, retry_after

# seconds without a step or a token while there is work; a long prompt's step on a CPU takes less
STALLED = 60.0
Status = Literal["starting", "ok", "stalled", "dead", "draining"]


@dataclass
class Lifecycle:
    """What `/health` says, and who is let in.

    Attributes:
        client: the engine.
        restarts: whether a dead engine is replaced.
        is_ready: it has been built, and what is served is known. It stays True when the engine
            dies.
        failure: why it cannot be built.
        is_draining: the server was told to stop.
    """

    client: EngineClient
    restarts: bool = False
    is_ready: bool = False
    failure: str | None = None
    is_draining: bool = False

    @property
    def status(self) -> Status:
        """In one word."""
        if self.is_draining:
            return "draining"
        if self.failure is not None:
            return "dead"
        if not self.is_ready:
            return "starting"
        if self.client.why_dead is not None:
            return "dead"
        return "stalled" if self.client.is_silent or self.client.stalled(STALLED) else "ok"

    @property
    def is_lost(self) -> bool:
        """The engine is dead for good."""
        return self.failure is not None or (
            self.status == "dead" and not (self.restarts or self.client.restarting)
        )

    def require_ready(self) -> None:
        """For all routes but `/health`. Raises `ApiError` 503 until there is something to serve."""
        if not self.is_ready:
            if self.failure is not None:
                raise _DEAD
            raise ApiError(
                503, "the engine is being built.", code="starting", headers=retry_after(1.0)
            )

    def require_open(self) -> None:
        """For new work. Raises `ApiError` 503."""
        if self.is_draining:
            # Another server behind the same name may take it; this one will not.
            raise ApiError(
                503, "the server is shutting down.", code="draining", headers=retry_after(1.0)
            )
        if self.status == "dead":
            if self.is_lost:
                raise _DEAD
            raise ApiError(
                503, "the engine is being restarted.", code="engine_dead", headers=retry_after(2.0)
            )


_DEAD = ApiError(503, "the engine is not running.", code="engine_dead", headers=NO_RETRY)
