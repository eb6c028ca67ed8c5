"""Control requests: a body may be missing, and fields stand in the query or in the JSON."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from nano_inference.fields.options import is_number, is_whole
from nano_inference.remote.operations import Checks
from nano_inference.server.api.shared.json_limits import decode
from nano_inference.server.control import TensorSpec, checked_name
from nano_inference.server.errors import bad_request, shown
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server, read_request

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


@dataclass(frozen=True)
class Fields:
    """What a control request says, in its query or in its JSON: clients differ. The JSON goes
    first.

    Every method takes null as nothing said, and raises `ApiError`, 400, naming the field and its
    value.
    """

    body: Mapping[str, Any]
    query: Mapping[str, Sequence[str]]

    def value(self, name: str) -> Any:
        """As it came; None: it did not."""
        given = self.body.get(name)
        if given is not None:
            return given
        return self.query[name][0] if self.query.get(name) else None

    def _read(self, name: str, read: Callable[[Any], Any], what: str) -> Any:
        """What `read` makes of a value; where that is None, the value is refused."""
        given = self.value(name)
        if given is None:
            return None
        made = read(given)
        if made is None:
            raise bad_request(f"{name} must be {what}, not {shown(given)}.", name)
        return made

    def flag(self, name: str, default: bool) -> bool:
        """True or false; a query says it in words."""
        given: bool | None = self._read(name, _as_flag, "true or false")
        return default if given is None else given

    def text(self, name: str) -> str | None:
        """A string."""
        return self._read(name, lambda given: given if isinstance(given, str) else None, "a string")

    def required_text(self, name: str) -> str:
        """A string that must be there, and not be empty."""
        given = self.text(name)
        if not given:
            raise bad_request(f"{name} is missing; it must be a string.", name)
        return given

    def word(self, name: str, words: Sequence[str], default: str) -> str:
        """One of these words."""
        self.text(name)
        what = f"one of {', '.join(words)}"
        given: str | None = self._read(name, lambda word: word if word in words else None, what)
        return default if given is None else given

    def number(self, name: str, *, least: int, most: int = 2**63) -> int | None:
        """An integer in [least, most]."""

        def read(given: object) -> int | None:
            if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 20:
                given = int(given)
            return given if is_whole(given, least) and given <= most else None

        return self._read(name, read, f"an integer in [{least}, {most}]")

    def required_number(self, name: str, *, least: int, most: int = 2**63) -> int:
        """The same, of a field that must be there."""
        given = self.number(name, least=least, most=most)
        if given is None:
            raise bad_request(f"{name} is missing; it must be an integer.", name)
        return given

    def seconds(self, name: str) -> float | None:
        """A time span, above zero and at most a day."""
        return self._read(name, _as_seconds, "a number of seconds, at most a day")

    def version(self, name: str) -> str | None:
        """The name of a weight version: a string; trainers that count send the number."""
        given: str | None = self._read(
            name,
            lambda given: (
                str(given)
                if isinstance(given, str) or (is_whole(given, 0) and given < 2**63)
                else None
            ),
            "a string, or an integer in [0, 2^63)",
        )
        return (
            given if given is None or is_whole(self.value(name), 0) else checked_name(given, name)
        )

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, of the JSON or of a query that says it again and again; one string is
        a list of one.
        """
        given: Any = self.body.get(name)
        if given is None:
            given = self.query.get(name)
        if isinstance(given, str):
            given = [given]
        if given is None:
            return None
        if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
            raise bad_request(f"{name} must be a list of strings, not {shown(given)}.", name)
        return tuple(given)

    def part(self, name: str) -> "Fields | None":
        """An object of the JSON, read in the same way."""
        given = self.body.get(name)
        if given is None:
            return None
        if not isinstance(given, dict):
            raise bad_request(f"{name} must be an object, not {shown(given)}.", name)
        return Fields(given, {})


def _as_flag(given: object) -> bool | None:
    if isinstance(given, str):
        return _WORDS.get(given.lower())
    return given if isinstance(given, bool) else None


def _as_seconds(given: object) -> float | None:
    if isinstance(given, str):
        with suppress(ValueError):
            given = float(given)
    return float(given) if is_number(given) and 0 < given <= MOST_SECONDS else None


Answer = Callable[[Fields], Awaitable[Any]]  # the JSON of a 200
Fail = Callable[[BaseException], Awaitable[object]]  # told of what ends a request


def add_routes(
    router: APIRouter,
    server: Server,
    method: str,
    answers: Mapping[str, Answer],
    fail: Fail | None = None,
) -> None:
    """Serve each path by what answers it. `fail` is told of what goes wrong with a request, from
    its first byte on.
    """

    def route_of(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            try:
                return json_reply(200, await answer(await fields_of(request, server)))
            except BaseException as problem:
                if fail is not None:
                    await fail(problem)
                raise

        return route

    for path, answer in answers.items():
        router.add_api_route(path, route_of(answer), methods=[method], name=path.strip("/"))


def checks_of(fields: Fields) -> Checks:
    """What an update is to be checked for, as far as the request says it: see
    `Control.begin_update`.
    """
    checks: Checks = {}
    if fields.value("complete") is not None:
        checks["complete"] = fields.flag("complete", default=False)
    if fields.value("check_finite") is not None:
        checks["check_finite"] = fields.flag("check_finite", default=True)
    return checks


def tensors_of(fields: Fields, dtypes: str) -> list[TensorSpec]:
    """What is about to be broadcast, of the lists `names`, `shapes` and what `dtypes` calls the
    third. 400.
    """
    names, types = fields.texts("names"), fields.texts(dtypes)
    shapes: Any = fields.value("shapes")
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
    """A tensor's sizes. Raises `ApiError` 400, which says what is wrong and in which field."""
    if not isinstance(given, list) or not all(
        type(size) is int and 0 <= size < MOST_SIZE for size in given
    ):
        raise bad_request(f"{what} must be a list of sizes, not {shown(given)}.", field)
    return tuple(given)


async def fields_of(request: Request, server: Server) -> Fields:
    """Read a control request. A body that is missing or empty says nothing; unknown fields are
    ignored.

    Raises `ApiError`: 400 where the body is no JSON object, 503 while the server drains or has no
    engine.
    """
    server.lifecycle.require_open()
    config = server.config
    body = await read_request(
        request, server, lambda data, _: decode(data, config) if data.strip() else {}
    )
    query = {name: request.query_params.getlist(name) for name in request.query_params}
    return Fields(body, query)
