"""Errors of a fleet. None of them knows HTTP: `server/errors.py` says which status answers each."""

from nano_inference.errors import NanoInferenceError


class FleetError(NanoInferenceError):
    """Base of the errors of a fleet."""


class NoReplica(FleetError):
    """No replica takes requests."""


class Draining(NoReplica):
    """All replicas are about to leave; try again in a second."""

    def __init__(self) -> None:
        super().__init__("no replica takes requests now; all of them are about to leave.")


class ReplicaNotFound(FleetError):
    """The fleet has no replica of this name.

    Args:
        replica: the name.
    """

    def __init__(self, replica: str) -> None:
        super().__init__(f"there is no replica {replica!r}.")


class ReplicaConflict(FleetError):
    """The state of the fleet or of a replica does not allow this change; nothing has changed."""


class WeightsChanged(FleetError):
    """A request lost its engine, and no other engine serves the weights that it began with."""

    def __init__(self) -> None:
        super().__init__(
            "its engine has died, and another one cannot go on with this request: the weights "
            "have changed meanwhile."
        )


class EnginesDied(FleetError):
    """A request is rejected because several engines died while they had it.

    Args:
        deaths: how many engines.
    """

    def __init__(self, deaths: int) -> None:
        super().__init__(
            f"{deaths} engines died while they had this request; it may be why, and is not tried "
            "again."
        )
