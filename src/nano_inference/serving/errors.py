"""`ApiError`: an answer that is not the one wanted, before a protocol gives it its shape."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nano_inference.errors import (
    EngineDead,
    InvalidRequest,
    NanoInferenceError,
    RequestAborted,
    RequestTooLarge,
)

_NONE: Mapping[str, str] = MappingProxyType({})
NO_RETRY: Mapping[str, str] = MappingProxyType({"x-should-retry": "false"})  # both SDKs obey it


@dataclass
class ApiError(Exception):
    """What goes wrong at the edge.

    Attributes:
        status: HTTP status.
        message: one sentence for the client: no paths, no tracebacks.
        param: the field that is at fault.
        code: a word that programs look for, such as `context_length_exceeded`.
        headers: to send along, such as `retry-after`.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: _NONE)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param, code)


def api_error_of(problem: Exception) -> ApiError:
    """The answer to what an engine or a text function raised. Anything unknown is our bug, and says nothing."""
    match problem:
        case ApiError():
            return problem
        case RequestTooLarge():
            return ApiError(400, str(problem), code="context_length_exceeded")
        case InvalidRequest():
            return ApiError(400, str(problem))
        case EngineDead():
            return ApiError(503, "the engine is not running.", code="engine_dead", headers=NO_RETRY)
        case RequestAborted():
            return ApiError(499, str(problem))
        case NanoInferenceError() | Exception():
            return ApiError(500, "something went wrong in the server; its log says what.", headers=NO_RETRY)
