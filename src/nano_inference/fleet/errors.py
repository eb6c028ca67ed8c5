"""Errors of a fleet, without HTTP. `server/errors.py` maps them to status codes."""

from nano_inference.errors import NanoInferenceError


class FleetError(NanoInferenceError):
    """Base of the errors of a fleet."""


class NoReplica(FleetError):
    """No replica accepts requests."""


class Draining(NoReplica):
    """All replicas are draining. Try again in a second."""

    def __init__(self) -> None:
        super().__init__("no replica accepts requests now, because all are draining; try again.")


class ReplicaNotFound(FleetError):
    """The fleet has no replica of this name.

    Args:
        replica: Name of the replica.
    """

    def __init__(self, replica: str) -> None:
        super().__init__(f"replica {replica!r} does not exist.")


class ReplicaConflict(FleetError):
    """The state of the fleet or of a replica does not allow this change. Nothing has changed."""


class WeightsChanged(FleetError):
    """A request lost its engine, and no other engine has the weights that it began with."""

    def __init__(self) -> None:
        super().__init__(
            "the engine of this request died, and no other engine can resume it, because the "
            "weights have changed since; send it again."
        )


class EnginesDied(FleetError):
    """A request was rejected because several engines died while computing it.

    Args:
        deaths: Number of these engines.
    """

    def __init__(self, deaths: int) -> None:
        super().__init__(
            f"{deaths} engines died while they had this request, perhaps because of it; it is not "
            "retried."
        )
