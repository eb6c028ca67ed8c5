"""The environment that chat templates run in.

Neither the template, which comes with a checkpoint, nor the clients' messages are trusted. The
template sees plain data in Jinja's immutable sandbox, within a budget. Every loop iteration and
every call checks the time, and every new string or list is charged before it is made. No thread or
signal has to end a template from outside.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import Environment, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS

from nano_inference.text.budget import (
    ITEM,
    MAX_SECONDS,
    MAX_TEXT,
    Budget,
    check_integer,
    text_size,
    too_large,
)

# for web pages, and slow on some texts
_LEFT_OUT = frozenset({"pprint", "striptags", "urlize", "wordwrap", "xmlattr"})
# these return their argument or a part of it, which is free
_PASS_ON = frozenset({"attr", "d", "default", "first", "last", "max", "min", "random"})
_MAX_WIDTH = 100_000  # the limit of `range`


def _install_filters(environment: Environment) -> None:
    """Install guarded filters and tests in the environment."""
    filters = (
        _center,
        _format,
        _indent,
        _join,
        _replace,
        _string,
        _sum,
        _tojson,
    )
    named = {function.__name__[1:]: function for function in filters}
    for name, function in FILTERS.items():
        if name not in _LEFT_OUT:
            environment.filters[name] = named.get(name) or _guarded(function, name in _PASS_ON)
    for name in _LEFT_OUT:
        environment.filters.pop(name, None)
    for name, function in TESTS.items():
        environment.tests[name] = _guarded(function, True)


def _guarded(function: Callable[..., Any], free: bool) -> Callable[..., Any]:
    # many filters and tests loop over their arguments, so the arguments are bounded too
    @pass_context
    def guarded(context: Budget, value: object, *args: object, **kwargs: object) -> object:
        context.tick()
        for argument in (value, *args, *kwargs.values()):
            check_integer(argument)
            if compares:
                context.bounded(argument)
        if widest is not None:
            name, most = widest
            width = args[0] if args else kwargs.get(name)
            if isinstance(width, int):
                _check_width(abs(width), most)
        result = context.call(function, value, *args, **kwargs)
        check_integer(result)
        return result if free or result is value else context.charge(result)

    compares, widest = function in _COMPARING, _WIDEST.get(function)
    return guarded


_COMPARING = frozenset(
    {FILTERS[name] for name in ("dictsort", "groupby", "max", "min", "sort", "unique")}
    | {TESTS[name] for name in ("eq", "ne", "lt", "le", "gt", "ge", "in")}
)


# filter -> name and limit of its first argument
_WIDEST: Mapping[Callable[..., Any], tuple[str, int]] = {
    FILTERS["batch"]: ("linecount", _MAX_WIDTH),
    FILTERS["slice"]: ("slices", _MAX_WIDTH),
    FILTERS["round"]: ("precision", 300),
}


def _check_width(width: int, most: int = _MAX_WIDTH) -> None:
    if width > most:
        raise SecurityError(f"its width of {width} exceeds {most}")


@pass_context
def _center(context: Budget, value: object, width: int = 80) -> str:
    context.spend(width)
    return context.text(value).center(width)


@pass_context
def _format(context: Budget, value: object, *args: object, **kwargs: object) -> str:
    environment = cast(_Environment, context.environment)
    return environment.call_binop(context, "%", context.text(value), kwargs or args)


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
    return context.replaced(text, old, new, -1 if count is None else count)


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
        # adding lists takes quadratic time
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
    # Jinja's filter escapes HTML, which models were not trained on
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


def render(
    template: str,
    variables: Mapping[str, object],
    max_seconds: float = MAX_SECONDS,
    count_tokens: Callable[[str], int] | None = None,
) -> str:
    """Render a template. Any exception is a fault of the template or the variables.

    Args:
        template: Jinja source.
        variables: Name -> strings, numbers, lists, and mappings of these. They are not changed.
        max_seconds: Time limit.
        count_tokens: Function that counts the control tokens in a text. With it, the template must
            not create control tokens from message text.
    """
    compiled = _compile(template)
    context = cast(Budget, compiled.new_context(dict(variables)))
    context.limit_time(max_seconds)
    context.count_tokens = count_tokens
    pieces: list[str] = []
    size = 0
    for piece in compiled.root_render_func(context):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_TEXT:
            too_large()
    return "".join(pieces)


def global_names() -> frozenset[str]:
    """Return the names of Jinja's global variables."""
    return frozenset(_compile("").environment.globals)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    return _Environment().from_string(template)


