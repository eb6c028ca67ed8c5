"""What an option may be: one that the class knows, a whole number, a number."""

import difflib
import math
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeGuard, TypeVar

from nano_inference.errors import NanoInferenceError

T = TypeVar("T")


def is_whole(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Whether it is an integer of at least `least`. A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an integer or a float, nan and infinities among them. A bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def strict_options(error: type[NanoInferenceError]) -> Callable[[type[T]], type[T]]:
    """Class decorator for a dataclass: unknown or missing options raise `error` and name the
    nearest option.
    """

    def decorate(cls: type[T]) -> type[T]:
        original: Callable[..., None] = cls.__init__
        names = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]

        @wraps(original)
        def checked_init(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in names:
                    near = difflib.get_close_matches(name, names, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}."
                    raise error(f"{cls.__name__} has no option {name!r}; {hint}")
            try:
                original(self, *args, **options)
            except TypeError as mistake:
                raise error(f"{cls.__name__}: {mistake}") from mistake

        cls.__init__ = checked_init
        return cls

    return decorate
