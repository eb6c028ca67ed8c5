"""The filters and tests of chat templates: Jinja's own, under the budget of a rendering."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import Environment, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_indent
from jinja2.tests import TESTS

from nano_inference.text.template_budget import Budget, check_integer

# For web pages, and slow on some texts.
_LEFT_OUT = frozenset({"pprint", "striptags", "urlize", "wordwrap", "xmlattr"})
# They return what they were given or a part of it; what they return costs nothing.
_PASS_ON = frozenset({"attr", "d", "default", "first", "last", "max", "min", "random"})
_MAX_WIDTH = 100_000  # as many items as `range` may have


def install(environment: Environment) -> None:
    """Give the environment these filters and tests."""
    own = (
        _batch,
        _center,
        _format,
        _indent,
        _join,
        _replace,
        _round,
        _slice,
        _string,
        _sum,
        _tojson,
    )
    named = {function.__name__[1:]: function for function in own}
    for name, function in FILTERS.items():
        if name not in _LEFT_OUT:
            environment.filters[name] = named.get(name) or _guarded(function, name in _PASS_ON)
    for name in _LEFT_OUT:
        environment.filters.pop(name, None)
    for name, function in TESTS.items():
        environment.tests[name] = _guarded(function, True)


def _guarded(function: Callable[..., Any], free: bool) -> Callable[..., Any]:
    # Bound arguments keep a template's own loops honest: many filters and tests loop over what they
    # are given.
    @pass_context
    def guarded(context: Budget, value: object, *args: object, **kwargs: object) -> object:
        context.tick()
        for argument in (value, *args, *kwargs.values()):
            check_integer(argument)
            if compares:
                context.bounded(argument)
        result = context.call(function, value, *args, **kwargs)
        check_integer(result)
        return result if free or result is value else context.charge(result)

    compares = function in _COMPARING
    return guarded


_COMPARING = frozenset(
    {FILTERS[name] for name in ("dictsort", "groupby", "max", "min", "sort", "unique")}
    | {TESTS[name] for name in ("eq", "ne", "lt", "le", "gt", "ge", "in")}
)


@pass_context
def _batch(
    context: Budget, value: Iterable[object], linecount: int, fill_with: object = None
) -> object:
    _check_width(linecount)
    return context.call(FILTERS["batch"], value, linecount, fill_with)


@pass_context
def _slice(
    context: Budget, value: Iterable[object], slices: int, fill_with: object = None
) -> object:
    _check_width(slices)
    return context.call(FILTERS["slice"], value, slices, fill_with)


def _check_width(width: int) -> None:
    if width > _MAX_WIDTH:
        raise SecurityError(f"it asks for a width of {width}, more than {_MAX_WIDTH}")


@pass_context
def _center(context: Budget, value: object, width: int = 80) -> str:
    context.spend(width)
    return context.text(value).center(width)


@pass_context
def _format(context: Budget, value: object, *args: object, **kwargs: object) -> str:
    return context.environment.call_binop(context, "%", context.text(value), kwargs or args)  # type: ignore[attr-defined]


@pass_context
def _indent(
    context: Budget, s: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    s = context.text(s)
    context.spend(
        len(s) + (len(s.splitlines()) + 1) * (len(width) if isinstance(width, str) else width)
    )
    return do_indent(s, width, first, blank)


@pass_context
def _join(
    context: Budget, value: Iterable[object], d: object = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = context.environment.call_filter(
            "map", value, kwargs={"attribute": attribute}, context=context
        )
    return context.joined(value, context.text(d))


@pass_context
def _replace(context: Budget, s: object, old: object, new: object, count: int | None = None) -> str:
    text, old, new = (context.text(part) for part in (s, old, new))
    context.spend(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def _round(context: Budget, value: float, precision: int = 0, method: str = "common") -> object:
    check_integer(value)
    if abs(precision) > 300:
        raise SecurityError(f"it rounds to {precision} places")
    return context.call(FILTERS["round"], value, precision, method)


@pass_context
def _string(context: Budget, value: object) -> str:
    return context.text(value)


@pass_context
def _sum(
    context: Budget, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0
) -> float:
    if attribute is not None:
        iterable = context.environment.call_filter(
            "map", iterable, kwargs={"attribute": attribute}, context=context
        )
    numbers = [start, *iterable]
    for number in numbers:
        # adding up lists takes time that grows with their square
        if not isinstance(number, int | float):
            raise SecurityError(f"it adds up a {type(number).__name__}")
        check_integer(number)
    return sum(numbers)


@pass_context
def _tojson(
    context: Budget,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model was not trained on.
    context.bounded(value)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None and separators is None:
        return context.charge(encoder.encode(value))
    if isinstance(indent, int):
        _check_width(indent)
    pieces: list[str] = []
    for piece in encoder.iterencode(value):
        context.spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)
