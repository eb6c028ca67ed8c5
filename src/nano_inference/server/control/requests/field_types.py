"""`ControlRequest`: the fields of a control request; `Route`: the row of a control route. Checks of
bodies, `/openapi.json`, `/docs` and a table of docs/server.md are made from them.
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
MOST_SIZE = 2**48  # of a tensor, along one of its axes

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
    """The fields of a request, from its JSON or its query. A body may be missing, null counts as
    missing, and unknown fields are ignored.

    Attributes:
        missing: name -> the error for that missing field, in place of the usual one.
        needs: the error for any missing field, in place of both.
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
    """Return the request of a body and a query; a field of the body hides one of the query. Raises
    `ApiError`, 400, which names the field and its value.
    """
    given: dict[str, Any] = {}
    for name in model.model_fields:
        if (value := body.get(name)) is not None:
            given[name] = value
        elif said := query.get(name):
            given[name] = _Query(said)
    try:
        return model.model_validate(given)
    except ValidationError as problem:  # the fields' own checks raise `ApiError`
        name = str(problem.errors(include_url=False)[0]["loc"][0])
    if model.needs:
        raise bad_request(model.needs)
    if name in model.missing:
        raise bad_request(model.missing[name], name)
    kind = model.model_json_schema()["properties"][name]["type"]
    raise bad_request(f"{name} is missing; it must be {_NOUNS[kind]}.", name)


# -- types of fields -------------------------------------------------------------------------------


def checked(given: Any, info: ValidationInfo, what: str, read: Callable[[Any], Any]) -> Any:
    """Return `read(given)`. If that is None, raise `ApiError`: the field must be `what`."""
    given = given[0] if isinstance(given, _Query) else given
    made = read(given)
    if made is None:
        name = info.field_name
        raise bad_request(f"{name} must be {what}, not {shown(given)}.", name)
    return made


def read_by(what: str, read: Callable[[Any], Any]) -> PlainValidator:
    """Return a validator that reads a field by `read`; see `checked`."""

    def check(given: Any, info: ValidationInfo) -> Any:
        return checked(given, info, what, read)

    return PlainValidator(check)


def _as_text(given: object) -> str | None:
    return given if isinstance(given, str) else None


def _as_required(given: Any, info: ValidationInfo) -> str:
    if not (text := checked(given, info, "a string", _as_text)):
        raise PydanticCustomError("missing", "it is empty")
    return text


def _as_flag(given: object) -> bool | None:
    if isinstance(given, str):
        return _WORDS.get(given.lower())
    return given if isinstance(given, bool) else None


def _as_seconds(given: object) -> float | None:
    if isinstance(given, str):
        with suppress(ValueError):
            given = float(given)
    return float(given) if is_number(given) and 0 < given <= MOST_SECONDS else None


def _as_version(given: Any, info: ValidationInfo) -> str:
    def read(value: object) -> object:
        is_number = is_whole(value, 0) and value < 2**63
        return value if is_number or isinstance(value, str) else None

    version: str | int = checked(given, info, "a string, or an integer in [0, 2^63)", read)
    return (
        checked_name(version, info.field_name or "") if isinstance(version, str) else str(version)
    )


def _as_texts(given: Any, info: ValidationInfo) -> tuple[str, ...]:
    """Strings of a JSON list, or of a query that repeats a name. One string is a list of one."""
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        name = info.field_name
        raise bad_request(f"{name} must be a list of strings, not {shown(given)}.", name)
    return tuple(given)


_STRING, _BOOLEAN = WithJsonSchema({"type": "string"}), WithJsonSchema({"type": "boolean"})
_STRINGS = WithJsonSchema({"type": "array", "items": {"type": "string"}})

Text = Annotated[str, read_by("a string", _as_text), _STRING]
RequiredText = Annotated[str, PlainValidator(_as_required), _STRING]  # and not empty
Flag = Annotated[bool, read_by("true or false", _as_flag), _BOOLEAN]
# a time span, above zero and at most a day
Seconds = Annotated[
    float,
    read_by("a number of seconds, at most a day", _as_seconds),
    WithJsonSchema({"type": "number"}),
]
# the name of a weight version: a string; trainers that count send the number
Version = Annotated[str, PlainValidator(_as_version), _STRING]
Texts = Annotated[tuple[str, ...], PlainValidator(_as_texts), _STRINGS]
Anything = Annotated[Any, read_by("anything", lambda given: given), WithJsonSchema({})]
Mapped = Annotated[
    Mapping[str, Any],
    read_by("an object", lambda given: given if isinstance(given, dict) else None),
    WithJsonSchema({"type": "object"}),
]


def whole(least: int, most: int = 2**63) -> PlainValidator:
    """Return a validator of integers in [least, most]; a query has them as digits."""
    return read_by(*_whole(least, most))


