"""Options of configurations, declared once as dataclass fields, and checks of their values."""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import Field, field, fields
from functools import wraps
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin

from nano_inference.errors import NanoInferenceError

T = TypeVar("T")


def is_whole(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Return True for an integer of at least `least`. A bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return True for an integer or a float, also nan and infinities. A bool does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def option(default: Any, panel: str, help: str, *flags: str, **settings: Any) -> Any:
    """Declare a dataclass field that is also a command-line option (`cli/field_options.py`).

    Args:
        default: Default of the field and the option.
        panel: Group of options in `--help`.
        help: Help text of one line.
        flags: Option names, such as `--top-p`. Without any, the name of the field is used.
        settings: `least` is the smallest integer allowed (`check_least`). `size=True` accepts bytes
            such as `2GiB`, `duration=True` seconds such as `10m`. `each` is the type of a
            repeatable value. `aliases` are other names of its choices on the command line. All
            other settings are typer's.
    """
    return field(
        default=default, metadata={"panel": panel, "help": help, "flags": flags, **settings}
    )


def check_least(config: Any, error: type[NanoInferenceError]) -> None:
    """Raise `error` if an option with `least` is not an integer of at least that value. An optional
    field may also be None.
    """
    for option_field in fields(config):
        value, least = getattr(config, option_field.name), option_field.metadata.get("least")
        if least is None or is_whole(value, least) or (value is None and is_optional(option_field)):
            continue
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise error(f"{option_field.name}={value!r} must be {wanted}.")


def check_seconds(config: Any, names: Iterable[str], error: type[NanoInferenceError]) -> None:
    """Raise `error` if one of the named options is not a positive, finite number."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not 0 < value < math.inf:
            raise error(f"{name}={value!r} must be a positive number of seconds.")


def is_optional(option_field: "Field[Any]") -> bool:
    """Return True if a dataclass field may be None."""
    return type(None) in get_args(option_field.type)


def choices(option_field: "Field[Any]") -> tuple[object, ...]:
    """Return the values allowed by a field of literals or bools, or () for other types."""
    members: tuple[Any, ...] = get_args(option_field.type) or (option_field.type,)
    if bool in members:
        return (None, True, False) if is_optional(option_field) else (True, False)
    if is_optional(option_field) and get_origin(members[0]) is Literal:
        return (None, *get_args(members[0]))
    return members if get_origin(option_field.type) is Literal else ()


def strict_options(error: type[NanoInferenceError]) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass so that unknown or missing options raise `error`, which suggests the
    closest option name.
    """

    def decorate(cls: type[T]) -> type[T]:
        original: Callable[..., None] = cls.__init__
        names = [each.name for each in fields(cls)]  # pyright: ignore[reportArgumentType]

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
