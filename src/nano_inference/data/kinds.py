"""Conversion of each field type to plain Python values and Arrow types.

The package's docstring has the table.
"""

import base64
import collections.abc
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nano_inference.errors import InvalidRequest
from nano_inference.types import SamplingParams, TrainingSample

# Fields that records in files of older releases lack. They get their defaults.
_ADDED: Mapping[Any, frozenset[str]] = {
    SamplingParams: frozenset(
        (
            *("thinking_token_budget", "bad_words", "logits_processors", "logprob_token_ids"),
            *("prompt_logprob_token_ids", "prompt_logprob_start", "receipt"),
        )
    )
}
_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


class Mismatch(Exception):
    """Plain value that does not have the field's type. The caller adds row and column."""


class Kind(NamedTuple):
    """Conversion of one type.

    Attributes:
        to_plain: Function from a value to numbers, strings, None, lists and dicts.
        from_plain: Inverse of `to_plain`. Raises `Mismatch`.
        arrow: Function from the module pyarrow to the column's type.
        is_scalar: True if a list of such values is already plain.
    """

    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]
    arrow: Callable[[Any], Any]
    is_scalar: bool = False


def _float_from(plain: Any) -> float:
    if plain is None:
        return math.nan
    if isinstance(plain, str) and plain in _INFINITIES:
        return _INFINITIES[plain]
    if isinstance(plain, int | float) and not isinstance(plain, bool):
        try:
            return float(plain)
        except OverflowError:
            pass
    raise Mismatch(f"{plain!r} is not a number.")


# a caller's 1 becomes 1.0 in a column of floats
_FLOAT = Kind(float, _float_from, lambda pa: pa.float64(), is_scalar=True)


def _scalar(type_: type, choices: tuple[str, ...] | None = None) -> Kind:
    def from_plain(plain: Any) -> Any:
        if type(plain) is not type_:
            raise Mismatch(f"{plain!r} is not of type {type_.__name__}.")
        if choices is not None and plain not in choices:
            raise Mismatch(f"{plain!r} is not one of {', '.join(choices)}.")
        return plain

    def arrow(pa: Any) -> Any:
        return {int: pa.int64(), str: pa.string(), bool: pa.bool_()}[type_]

    return Kind(lambda value: value, from_plain, arrow, is_scalar=True)


def _bytes_from(plain: Any) -> bytes:
    try:
        return base64.b64decode(plain, validate=True)
    except (TypeError, ValueError):
        raise Mismatch(f"{plain!r} is not base64.") from None


_BYTES = Kind(
    lambda value: base64.b64encode(value).decode("ascii"), _bytes_from, lambda pa: pa.string()
)


def _list(item: Kind) -> Kind:
    def from_plain(plain: Any) -> Any:
        if not isinstance(plain, list | tuple):
            raise Mismatch(f"{plain!r} is not a list.")
        return tuple(map(item.from_plain, plain))

    return Kind(
        list if item.is_scalar else lambda value: list(map(item.to_plain, value)),
        from_plain,
        lambda pa: pa.list_(item.arrow(pa)),
    )


def _set(item: Kind) -> Kind:
    """Return the conversion of a set of scalars, written in ascending order."""
    items = _list(item)

    def from_plain(plain: Any) -> Any:
        values = items.from_plain(plain)
        if len(set(values)) < len(values):
            raise Mismatch(f"{plain!r} contains a duplicate item.")
        return frozenset(values)

    return Kind(sorted, from_plain, items.arrow)


def _table(key: Kind, value: Kind) -> Kind:
    """Return the conversion of a mapping to a list of objects.

    JSON and Parquet only support strings as keys.
    """

    def to_plain(table: Any) -> Any:
        return [{"key": key.to_plain(k), "value": value.to_plain(v)} for k, v in table.items()]

    def from_plain(plain: Any) -> Any:
        if not isinstance(plain, list) or not all(
            isinstance(e, dict) and e.keys() == {"key", "value"} for e in plain
        ):
            raise Mismatch(f"{plain!r} is not a list of objects with key, value.")
        table = {key.from_plain(entry["key"]): value.from_plain(entry["value"]) for entry in plain}
        if len(table) < len(plain):
            raise Mismatch(f"{plain!r} contains a duplicate key.")
        return table

    return Kind(
        to_plain,
        from_plain,
        lambda pa: pa.list_(pa.struct([("key", key.arrow(pa)), ("value", value.arrow(pa))])),
    )


