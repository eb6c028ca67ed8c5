"""`ControlRequest`: fields of a control request. `Route`: row of a control route. Body checks,
`/openapi.json`, `/docs` and a table of docs/routes.md are made from them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from nano_inference.fields.options import is_number, is_whole
from nano_inference.remote.operations import Checks
from nano_inference.server.control.engine import checked_name
from nano_inference.server.errors import ApiError, bad_request, shown

MOST_SECONDS = 24 * 3600.0
MOST_SIZE = 2**48  # limit of a tensor's size along one axis

_WORDS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}
_NOUNS = {"string": "a string", "integer": "an integer", "object": "an object"}


class ControlRequest(BaseModel):
    """Fields of a request, read from its JSON or its query. A body is optional, null counts as
    missing, and unknown fields are ignored.

    Attributes:
        missing: Special error messages for missing fields, by name.
        needs: Single error message for any missing field, which replaces the others.
    """

    model_config = ConfigDict(frozen=True)
    missing: ClassVar[Mapping[str, str]] = {}
    needs: ClassVar[str] = ""


class _Query(list[str]):
    """All values of one name in a query."""


Read = TypeVar("Read", bound=ControlRequest)


def read_fields(
    model: type[Read], body: Mapping[str, Any], query: Mapping[str, Sequence[str]]
) -> Read:
    """Return the request from a body and a query. A field of the body overrides one of the query.
    Raises `ApiError` 400, which names the field and its value.
    """
    values: dict[str, Any] = {}
    for name in model.model_fields:
        if (value := body.get(name)) is not None:
            values[name] = value
        elif said := query.get(name):
            values[name] = _Query(said)
    try:
        return model.model_validate(values)
    except ValidationError as problem:  # the fields' own checks raise `ApiError`
        name = str(problem.errors(include_url=False)[0]["loc"][0])
    if model.needs:
        raise bad_request(model.needs)
    if name in model.missing:
        raise bad_request(model.missing[name], name)
    kind = model.model_json_schema()["properties"][name]["type"]
    raise bad_request(f"{name} is missing; it must be {_NOUNS[kind]}.", name)


# -- field types -----------------------------------------------------------------------------------


def checked(value: Any, info: ValidationInfo, what: str, read: Callable[[Any], Any]) -> Any:
    """Return `read(value)`. If that is None, raise `ApiError`: the field must be `what`."""
    value = value[0] if isinstance(value, _Query) else value
    made = read(value)
    if made is None:
        name = info.field_name
        raise bad_request(f"{name} must be {what}, not {shown(value)}.", name)
    return made


def read_by(what: str, read: Callable[[Any], Any]) -> PlainValidator:
    """Return a validator that reads a field with `read`, as in `checked`."""

    def check(value: Any, info: ValidationInfo) -> Any:
        return checked(value, info, what, read)

    return PlainValidator(check)


def _as_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _as_required(value: Any, info: ValidationInfo) -> str:
    if not (text := checked(value, info, "a string", _as_text)):
        raise PydanticCustomError("missing", "it is empty")
    return text


def _as_flag(value: object) -> bool | None:
    if isinstance(value, str):
        return _WORDS.get(value.lower())
    return value if isinstance(value, bool) else None


def _as_seconds(value: object) -> float | None:
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    return float(value) if is_number(value) and 0 < value <= MOST_SECONDS else None


def _as_version(value: Any, info: ValidationInfo) -> str:
    def read(candidate: object) -> object:
        is_number = is_whole(candidate, 0) and candidate < 2**63
        return candidate if is_number or isinstance(candidate, str) else None

    version: str | int = checked(value, info, "a string, or an integer in [0, 2^63)", read)
    return (
        checked_name(version, info.field_name or "") if isinstance(version, str) else str(version)
    )


def _as_texts(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    """Read strings from a JSON list, or from a query that repeats a name. A single string is a
    list.
    """
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        name = info.field_name
        raise bad_request(f"{name} must be a list of strings, not {shown(value)}.", name)
    return tuple(value)


STRING, _BOOLEAN = WithJsonSchema({"type": "string"}), WithJsonSchema({"type": "boolean"})
_STRINGS = WithJsonSchema({"type": "array", "items": {"type": "string"}})

Text = Annotated[str, read_by("a string", _as_text), STRING]
RequiredText = Annotated[str, PlainValidator(_as_required), STRING]  # nonempty
Flag = Annotated[bool, read_by("true or false", _as_flag), _BOOLEAN]
# a positive duration of at most a day
Seconds = Annotated[
    float,
    read_by("a number of seconds, at most a day", _as_seconds),
    WithJsonSchema({"type": "number"}),
]
# name of a weight version: a string, or an integer from trainers that count
Version = Annotated[str, PlainValidator(_as_version), STRING]
Texts = Annotated[tuple[str, ...], PlainValidator(_as_texts), _STRINGS]
Anything = Annotated[Any, read_by("anything", lambda given: given), WithJsonSchema({})]
Mapped = Annotated[
    Mapping[str, Any],
    read_by("an object", lambda given: given if isinstance(given, dict) else None),
    WithJsonSchema({"type": "object"}),
]


def whole(least: int, most: int = 2**63) -> PlainValidator:
    """Return a validator of integers in [least, most]. A query has them as digits."""
    return read_by(*_whole(least, most))


def _whole(least: int, most: int) -> tuple[str, Callable[[Any], int | None]]:
    def read(value: object) -> int | None:
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
            value = int(value)
        return value if is_whole(value, least) and value <= most else None

    return f"an integer in [{least}, {most}]", read


INTEGER = WithJsonSchema({"type": "integer"})
Port = Annotated[int, whole(1, 65535), INTEGER]
WorldSize = Annotated[int, whole(2, 2**16), INTEGER]


def _as_rank(value: Any, info: ValidationInfo) -> int:
    return checked(value, info, *_whole(1, (info.data.get("world_size") or 2**16) - 1))


# rank of the engine in a group whose rank 0 is the trainer; declare it after `world_size`
Rank = Annotated[int, PlainValidator(_as_rank), INTEGER]


def word(known: Sequence[str], what: str = "") -> PlainValidator:
    """Return a validator of one of these words."""
    what = what or f"one of {', '.join(known)}"

    def check(value: Any, info: ValidationInfo) -> str:
        text = checked(value, info, "a string", _as_text)
        return checked(text, info, what, lambda text: text if text in known else None)

    return PlainValidator(check)


def words(known: Sequence[str]) -> WithJsonSchema:
    """Return the JSON schema of one of these words."""
    return WithJsonSchema({"type": "string", "enum": [*known]})


def among(known: Sequence[str], shown_words: Sequence[str]) -> AfterValidator:
    """Return a validator that rejects strings of a list that are not `known`. The error lists
    `shown_words`.
    """

    def check(values: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if unknown := [each for each in values if each not in known]:
            name = info.field_name
            raise bad_request(
                f"{name} contains {shown(unknown[0])}; use {', '.join(shown_words)}.", name
            )
        return values

    return AfterValidator(check)


def only(
    harmless: Sequence[object], why: str, *, status: int = 501, param: str | None = None
) -> AfterValidator:
    """Return a validator that rejects all values except these, with the message `why`."""

    def check(value: Any) -> Any:
        if value not in harmless:
            raise ApiError(status, why, param)
        return value

    return AfterValidator(check)


def part(model: type[ControlRequest]) -> PlainValidator:
    """Return a validator of a JSON object, read with `read_fields`."""
    return read_by(
        "an object",
        lambda given: read_fields(model, given, {}) if isinstance(given, dict) else None,
    )


# -- fields of requests for updates ----------------------------------------------------------------


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor that a trainer is about to broadcast: checkpoint name, dtype such as `"bfloat16"`,
    and shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class CheckFields(ControlRequest):
    """Checks of an update, chosen when it begins, as in `Updates.begin`."""

    complete: Flag = False
    check_finite: Flag = True

    @property
    def checks(self) -> Checks:
        """Checks set in the request."""
        checks: Checks = {}
        if "complete" in self.model_fields_set:
            checks["complete"] = self.complete
        if "check_finite" in self.model_fields_set:
            checks["check_finite"] = self.check_finite
        return checks


def tensors_of(
    names: Sequence[str] | None, types: Sequence[str] | None, shapes: object, dtypes: str
) -> list[TensorSpec]:
    """Return the tensors of a trainer's broadcasts from parallel lists. `dtypes` is the client's
    name of the list of dtypes. Raises `ApiError` 400.
    """
    if (
        not names
        or types is None
        or not isinstance(shapes, list)
        or not len(names) == len(types) == len(shapes)
    ):
        raise bad_request(
            f"names, {dtypes} and shapes must be nonempty lists of equal length.", "names"
        )
    return [
        TensorSpec(name, dtype, shape_of(shape, f"the shape of {shown(name)}", "shapes"))
        for name, dtype, shape in zip(names, types, shapes, strict=True)
    ]


def shape_of(value: object, what: str, field: str) -> tuple[int, ...]:
    """Return a tensor's shape. Raises `ApiError` 400, which names the field."""
    if not isinstance(value, list) or not all(
        type(size) is int and 0 <= size < MOST_SIZE for size in value
    ):
        raise bad_request(f"{what} must be a list of sizes, not {shown(value)}.", field)
    return tuple(value)


# -- routes ----------------------------------------------------------------------------------------

# Key that a route needs. "admin": it changes the engine. "user": it only reads. "all": no key, for
# health checks.
Access = Literal["admin", "user", "all"]


@dataclass(frozen=True)
class Route:
    """Row of a control route.

    Attributes:
        call: Method and path, such as "POST /pause".
        about: Short description of its effect.
        body: Fields of its request.
        access: Key that it needs.
        family: Heading in `/docs`.
        files: Fields that may hold a safetensors file as base64, if the body is not the file
            itself.
    """

    call: str
    about: str
    body: type[ControlRequest] = ControlRequest
    access: Access = "admin"
    family: Literal["weights", "adapters", "state", "administration"] = "state"
    files: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """HTTP method, `GET` or `POST`."""
        return self.call.partition(" ")[0]

    @property
    def path(self) -> str:
        """Path of the route."""
        return self.call.partition(" ")[2]
