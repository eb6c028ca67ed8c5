"""Strict options: a frozen dataclass whose constructor answers an unknown keyword with the package's own error."""

import difflib
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from nano_inference.errors import NanoInferenceError

T = TypeVar("T")


def strict_options(error: type[NanoInferenceError]) -> Callable[[type[T]], type[T]]:
    """Class decorator for a dataclass: unknown or missing options raise `error` and name the nearest option."""

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
