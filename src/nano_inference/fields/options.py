"""Options of configurations: declared once, as dataclass fields; and checks of their values."""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import Field, field, fields
from functools import wraps
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin

from nano_inference.errors import NanoInferenceError

T = TypeVar("T")


def is_whole(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Whether it is an integer of at least `least`. A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an integer or a float, nan and infinities among them. A bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def option(default: Any, panel: str, help: str, *flags: str, **settings: Any) -> Any:
    """A dataclass field that is also an option of the command line (`cli/field_options.py`).

    Args:
        default: of the field and of the option.
        panel: the group of options among which `--help` lists it.
        help: one line.
        flags: names, such as `--top-p`. None: the field's own.
        settings: `least`: the smallest integer allowed (`check_least`). `size=True`: bytes, such as
            `2GiB`. `each`: the type of a value that may be repeated. `aliases`: other names of its
            choices on the command line. All others are typer's.
    """
    return field(
        default=default, metadata={"panel": panel, "help": help, "flags": flags, **settings}
    )


def check_least(config: Any, error: type[NanoInferenceError]) -> None:
    """Raise `error` for an option with `least` that is not None and no integer of at least that."""
    for each in fields(config):
        value, least = getattr(config, each.name), each.metadata.get("least")
        if least is None or is_whole(value, least) or (value is None and is_optional(each)):
            continue
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise error(f"{each.name}={value!r} must be {wanted}.")


def check_seconds(config: Any, names: Iterable[str], error: type[NanoInferenceError]) -> None:
    """Raise `error` for an option of these that is no positive and finite number."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not 0 < value < math.inf:
            raise error(f"{name}={value!r} must be a positive number of seconds.")


def is_optional(each: "Field[Any]") -> bool:
    """Whether a field of a dataclass may be None."""
    return type(None) in get_args(each.type)


def choices(each: "Field[Any]") -> tuple[object, ...]:
    """The values that a field of literals or of a bool allows; empty for other types."""
    members: tuple[Any, ...] = get_args(each.type) or (each.type,)
    if bool in members:
        return (None, True, False) if is_optional(each) else (True, False)
    if is_optional(each) and get_origin(members[0]) is Literal:
        return (None, *get_args(members[0]))
    return members if get_origin(each.type) is Literal else ()


def strict_options(error: type[NanoInferenceError]) -> Callable[[type[T]], type[T]]:
    """Class decorator for a dataclass: unknown or missing options raise `error` and name the
    nearest option.
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
