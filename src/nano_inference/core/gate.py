"""`Gate`: the point at which an engine waits for decisions of other engines."""

from collections.abc import Collection
from typing import Protocol

from nano_inference.core.lifecycle import Lifecycle


class Stepping(Protocol):
    """An engine that can step and take part in rounds."""

    @property
    def life(self) -> Lifecycle:
        """State of the engine."""
        ...

    def require_alive(self) -> None:
        """Raise `EngineDead` if the engine is dead."""
        ...

    def has_work(self) -> bool:
        """Return True if a step would do anything."""
        ...

    def advance(self) -> None:
        """Run one step."""
        ...


class Gate:
    """Gate of a single engine, which is always open.

    `LockstepGate` coordinates several engines.

    Attributes:
        alone: True if no other engine takes part in decisions.
        asleep: True from the time when all engines have asked for their weights to sleep until all
            have reported that the weights are back.
    """

    alone = True
    asleep = False

    def is_due(self) -> bool:
        """Return True if this engine must take part in a round, even without a request."""
        return False

    def allows(self, version: int | None) -> bool:
        """Return True if all engines apply the update to this version now."""
        return True

    def begin(self, weight_sets: Collection[str] = ()) -> list[str]:
        """Begin a round and return, in order, all weight sets that some engine computes.

        `weight_sets` are those that this engine computes.

        Raise `RankLost` if an engine does not arrive or serves another version.
        """
        return list(weight_sets)

    def await_sleep(self, engine: Stepping) -> None:
        """Wait, for a limited time, until `asleep`.

        From then on no engine needs this engine's weights.
        """

    def await_wake(self, engine: Stepping) -> None:
        """Wait until all engines have their weights. Raise `NanoInferenceError` if one does not."""

    def close(self) -> None:
        """Leave the group of engines."""
