"""The environment that chat templates run in.

A template comes with a checkpoint and renders what clients send, so neither is trusted. It sees
plain data in Jinja's immutable sandbox, and everything it does is counted: time by a look at the
clock in each loop's turn and each call, memory by asking before a string or a list is made. There
is no thread or signal that would end it from outside.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nano_inference.text import template_filters
from nano_inference.text.template_budget import (
    ITEM,
    MAX_SECONDS,
    MAX_TEXT,
    Budget,
    check_integer,
    text_size,
    too_large,
)


def render(template: str, variables: Mapping[str, object], max_seconds: float = MAX_SECONDS) -> str:
    """The template's text. Any exception is the template's or the variables' fault.

    Args:
        template: Jinja source.
        variables: name -> strings, numbers, lists, mappings of these. They are not changed.
        max_seconds: how long it may take.
    """
    compiled = _compile(template)
    context = cast(Budget, compiled.new_context(dict(variables)))
    context.limit_time(max_seconds)
    pieces: list[str] = []
    size = 0
    for piece in compiled.root_render_func(context):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_TEXT:
            too_large()
    return "".join(pieces)


def global_names() -> frozenset[str]:
    """The names that every template knows without being given them."""
    return frozenset(_compile("").environment.globals)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    return _Environment().from_string(template)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training. Here it renders as what it
    holds.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ).set_lineno(line)


class _CountedCode(CodeGenerator):
    """Python code of a template that asks the budget."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("context.tick()")  # the bodies of loops and macros are blocks
        super().blockvisit(nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        if node.test is not None:  # runs for each item, also where none reaches the body
            tick = nodes.Call(
                nodes.EnvironmentAttribute("tick"), [nodes.ContextReference()], [], None, None
            )
            node.test = nodes.And(tick, node.test)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        self.write("context.joined((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        self.write("(")
        self._bounded(node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._bounded(operand.expr, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
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

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("context.charge(" if is_slice else "(")
        super().visit_Getitem(node, frame)
        self.write(")")


def _concat(pieces: Iterable[str]) -> str:
    """What a macro's or a `set` block's body has put out."""
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
        # Not optimised: folding constants would do at once, unasked, what is counted later.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=_finalize,
            optimized=False,
        )
        template_filters.install(self)
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
            if estimate := _GROWING.get(name):
                # jinja2's own
                named = {key: value for key, value in kwargs.items() if not key.startswith("_")}
                context.spend(estimate(owner, *args, **named))
        for argument in args:
            if isinstance(argument, tuple) or function is dict or name in _COMPARING:
                context.bounded(argument)
        result = super().call(context, function, *args, **kwargs)
        # What a mapping returns lay in it before.
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
_COMPARING = frozenset({"changed", "count", "index"})
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
    """The length of a string or list that `+` or `*` would make; 0 where it makes something
    else.
    """
    if operator == "+":
        return _length(left) + _length(right)
    if isinstance(right, int):
        return _length(left) * right
    return _length(right) * left if isinstance(left, int) else 0


def _length(value: Any) -> int:
    if isinstance(value, list | tuple):
        return ITEM * len(value)
    return len(value) if isinstance(value, str | bytes) else 0


# What stands between a placeholder's mark and its end, for the two kinds of format strings.
_PERCENT = re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*]*)")
_BRACES = re.compile(r"\{[^{}:]*:?([^}]*)")


def _check_format(template: str, arguments: object, placeholder: re.Pattern[str]) -> None:
    """A format string can ask for any width, and for the same argument any number of times."""
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
        raise SecurityError("it formats a date by more than 200 characters")
    return datetime.now().strftime(pattern)