class _GenerationBlock(Extension):
    """Tag `{% generation %}`, which marks the assistant's words for training. Renders its
    content.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ).set_lineno(line)


class _CountedCode(CodeGenerator):
    """Code generator that adds budget checks."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("context.tick()")  # the bodies of loops and macros are blocks
        super().blockvisit(nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # runs for each item, even if none reaches the body
            tick = nodes.Call(
                nodes.EnvironmentAttribute("tick"), [nodes.ContextReference()], [], None, None
            )
            node.test = nodes.And(tick, node.test)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("context.joined((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._bounded(node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._bounded(operand.expr, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for pair in node.items:
            self._bounded(pair.key, frame)  # will be hashed
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def _bounded(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write("context.bounded(")
        self.visit(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("context.charge(" if is_slice else "(")
        super().visit_Getitem(node, frame)
        self.write(")")


def _concat(pieces: Iterable[str]) -> str:
    """Join the output of a macro or a `set` block."""
    pieces = list(pieces)
    if sum(map(len, pieces)) > MAX_TEXT:
        too_large()
    return "".join(pieces)


@pass_context
def _finalize(context: Budget, value: object) -> str:
    return context.text(value)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CountedCode
    context_class = Budget
    concat = staticmethod(_concat)
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        # not optimized: constant folding would bypass the budget
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=_finalize,
            optimized=False,
        )
        _install_filters(self)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def tick(self, context: Budget) -> bool:
        return context.tick()

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_integer(left)
        check_integer(right)
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                check_integer(1 << min(max(left.bit_length() * right, 0), 10_000))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right, _PERCENT)
        elif operator in "+*" and (size := _size_of_result(operator, left, right)):
            context.spend(size)
        result = super().call_binop(context, operator, left, right)
        return context.charge(result) if operator == "%" else result

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        context.tick()
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if name in _REFUSED and isinstance(owner, str | bytes | int | type):
            raise SecurityError(f"it calls {name}")
        if isinstance(owner, str | bytes):
            if name == "join":
                args = tuple(list(argument) for argument in args)
            # jinja2's own
            named = {key: value for key, value in kwargs.items() if not key.startswith("_")}
            if name == "replace" and isinstance(owner, str):
                return context.replaced(owner, *args, **named)
            if estimate := _GROWING.get(name):
                context.spend(estimate(owner, *args, **named))
        for argument in args:
            if isinstance(argument, tuple) or function is dict or name in _COMPARING_METHODS:
                context.bounded(argument)
        result = super().call(context, function, *args, **kwargs)
        # a mapping returns values that exist already
        return result if isinstance(owner, Mapping) else context.charge(result)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            text_size(argument)  # will be hashed
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        method = super().wrap_str_format(value)
        if method is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__.replace("{{", ""), (args, kwargs), _BRACES)
            return method(*args, **kwargs)

        return checked


_REFUSED = frozenset({"fromkeys", "maketrans", "to_bytes", "translate"})
_COMPARING_METHODS = frozenset({"changed", "count", "index"})
_GROWING: Mapping[str, Callable[..., int]] = {
    "center": lambda _, width, *__: width,
    "ljust": lambda _, width, *__: width,
    "rjust": lambda _, width, *__: width,
    "zfill": lambda _, width: width,
    "expandtabs": lambda text, tabsize=8: len(text) + len(text) * tabsize,
    "replace": lambda text, old, new, *_, **__: len(text) + text.count(old) * len(new),
    "join": lambda text, items: sum(map(len, items)) + len(text) * len(items),
}


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    """Return the length of the string or list that `+` or `*` would make, or 0 for other types."""
    if operator == "+":
        return _length(left) + _length(right)
    if isinstance(right, int):
        return _length(left) * right
    return _length(right) * left if isinstance(left, int) else 0


def _length(value: Any) -> int:
    if isinstance(value, list | tuple):
        return ITEM * len(value)
    return len(value) if isinstance(value, str | bytes) else 0


# the specification in a placeholder, for the two kinds of format strings
_PERCENT = re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*]*)")
_BRACES = re.compile(r"\{[^{}:]*:?([^}]*)")


def _check_format(template: str, arguments: object, placeholder: re.Pattern[str]) -> None:
    """Check the widths in a format string, and the size of its result."""
    specs = placeholder.findall(template)
    widths = [int(digits[:9]) for spec in specs for digits in re.findall("[0-9]+", spec)]
    if max(widths, default=0) >= 10_000 or any("*" in spec or "{" in spec for spec in specs):
        raise SecurityError("it formats text to a width that is computed or too large")
    if len(template) + len(specs) * text_size(arguments) + sum(widths) > MAX_TEXT:
        too_large()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200:
        raise SecurityError("it formats a date with more than 200 characters")
    return datetime.now().strftime(pattern)