def _record(make: Any) -> Kind:
    """Return the conversion of a dataclass or a named tuple."""
    kinds = {name: kind_of(hint) for name, hint in typing.get_type_hints(make).items()}
    added = _ADDED.get(make, frozenset())

    def from_plain(plain: Any) -> Any:
        if not isinstance(plain, dict) or not kinds.keys() - added <= plain.keys() <= kinds.keys():
            raise Mismatch(f"{plain!r} is not an object with {', '.join(kinds)}.")
        try:
            return make(**{name: kinds[name].from_plain(value) for name, value in plain.items()})
        except InvalidRequest as problem:  # some records validate their fields
            raise Mismatch(str(problem)) from problem

    return Kind(
        lambda value: {n: kind.to_plain(getattr(value, n)) for n, kind in kinds.items()},
        from_plain,
        lambda pa: pa.struct([(name, column_type(pa, name, kind)) for name, kind in kinds.items()]),
    )


def _either(kinds: Mapping[str, Kind]) -> Kind:
    """Return the conversion of a union of scalars to an object with a key for each type.

    Only the value's type is set, because a column has a single type. The other keys are None.
    """

    def from_plain(plain: Any) -> Any:
        names = (
            [name for name, item in plain.items() if item is not None]
            if isinstance(plain, dict)
            else []
        )
        if len(names) != 1 or plain.keys() != kinds.keys():
            raise Mismatch(
                f"{plain!r} is not an object with one of {', '.join(kinds)}, and null for "
                "the others."
            )
        return kinds[names[0]].from_plain(plain[names[0]])

    return Kind(
        lambda value: {name: value if type(value).__name__ == name else None for name in kinds},
        from_plain,
        lambda pa: pa.struct([(name, kind.arrow(pa)) for name, kind in kinds.items()]),
    )


def _optional(kind: Kind) -> Kind:
    return Kind(
        lambda value: None if value is None else kind.to_plain(value),
        lambda plain: None if plain is None else kind.from_plain(plain),
        kind.arrow,
    )


def column_type(pa: Any, name: str, kind: Kind) -> Any:
    """Return the Arrow type of a field. Seeds are unsigned."""
    return pa.uint64() if name == "seed" else kind.arrow(pa)


def kind_of(annotation: Any) -> Kind:
    """Return the conversion of a type. Raises `TypeError` if it is not supported."""
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case None if annotation is float:
            return _FLOAT
        case None if annotation is bytes:
            return _BYTES
        case None if annotation in (int, str, bool):
            return _scalar(annotation)
        case None if dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields"):
            return _record(annotation)
        case typing.Literal:
            return _scalar(str, arguments)
        case origin if origin is tuple and arguments[1:] == (...,):
            return _list(kind_of(arguments[0]))
        case origin if origin is frozenset:
            return _set(kind_of(arguments[0]))
        case collections.abc.Mapping:
            return _table(kind_of(arguments[0]), kind_of(arguments[1]))
        case typing.Union | types.UnionType:
            return _union(arguments)
        case _:
            raise TypeError(f"a field of type {annotation} has no column type")


def _union(members: tuple[Any, ...]) -> Kind:
    some = [member for member in members if member is not type(None)]
    kind = (
        kind_of(some[0])
        if len(some) == 1
        else _either({member.__name__: kind_of(member) for member in some})
    )
    if len(some) == len(members):
        return kind
    if kind is _FLOAT:
        raise TypeError(
            "None and nan are indistinguishable in JSON; use another type than float | None"
        )
    return _optional(kind)


def strict(plain: Any) -> Any:
    """Replace floats that are not JSON numbers.

    JSON readers accept null among numbers, but few accept NaN.
    """
    if isinstance(plain, float) and not math.isfinite(plain):
        return None if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
    if isinstance(plain, list):
        return [strict(item) for item in plain]
    if isinstance(plain, dict):
        return {key: strict(item) for key, item in plain.items()}
    return plain


# Columns: all fields of a sample, in order.
FIELDS = {name: kind_of(hint) for name, hint in typing.get_type_hints(TrainingSample).items()}
