"""From a body's bytes to a checked request model: strict JSON, bounded nesting, one sentence on
what is wrong.
"""

import json
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from nano_inference.serving.config import ServerConfig
from nano_inference.serving.edge.json_limits import check_json
from nano_inference.serving.errors import bad_request

log = logging.getLogger("nano_inference.serving")

MAX_UNKNOWN_NAMES = 256  # field names that are remembered as logged
_SHOWN = 80  # characters of a value or name that a message repeats

_unknown_names: set[str] = set()
_unknown_lock = threading.Lock()


class Strict(BaseModel):
    """A part of a request: numbers are numbers, nothing is converted; unknown fields are kept in
    `model_extra`.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, frozen=True, regex_engine="rust-regex"
    )


Model = TypeVar("Model", bound=Strict)


def read_body(
    body: bytes, model: type[Model], config: ServerConfig, unsupported: Mapping[str, Iterable[Any]]
) -> Model:
    """The request that a body holds. Unknown fields are accepted, and logged once a name.

    Args:
        body: JSON. NaN, infinities, numbers beyond a double, lone surrogates and bytes that are not
            UTF-8 are refused.
        model: of the request.
        config: the server's limits.
        unsupported: fields that are known and not supported -> the values that change nothing,
            which are accepted, as null is.

    Raises:
        ApiError: 400, naming the field.
    """
    given = decode(body, config)
    refuse_unsupported(given, unsupported)
    _require_bias(given, config.max_logit_bias)
    try:
        request = model.model_validate(given)
    except ValidationError as problem:
        raise bad_request(*_said(problem)) from None
    log_unknown(name for name in request.model_extra or () if name not in unsupported)
    return request


def refuse_unsupported(
    given: Mapping[str, Any], unsupported: Mapping[str, Iterable[Any]], within: str | None = None
) -> None:
    """Raise `ApiError`, 400, for a field that asks for what this server has not got.

    Args:
        given: the fields.
        unsupported: as in `read_body`.
        within: the field that holds them.
    """
    for name, harmless in unsupported.items():
        if (value := given.get(name)) is not None and not any(
            _same(value, each) for each in harmless
        ):
            where = name if within is None else f"{within}.{name}"
            raise bad_request(
                f"{where} is not supported by this server; leave it out.",
                where,
                "unsupported_parameter",
            )


def decode(body: bytes, config: ServerConfig) -> dict[str, Any]:
    """The JSON object that a body holds, within the server's limits. Raises `ApiError`, 400."""
    check_json(body, config.max_depth, config.max_values)
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise bad_request(f"the body is not valid JSON: {problem}") from None
    if not isinstance(given, dict):
        raise bad_request("the body must be a JSON object.")
    return given


def _require_bias(given: Mapping[str, Any], most: int) -> None:
    """Refuse too long a `logit_bias` before each entry is validated, in which others would wait."""
    nested = given.get("sampling_params")  # of vLLM's and SGLang's own routes
    for fields in (given, nested) if isinstance(nested, dict) else (given,):
        bias = fields.get("logit_bias")
        if isinstance(bias, dict) and len(bias) > most:
            raise bad_request(
                f"logit_bias has {len(bias)} entries; this server takes {most}.", "logit_bias"
            )


def shown(value: object) -> str:
    """A client's value as a message may repeat it: one short line of ASCII."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "an integer of many digits"
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    text = json.dumps(
        value[: _SHOWN + 1] if isinstance(value, str) else value, default=lambda _: "..."
    )
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _same(value: object, other: object) -> bool:
    return (
        type(value) is type(other) and value == other if isinstance(value, bool) else value == other
    )


def _said(problem: ValidationError) -> tuple[str, str | None]:
    """What is wrong first, and where."""
    first = problem.errors(include_url=False)[0]
    places = [str(each)[:_SHOWN] for each in first["loc"]]
    # <these> are tags of our own
    where = ".".join(each for each in places if not each.startswith("<"))
    kind = first["type"]
    if kind == "missing":
        return f"{where} is missing.", where
    if kind == "value_error":
        what = first["msg"].removeprefix("Value error, ")
        return f"{where}: {what}" if where else what, where or None
    what = _WANTED.get(kind, first["msg"].removeprefix("Input should be ")).format(
        **first.get("ctx", {})
    )
    return f"{where} must be {what}, not {shown(first['input'])}.", where


# pydantic's kinds of errors -> what a client, who knows JSON and not Python, is told to send
_WANTED: Mapping[str, str] = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "string_too_short": "a string of {min_length} characters or more",
    "string_too_long": "a string of {max_length} characters or less",
    "too_short": "a list of {min_length} or more",
}


def log_unknown(names: Iterable[str]) -> None:
    """Log field names that nobody knows, once each."""
    for name in names:
        name = name[:_SHOWN]
        with _unknown_lock:
            new = name not in _unknown_names and len(_unknown_names) < MAX_UNKNOWN_NAMES
            if new:
                _unknown_names.add(name)
        if new:
            log.warning("requests hold an unknown field, which is ignored: %s", json.dumps(name))
