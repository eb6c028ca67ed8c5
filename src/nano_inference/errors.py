"""The exceptions of the public interface. Everything this package raises on purpose is a
`NanoInferenceError`.
"""

from typing import Any


class NanoInferenceError(Exception):
    """Base of every error that the engine raises on purpose."""


def one_line(problem: BaseException) -> str:
    """What was raised, for a sentence: its class, and the first line of what it says."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0].rstrip('.')}" if lines else type(problem).__name__


NO_MEMORY = (
    "there is not enough memory to go on; use a smaller model, or raise the limit of this process "
    "(ulimit -v, or the container's)."
)


class ConfigError(NanoInferenceError, ValueError):
    """An option is unknown, out of range, contradicts another one, or is not available on this
    machine.
    """


class ModelLoadError(NanoInferenceError):
    """A model folder, file or tensor is missing, misshapen or of an unknown architecture."""


class InvalidRequest(NanoInferenceError, ValueError):
    """A request that cannot be served as it stands: bad token ids, bad sampling parameters."""


class RequestTooLarge(InvalidRequest):
    """A well-formed request that can never fit this engine. The message says which limit and what
    would fit.
    """


class VersionGone(InvalidRequest):
    """A request is for weights of one version, and newer ones serve."""


class RequestAborted(NanoInferenceError):
    """A call waited for a request that was aborted, and has nothing partial to return."""


class AdapterError(NanoInferenceError, ValueError):
    """An adapter cannot be loaded or is not loaded; nothing has changed."""


class AdapterNotFound(InvalidRequest, AdapterError):
    """There is no adapter of this name, or in this folder."""


class WeightUpdateError(NanoInferenceError):
    """A weight update was refused. The old version goes on serving, untouched."""


class WeightUpdateConflict(WeightUpdateError):
    """A step of a weight update came at the wrong time: out of order, during another update, while
    weights sleep.
    """


class WeightTransferError(WeightUpdateError):
    """Weights did not arrive in time, or their sender is gone."""


class EngineDead(NanoInferenceError):
    """The engine was shut down, or a step failed in a way that leaves its state unknown.

    Attributes:
        public: the reason as strangers may hear it, without the text of an exception, which may
            hold a path or what another client has asked. Empty: they may hear none.
        samples: every `TrainingSample` that had ended and that the failed call (`generate` without
            `stream`, or `step`) would have returned.
    """

    def __init__(self, message: str, public: str = "") -> None:
        super().__init__(message)
        self.public = public
        self.samples: tuple[Any, ...] = ()


class RankLost(NanoInferenceError):
    """A rank of a model that is shared by several did not answer in time, or is gone."""
