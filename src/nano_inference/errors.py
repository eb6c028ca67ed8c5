"""Exceptions of the public interface. The package raises only subclasses of `NanoInferenceError` on
purpose.
"""

from typing import Any


class NanoInferenceError(Exception):
    """Base class of all errors that the package raises on purpose."""


def one_line(problem: BaseException) -> str:
    """Return the class of an exception and the first line of its message, for use in a sentence."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0].rstrip('.')}" if lines else type(problem).__name__


NO_MEMORY = (
    "out of memory; use a smaller model, or raise the limit of this process "
    "(ulimit -v, or the container's)."
)


class ConfigError(NanoInferenceError, ValueError):
    """Option that is unknown, out of range, in conflict with another one, or not available on this
    machine.
    """


class LacksMemory(ConfigError):
    """A model, or its KV cache, does not fit into the free memory."""


class LacksMemoryToWake(NanoInferenceError):
    """Memory of the device that others took while an engine slept. The engine stays asleep, and you
    can call `wake` again.

    Attributes:
        missing: Bytes that have to be freed, or 0 if unknown.
    """

    def __init__(self, message: str, missing: int = 0) -> None:
        super().__init__(message)
        self.missing = missing


class ModelLoadError(NanoInferenceError):
    """Model folder, file or tensor that is missing, malformed or of an unknown architecture."""


class InvalidRequest(NanoInferenceError, ValueError):
    """Request that cannot be served, for example due to bad token ids or sampling parameters."""


class RequestTooLarge(InvalidRequest):
    """Well-formed request that can never fit this engine. The message names the limit and the
    values that would fit.
    """


class TemplateRewritesPast(InvalidRequest):
    """Chat template that renders earlier turns differently than they were sampled, so that their
    token ids do not begin the new prompt.
    """


class VersionGone(InvalidRequest):
    """Request for a weight version that newer weights have replaced."""


class RequestAborted(NanoInferenceError):
    """Call that waited for a request which was aborted, and has no partial result to return."""


class AdapterError(NanoInferenceError, ValueError):
    """Adapter that cannot be loaded or is not loaded. The engine is unchanged."""


class AdapterNotFound(InvalidRequest, AdapterError):
    """Adapter name or folder that does not exist."""


class WeightUpdateError(NanoInferenceError):
    """Weight update that was rejected. The engine continues to serve the old version, unchanged."""


class WeightUpdateConflict(WeightUpdateError):
    """Step of a weight update at the wrong time: out of order, during another update, or while the
    weights are asleep.
    """


class WeightTransferError(WeightUpdateError):
    """Weights that did not arrive in time, or whose sender disconnected."""


class EngineDead(NanoInferenceError):
    """Engine that was shut down, or failed in a way that leaves its state unknown.

    Attributes:
        public: Reason that may be shown to clients. It contains no exception text, which may hold a
            path or another client's data. Empty if there is none to show.
        samples: Every completed `TrainingSample` that the failed call (`generate` without `stream`,
            or `step`) would have returned.
    """

    def __init__(self, message: str, public: str = "") -> None:
        super().__init__(message)
        self.public = public
        self.samples: tuple[Any, ...] = ()


class RankLost(NanoInferenceError):
    """Rank of a model shared by several ranks that did not answer in time or exited."""
