"""The budget of a rendering: how much time a template may take, and how much text it may make."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from jinja2 import Undefined
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

MAX_SECONDS = 2.0
MAX_TEXT = 8 * 2**20  # characters of a rendered conversation, and of any string or list on the way
MAX_MADE = 8 * MAX_TEXT  # characters and items of all that a template makes, one after another
ITEM = 8  # what an item of a list counts, in characters
_MAX_BITS = 1024  # of an integer
_OTHER = 32  # characters of anything that is neither text nor holds something

_Value = TypeVar("_Value")


class OverBudget(SecurityError):
    """A template takes too long or makes too much."""


class Budget(Context):
    """The variables of one rendering, and what is left of its time and size.

    Every method raises `OverBudget` once more than the limits is asked for, before it is done.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left = [MAX_MADE]  # shared with what is derived from this context
        self.count_tokens: Callable[[str], int] | None = None  # control tokens of a text
        self.limit_time(MAX_SECONDS)

    def limit_time(self, seconds: float) -> None:
        """So much time from now on."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def derived(self, locals: dict[str, Any] | None = None) -> "Budget":
        """A context of an inner scope, which draws on the same budget."""
        context = cast(Budget, super().derived(locals))
        context._seconds, context._deadline, context._left = (
            self._seconds,
            self._deadline,
            self._left,
        )
        context.count_tokens = self.count_tokens
        return context

    def tick(self) -> bool:
        """Called in every turn of every loop and in every call."""
        if time.monotonic() > self._deadline:
            raise OverBudget(f"it takes longer than {self._seconds:g} s")
        return True

    def spend(self, size: int) -> None:
        """Ask for that many characters or items."""
        self._left[0] -= max(size, 0)
        if size > MAX_TEXT or self._left[0] < 0:
            too_large()

    def charge(self, value: _Value) -> _Value:
        """Account for a string or a list that has been made, no longer than what it was made of."""
        if isinstance(value, list):
            self.spend(sum(len(item) + ITEM if isinstance(item, str) else ITEM for item in value))
        elif isinstance(value, str | bytes | tuple):
            self.spend(len(value))
        return value

    def bounded(self, value: _Value) -> _Value:
        """`value`, which is to be compared or printed: small also as a tree, where lists hold the
        same list twice.
        """
        if isinstance(value, list | tuple | dict):
            self.tick()
            text_size(value)
        return value

    def text(self, value: object) -> str:
        """`value` as the template prints it."""
        if isinstance(value, str):
            return value
        if not isinstance(value, int | float | None | Undefined | list | tuple | dict):
            raise SecurityError(f"it prints a {type(value).__name__}")
        self.spend(text_size(value))
        return str(value)

    def replaced(self, text: str, old: str, new: str, count: int = -1) -> str:
        """What `replace` makes. Raises `SecurityError` where a control token comes about by what it
        takes out of a text.
        """
        self.spend(len(text) + text.count(old) * len(new))
        result = text.replace(old, new, count)
        if self.count_tokens is not None and result != text:
            own = self.count_tokens(text) + text.count(old) * self.count_tokens(new)
            if self.count_tokens(result) > own:
                raise SecurityError("it makes a control token of a message's text")
        return result

    def joined(self, items: Iterable[object], separator: str = "") -> str:
        """What `~` and `join` make."""
        parts = [self.text(item) for item in items]
        self.spend(sum(map(len, parts)) + len(separator) * len(parts))
        return separator.join(parts)


def too_large() -> NoReturn:
    """Raise the error of a text, string or list that grows too large."""
    raise OverBudget(f"it makes more than {MAX_TEXT:,} characters of text")


def text_size(value: object) -> int:
    """About how many characters `str(value)` has. `OverBudget` beyond `MAX_TEXT`."""
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
    """Arithmetic on long integers takes time that grows with their square."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverBudget(f"it computes with integers of more than {_MAX_BITS} bits")