def _whole(least: int, most: int) -> tuple[str, Callable[[Any], int | None]]:
    def read(given: object) -> int | None:
        if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 20:
            given = int(given)
        return given if is_whole(given, least) and given <= most else None

    return f"an integer in [{least}, {most}]", read


INTEGER = WithJsonSchema({"type": "integer"})
Port = Annotated[int, whole(1, 65535), INTEGER]
WorldSize = Annotated[int, whole(2, 2**16), INTEGER]


def _as_rank(given: Any, info: ValidationInfo) -> int:
    return checked(given, info, *_whole(1, info.data.get("world_size", 2**16) - 1))


# of the engine in a group whose rank 0 is the trainer; declared after `world_size`
Rank = Annotated[int, PlainValidator(_as_rank), INTEGER]


def word(known: Sequence[str], what: str = "") -> PlainValidator:
    """Return a validator of one of these words."""
    what = what or f"one of {', '.join(known)}"

    def check(given: Any, info: ValidationInfo) -> str:
        text = checked(given, info, "a string", _as_text)
        return checked(text, info, what, lambda text: text if text in known else None)

    return PlainValidator(check)


def words(known: Sequence[str]) -> WithJsonSchema:
    """Return the JSON schema of one of these words."""
    return WithJsonSchema({"type": "string", "enum": [*known]})


def among(known: Sequence[str], told: Sequence[str]) -> AfterValidator:
    """Return a validator that rejects strings of a list that are not `known`. The error names
    `told`.
    """

    def check(given: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if unknown := [each for each in given if each not in known]:
            name = info.field_name
            raise bad_request(
                f"{name} holds {shown(unknown[0])}; there are {', '.join(told)}.", name
            )
        return given

    return AfterValidator(check)


def only(
    harmless: Sequence[object], why: str, *, status: int = 501, param: str | None = None
) -> AfterValidator:
    """Return a validator that rejects every value but these, with `why`."""

    def check(given: Any) -> Any:
        if given not in harmless:
            raise ApiError(status, why, param)
        return given

    return AfterValidator(check)


def part(model: type[ControlRequest]) -> PlainValidator:
    """Return a validator of an object of the JSON, read by `read_fields`."""
    return read_by(
        "an object",
        lambda given: read_fields(model, given, {}) if isinstance(given, dict) else None,
    )


# -- fields of requests for updates ----------------------------------------------------------------


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor that a trainer is about to broadcast: name as in the checkpoint, `"bfloat16"`,
    shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class CheckFields(ControlRequest):
    """Checks of an update, chosen when it begins; see `Updates.begin`."""

    complete: Flag = False
    check_finite: Flag = True

    @property
    def checks(self) -> Checks:
        """The checks that the request names."""
        checks: Checks = {}
        if "complete" in self.model_fields_set:
            checks["complete"] = self.complete
        if "check_finite" in self.model_fields_set:
            checks["check_finite"] = self.check_finite
        return checks


def tensors_of(
    names: Sequence[str] | None, types: Sequence[str] | None, shapes: object, dtypes: str
) -> list[TensorSpec]:
    """Return the tensors that the trainer is about to broadcast, from the lists `names` and
    `shapes`, and from the list of dtypes that the client calls `dtypes`. Raises `ApiError`, 400.
    """
    if (
        not names
        or types is None
        or not isinstance(shapes, list)
        or not len(names) == len(types) == len(shapes)
    ):
        raise bad_request(
            f"names, {dtypes} and shapes must be lists of one length, and not empty.", "names"
        )
    return [
        TensorSpec(name, dtype, shape_of(shape, f"the shape of {shown(name)}", "shapes"))
        for name, dtype, shape in zip(names, types, shapes, strict=True)
    ]


def shape_of(given: object, what: str, field: str) -> tuple[int, ...]:
    """Return the sizes of a tensor. Raises `ApiError`, 400, which names the field."""
    if not isinstance(given, list) or not all(
        type(size) is int and 0 <= size < MOST_SIZE for size in given
    ):
        raise bad_request(f"{what} must be a list of sizes, not {shown(given)}.", field)
    return tuple(given)


# -- routes ----------------------------------------------------------------------------------------

# The key that a route needs. "admin": it changes the engine. "user": it only reads. "all": none, as
# for questions about health.
Access = Literal["admin", "user", "all"]


@dataclass(frozen=True)
class Route:
    """A control route.

    Attributes:
        call: method and path, as in "POST /pause".
        about: a few words on its effect.
        body: its fields.
        access: the key that it needs.
        family: its heading in `/docs`.
        files: fields that may hold a safetensors file as base64, if the file is not the body.
    """

    call: str
    about: str
    body: type[ControlRequest] = ControlRequest
    access: Access = "admin"
    family: Literal["weights", "adapters", "state", "administration"] = "state"
    files: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """The HTTP method, `GET` or `POST`."""
        return self.call.partition(" ")[0]

    @property
    def path(self) -> str:
        """The path of the route."""
        return self.call.partition(" ")[2]
