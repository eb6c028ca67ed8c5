"""Limits on the time and the size of a template's rendering."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from jinja2 import Undefined
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

MAX_SECONDS = 2.0
MAX_TEXT = 8 * 2**20  # characters of the result, and of any string or list in between
MAX_MADE = 8 * MAX_TEXT  # characters and items that a template makes in total
ITEM = 8  # cost of a list item, in characters
_MAX_BITS = 1024  # largest integer
_OTHER = 32  # cost of a value that is neither text nor a container, in characters

_Value = TypeVar("_Value")


class OverBudget(SecurityError):
    """A template takes too long or makes too much text."""


class Budget(Context):
    """Variables of one rendering, and its remaining time and size.

    Every method raises `OverBudget` before it would exceed a limit.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left = [MAX_MADE]  # shared with derived contexts
        self.count_tokens: Callable[[str], int] | None = None  # control tokens of a text
        self.limit_time(MAX_SECONDS)

    def limit_time(self, seconds: float) -> None:
        """Set the deadline to this many seconds from now."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def derived(self, locals: dict[str, Any] | None = None) -> "Budget":
        """Return the context of an inner scope, with the same budget."""
        context = cast(Budget, super().derived(locals))
        context._seconds, context._deadline, context._left = (
            self._seconds,
            self._deadline,
            self._left,
        )
        context.count_tokens = self.count_tokens
        return context

    def tick(self) -> bool:
        """Check the deadline. Called in every iteration of a loop and in every call."""
        if time.monotonic() > self._deadline:
            raise OverBudget(f"it takes longer than {self._seconds:g} s")
        return True

    def spend(self, size: int) -> None:
        """Take a number of characters or items from the budget."""
        self._left[0] -= max(size, 0)
        if size > MAX_TEXT or self._left[0] < 0:
            too_large()

    def charge(self, value: _Value) -> _Value:
        """Take a new string or list from the budget, and return it. For results of bounded size."""
        if isinstance(value, list):
            self.spend(sum(len(item) + ITEM if isinstance(item, str) else ITEM for item in value))
        elif isinstance(value, str | bytes | tuple):
            self.spend(len(value))
        return value

    def bounded(self, value: _Value) -> _Value:
        """Check the size of a value that will be compared or printed, and return it. A list that
        occurs twice counts twice.
        """
        if isinstance(value, list | tuple | dict):
            self.tick()
            text_size(value)
        return value

    def text(self, value: object) -> str:
        """Return a value as the template prints it."""
        if isinstance(value, str):
            return value
        if not isinstance(value, int | float | None | Undefined | list | tuple | dict):
            raise SecurityError(f"it prints a {type(value).__name__}")
        self.spend(text_size(value))
        return str(value)

    def replaced(self, text: str, old: str, new: str, count: int = -1) -> str:
        """Return `text.replace(old, new, count)`. Raises `SecurityError` if that creates a control
        token in a text.
        """
        self.spend(len(text) + text.count(old) * len(new))
        result = text.replace(old, new, count)
        if self.count_tokens is not None and result != text:
            before = self.count_tokens(text) + text.count(old) * self.count_tokens(new)
            if self.count_tokens(result) > before:
                raise SecurityError("it creates a control token in a message's text")
        return result

    def joined(self, items: Iterable[object], separator: str = "") -> str:
        """Return the result of `~` or `join`."""
        parts = [self.text(item) for item in items]
        self.spend(sum(map(len, parts)) + len(separator) * len(parts))
        return separator.join(parts)


def too_large() -> NoReturn:
    """Raise `OverBudget` for a text or a list that is too large."""
    raise OverBudget(f"it makes more than {MAX_TEXT:,} characters of text")


def text_size(value: object) -> int:
    """Return the approximate length of `str(value)`. Raises `OverBudget` beyond `MAX_TEXT`."""
    size = 0
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str | bytes):
            size += len(item) + 4
        elif isinstance(item, Mapping):
            size += ITEM * (len(item) + 1)
            left += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence) and not isinstance(item, range):
            size += ITEM * (len(item) + 1)
            left += item
        else:
            size += _OTHER
        if size > MAX_TEXT:
            too_large()
    return size


def check_integer(value: object) -> None:
    """Raise `OverBudget` for a long integer, whose arithmetic takes quadratic time."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverBudget(f"it computes with integers of more than {_MAX_BITS} bits")
