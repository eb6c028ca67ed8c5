"""`ApiError`, the HTTP status of each error, and the error formats of the protocols."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nano_inference.errors import (
    AdapterError,
    AdapterNotFound,
    EngineDead,
    InvalidRequest,
    LacksMemoryToWake,
    RequestAborted,
    RequestTooLarge,
    VersionGone,
    WeightTransferError,
    WeightUpdateConflict,
    WeightUpdateError,
)
from nano_inference.fleet.errors import (
    Draining,
    EnginesDied,
    ReplicaConflict,
    ReplicaNotFound,
    WeightsChanged,
)
from nano_inference.remote.errors import EngineReplaced, EngineRestarting, ReaderTooSlow

SHOWN = 80  # maximum characters of a value or name quoted in a message


_NONE: Mapping[str, str] = MappingProxyType({})
NO_RETRY: Mapping[str, str] = MappingProxyType({"x-should-retry": "false"})  # both SDKs heed it


@dataclass
class ApiError(Exception):
    """Error that a client receives.

    Attributes:
        status: HTTP status.
        message: One sentence for the client, without paths and tracebacks.
        param: Name of the offending field.
        code: Machine-readable code, such as `context_length_exceeded`.
        headers: Headers of the reply, such as `retry-after`.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: _NONE)

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Make an error with status 400."""
    return ApiError(400, message, param, code)


def shown(value: object) -> str:
    """Return a client's value for a message: one short line of ASCII."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "an integer of many digits"
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    text = json.dumps(
        value[: SHOWN + 1] if isinstance(value, str) else value, default=lambda _: "..."
    )
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def retry_after(seconds: float) -> Mapping[str, str]:
    """Return headers that say when to retry. Both SDKs use the milliseconds, other clients the
    seconds.
    """
    milliseconds = max(1, round(seconds * 1000))
    return {"retry-after": str(-(-milliseconds // 1000)), "retry-after-ms": str(milliseconds)}


def _public_reason(problem: BaseException) -> str:
    public = problem.public if isinstance(problem, EngineDead) else ""
    return f"the engine is not running: {public}" if public else "the engine is not running."


@dataclass(frozen=True, slots=True)
class _Answer:
    """Row of `ANSWERS`, with the fields of `ApiError`."""

    status: int
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: _NONE)
    text: Callable[[BaseException], str] = str


# Reply to each error that an engine, a fleet or a text function raises deliberately. An error
# without a row uses that of its nearest base class.
ANSWERS: Mapping[type[BaseException], _Answer] = {
    InvalidRequest: _Answer(400),
    RequestTooLarge: _Answer(400, "context_length_exceeded"),
    VersionGone: _Answer(409, "weight_version_gone"),
    AdapterError: _Answer(400),
    AdapterNotFound: _Answer(404, "model_not_found"),
    WeightUpdateError: _Answer(400),
    WeightUpdateConflict: _Answer(409),
    WeightTransferError: _Answer(504),
    LacksMemoryToWake: _Answer(503, "no_memory_to_wake", retry_after(5.0)),
    RequestAborted: _Answer(499),
    EngineDead: _Answer(503, "engine_dead", NO_RETRY, _public_reason),
    EngineReplaced: _Answer(
        503,
        "engine_restarting",
        retry_after(5.0),
        lambda _: "the engine died and is restarting.",
    ),
    EngineRestarting: _Answer(503, "engine_restarting", MappingProxyType({"retry-after": "5"})),
    ReaderTooSlow: _Answer(408),
    Draining: _Answer(503, "draining", retry_after(1.0)),
    ReplicaNotFound: _Answer(404),
    ReplicaConflict: _Answer(409),
    WeightsChanged: _Answer(503),
    EnginesDied: _Answer(500, "engines_died", NO_RETRY),
}
_BUG = _Answer(500, headers=NO_RETRY, text=lambda _: "internal server error; see the server's log.")


def _row_of(problem: BaseException) -> _Answer:
    rows = (ANSWERS[kind] for kind in type(problem).__mro__ if kind in ANSWERS)
    return next(rows, _BUG)


def is_bug(problem: BaseException) -> bool:
    """Return True if an error is a bug. Its text goes only to the log, not to the client."""
    return not isinstance(problem, ApiError) and _row_of(problem) is _BUG


def api_error_of(problem: BaseException) -> ApiError:
    """Return the reply to an error of an engine, a fleet or a text function, by `ANSWERS`."""
    if isinstance(problem, ApiError):
        return problem
    row = _row_of(problem)
    return ApiError(row.status, row.text(problem), code=row.code, headers=row.headers)


# status -> OpenAI's `type`, OpenAI's default `code`, Anthropic's `error.type`
_WORDS: Mapping[int, tuple[str, str | None, str]] = {
    400: ("invalid_request_error", None, "invalid_request_error"),
    401: ("authentication_error", "invalid_api_key", "authentication_error"),
    403: ("permission_error", None, "permission_error"),
    404: ("not_found_error", None, "not_found_error"),
    405: ("invalid_request_error", "method_not_allowed", "invalid_request_error"),
    408: ("timeout_error", "request_timeout", "timeout_error"),
    409: ("conflict_error", None, "invalid_request_error"),
    410: ("not_found_error", "gone", "not_found_error"),
    413: ("invalid_request_error", "request_too_large", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_exceeded", "rate_limit_error"),
    431: ("invalid_request_error", "headers_too_large", "request_too_large"),
    500: ("server_error", None, "api_error"),
    501: ("not_implemented_error", None, "api_error"),
    503: ("service_unavailable_error", None, "overloaded_error"),
    504: ("timeout_error", "request_timeout", "timeout_error"),
}


def openai_error(problem: ApiError) -> dict[str, Any]:
    """Return an error in OpenAI's format. Its specification requires all four keys."""
    kind, code, _ = _WORDS.get(problem.status, _WORDS[500 if problem.status >= 500 else 400])
    return {
        "error": {
            "message": problem.message,
            "type": kind,
            "param": problem.param,
            "code": problem.code or code,
        },
    }


def ollama_error(problem: ApiError) -> dict[str, Any]:
    """Return an error in Ollama's format."""
    return {"error": problem.message}


def anthropic_error(problem: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return an error in Anthropic's format. Error events of a stream have no `request_id`."""
    _, _, kind = _WORDS.get(problem.status, _WORDS[500 if problem.status >= 500 else 400])
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": problem.message}}
    return body if request_id is None else body | {"request_id": request_id}
