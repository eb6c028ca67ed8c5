"""`Gate`: what an engine waits for that other engines decide."""

from collections.abc import Collection
from typing import Protocol


class Stepping(Protocol):
    """An engine that steps, and takes part in rounds."""

    def require_alive(self) -> None:
        """Raise `EngineDead` if it is."""
        ...

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def advance(self) -> None:
        """Step."""
        ...


class Gate:
    """The gate of an engine that is alone: always open. `Lockstep` is that of several engines.

    Attributes:
        alone: no other engine decides anything.
        sleep_wanted: this engine's weights are put aside, or are to be as soon as all may be.
    """

    alone = True
    sleep_wanted = False

    @property
    def is_held(self) -> bool:
        """Whether another engine's weights sleep, or this engine's are to."""
        return False

    @property
    def may_sleep(self) -> bool:
        """Whether no engine needs this engine's weights."""
        return True

    def is_due(self) -> bool:
        """Whether this engine has to take part in a round, even without a request."""
        return False

    def allows(self, version: int | None) -> bool:
        """Whether all engines apply the update of this version now."""
        return True

    def begin(self, weight_sets: Collection[str] = ()) -> list[str]:
        """Begin a round; returns all weight sets that some engine computes, in order.

        Args:
            weight_sets: that this engine computes.

        Raises `RankLost` where an engine does not come, or serves another version.
        """
        return list(weight_sets)

    def await_sleep(self, engine: Stepping) -> None:
        """Wait until this engine's weights may sleep; `may_sleep` says whether they may."""

    def await_wake(self, engine: Stepping) -> None:
        """Wait until all engines have their weights. Raises `NanoInferenceError`."""

    def close(self) -> None:
        """Leave."""
