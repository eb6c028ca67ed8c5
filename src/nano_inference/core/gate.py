"""`Gate`: what an engine waits for that other engines decide."""

from collections.abc import Collection
from typing import Protocol

from nano_inference.core.lifecycle import Lifecycle


class Stepping(Protocol):
    """An engine that steps, and takes part in rounds."""

    @property
    def life(self) -> Lifecycle:
        """The engine's state."""
        ...

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
    """The gate of a single engine: always open. `LockstepGate` is the gate of several engines.

    Attributes:
        alone: no other engine decides anything.
        asleep: all engines have said that their weights are to sleep, and not all have said since
            that they have them again.
    """

    alone = True
    asleep = False

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
        """Wait until `asleep`, so that no engine needs this engine's weights; not for ever."""

    def await_wake(self, engine: Stepping) -> None:
        """Wait until all engines have their weights. Raises `NanoInferenceError`."""

    def close(self) -> None:
        """Leave."""
