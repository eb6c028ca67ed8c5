"""`ApiError`: an answer that is not the one wanted, and the shapes that protocols give it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nano_inference.errors import (
    AdapterError,
    AdapterNotFound,
    EngineDead,
    InvalidRequest,
    NanoInferenceError,
    RequestAborted,
    RequestTooLarge,
    VersionGone,
    WeightTransferError,
    WeightUpdateConflict,
    WeightUpdateError,
)
from nano_inference.remote import paths

SHOWN = 80  # characters of a value or name that a message repeats


class EngineReplaced(EngineDead):
    """The engine has died with what it was doing, and another one is being started."""


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

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param, code)


def shown(value: object) -> str:
    """A client's value as a message may repeat it: one short line of ASCII."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "an integer of many digits"
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    text = json.dumps(
        value[: SHOWN + 1] if isinstance(value, str) else value, default=lambda _: "..."
    )
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def retry_after(seconds: float) -> Mapping[str, str]:
    """Headers that tell a client when to come again: both SDKs obey the milliseconds, others know
    the seconds.
    """
    milliseconds = max(1, round(seconds * 1000))
    return {"retry-after": str(-(-milliseconds // 1000)), "retry-after-ms": str(milliseconds)}


def api_error_of(problem: BaseException) -> ApiError:
    """The answer to what an engine or a text function raised. Anything unknown is our bug, and says
    nothing.
    """
    match problem:
        case ApiError():
            return problem
        case RequestTooLarge():
            return ApiError(400, str(problem), code="context_length_exceeded")
        case VersionGone():
            return ApiError(409, str(problem), code="weight_version_gone")
        case InvalidRequest() | AdapterError():
            missing = isinstance(problem, AdapterNotFound)
            code = "model_not_found" if missing else None
            return ApiError(404 if missing else 400, str(problem), code=code)
        case WeightUpdateError():
            late, conflict = (
                isinstance(problem, WeightTransferError),
                isinstance(problem, WeightUpdateConflict),
            )
            return ApiError(504 if late else 409 if conflict else 400, str(problem))
        case EngineReplaced():
            text = "the engine has died, and is being started again."
            return ApiError(503, text, code="engine_restarting", headers=retry_after(5.0))
        case EngineDead():
            text = (
                f"the engine is not running: {problem.public}"
                if problem.public
                else "the engine is not running."
            )
            return ApiError(503, text, code="engine_dead", headers=NO_RETRY)
        case RequestAborted():
            return ApiError(499, str(problem))
        case NanoInferenceError() | BaseException():
            return ApiError(
                500, "something went wrong in the server; its log says what.", headers=NO_RETRY
            )


# status -> OpenAI's `type`, OpenAI's `code` where the error has none of its own, Anthropic's
# `error.type`
_WORDS: Mapping[int, tuple[str, str | None, str]] = {
    400: ("invalid_request_error", None, "invalid_request_error"),
    401: ("authentication_error", "invalid_api_key", "authentication_error"),
    403: ("permission_error", None, "permission_error"),
    404: ("not_found_error", None, "not_found_error"),
    405: ("invalid_request_error", "method_not_allowed", "invalid_request_error"),
    408: ("timeout_error", "request_timeout", "timeout_error"),
    409: ("conflict_error", None, "invalid_request_error"),
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
    """OpenAI's shape; all four keys are required by its document."""
    kind, code, _ = _WORDS.get(problem.status, _WORDS[500 if problem.status >= 500 else 400])
    return {
        "error": {
            "message": problem.message,
            "type": kind,
            "param": problem.param,
            "code": problem.code or code,
        },
    }


def anthropic_error(problem: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Anthropic's shape. An error event in a stream has no `request_id`."""
    _, _, kind = _WORDS.get(problem.status, _WORDS[500 if problem.status >= 500 else 400])
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": problem.message}}
    return body if request_id is None else body | {"request_id": request_id}


def error_body(
    path: str, problem: ApiError, request_id: str, *, has_version: bool = False
) -> dict[str, Any]:
    """In the shape of the protocol that a path speaks: Anthropic's below `/v1/messages`, elsewhere
    OpenAI's.

    `/v1/models` speaks both: Anthropic's where there is an `anthropic-version` header
    (`has_version`). Trainers' routes say beside it what SGLang's clients look for.
    """
    route = "/".join(path.split("/", 3)[:3])
    if route == "/v1/messages" or (route == "/v1/models" and has_version):
        return anthropic_error(problem, request_id)
    if path in paths.CONTROL or path in paths.GENERATION:
        return openai_error(problem) | {"success": False, "message": problem.message}
    return openai_error(problem)
