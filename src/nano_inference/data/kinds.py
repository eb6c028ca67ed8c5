"""How values of a field's type are written as plain Python values and as Arrow types. See the
package's table.
"""

import collections.abc
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Protocol

from nano_inference.errors import InvalidRequest
from nano_inference.types import TrainingSample

_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


class Mismatch(Exception):
    """A plain value is not of the field's type; the caller knows where it stands."""


class Kind(Protocol):
    """How values of one type are written."""

    def to_plain(self, value: Any) -> Any:
        """The value out of numbers, strings, None, lists and dicts."""
        ...

    def from_plain(self, plain: Any) -> Any:
        """The value again. Raises `Mismatch`."""
        ...

    def arrow(self, pa: Any) -> Any:
        """The type of its column; `pa` is the module pyarrow."""
        ...


@dataclasses.dataclass(frozen=True)
class _Scalar:
    type: type
    choices: tuple[str, ...] | None = None

    def to_plain(self, value: Any) -> Any:
        # a caller's 1 is 1.0 in a column of floats
        return float(value) if self.type is float else value

    def from_plain(self, plain: Any) -> Any:
        if self.type is float:
            return _to_float(plain)
        if type(plain) is not self.type:
            raise Mismatch(f"{plain!r} is not of type {self.type.__name__}.")
        if self.choices is not None and plain not in self.choices:
            raise Mismatch(f"{plain!r} is none of {', '.join(self.choices)}.")
        return plain

    def arrow(self, pa: Any) -> Any:
        return {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}[self.type]


def _to_float(plain: Any) -> float:
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


@dataclasses.dataclass(frozen=True)
class _List:
    item: Kind

    def to_plain(self, value: Any) -> Any:
        return (
            list(value)
            if isinstance(self.item, _Scalar)
            else [self.item.to_plain(item) for item in value]
        )

    def from_plain(self, plain: Any) -> Any:
        if not isinstance(plain, list | tuple):
            raise Mismatch(f"{plain!r} is not a list.")
        return tuple(self.item.from_plain(item) for item in plain)

    def arrow(self, pa: Any) -> Any:
        return pa.list_(self.item.arrow(pa))


@dataclasses.dataclass(frozen=True)
class _Set:
    """A set of scalars, written in rising order."""

    item: Kind

    def to_plain(self, value: Any) -> Any:
        return sorted(value)

    def from_plain(self, plain: Any) -> Any:
        items = _List(self.item).from_plain(plain)
        if len(set(items)) < len(items):
            raise Mismatch(f"{plain!r} holds an item twice.")
        return frozenset(items)

    def arrow(self, pa: Any) -> Any:
        return pa.list_(self.item.arrow(pa))


@dataclasses.dataclass(frozen=True)
class _Table:
    """A mapping, as a list of objects: JSON and Parquet have no keys but strings."""

    key: Kind
    value: Kind

    def to_plain(self, value: Any) -> Any:
        return [
            {"key": self.key.to_plain(k), "value": self.value.to_plain(v)} for k, v in value.items()
        ]

    def from_plain(self, plain: Any) -> Any:
        if not isinstance(plain, list) or not all(
            isinstance(e, dict) and e.keys() == {"key", "value"} for e in plain
        ):
            raise Mismatch(f"{plain!r} is not a list of objects with key, value.")
        table = {
            self.key.from_plain(entry["key"]): self.value.from_plain(entry["value"])
            for entry in plain
        }
        if len(table) < len(plain):
            raise Mismatch(f"{plain!r} holds a key twice.")
        return table

    def arrow(self, pa: Any) -> Any:
        return pa.list_(pa.struct([("key", self.key.arrow(pa)), ("value", self.value.arrow(pa))]))


@dataclasses.dataclass(frozen=True)
class _Record:
    """A dataclass or a named tuple."""

    type: Any
    fields: Mapping[str, Kind]

    def to_plain(self, value: Any) -> Any:
        return {name: kind.to_plain(getattr(value, name)) for name, kind in self.fields.items()}

    def from_plain(self, plain: Any) -> Any:
        if not isinstance(plain, dict) or plain.keys() != self.fields.keys():
            raise Mismatch(f"{plain!r} is not an object with {', '.join(self.fields)}.")
        try:
            return self.type(
                **{name: kind.from_plain(plain[name]) for name, kind in self.fields.items()}
            )
        except InvalidRequest as problem:  # a record that checks itself
            raise Mismatch(str(problem)) from problem

    def arrow(self, pa: Any) -> Any:
        return pa.struct(
            [(name, column_type(pa, name, kind)) for name, kind in self.fields.items()]
        )


@dataclasses.dataclass(frozen=True)
class _Either:
    """One of several scalars, under its type's name; the others are None: a column has one type."""

    kinds: Mapping[str, Kind]

    def to_plain(self, value: Any) -> Any:
        return {name: value if type(value).__name__ == name else None for name in self.kinds}

    def from_plain(self, plain: Any) -> Any:
        given = (
            [name for name, item in plain.items() if item is not None]
            if isinstance(plain, dict)
            else []
        )
        if len(given) != 1 or plain.keys() != self.kinds.keys():
            raise Mismatch(
                f"{plain!r} is not an object with one of {', '.join(self.kinds)}, and null for "
                "the others."
            )
        return self.kinds[given[0]].from_plain(plain[given[0]])

    def arrow(self, pa: Any) -> Any:
        return pa.struct([(name, kind.arrow(pa)) for name, kind in self.kinds.items()])


@dataclasses.dataclass(frozen=True)
class _Optional:
    kind: Kind

    def to_plain(self, value: Any) -> Any:
        return None if value is None else self.kind.to_plain(value)

    def from_plain(self, plain: Any) -> Any:
        return None if plain is None else self.kind.from_plain(plain)

    def arrow(self, pa: Any) -> Any:
        return self.kind.arrow(pa)


def column_type(pa: Any, name: str, kind: Kind) -> Any:
    """The Arrow type of a field. A seed is unsigned."""
    return pa.uint64() if name == "seed" else kind.arrow(pa)


def kind_of(annotation: Any) -> Kind:
    """How values of this type are written. Raises TypeError where there is no way yet."""
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case None if annotation in (int, float, str, bool):
            return _Scalar(annotation)
        case None if dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields"):
            return _Record(
                annotation,
                {name: kind_of(hint) for name, hint in typing.get_type_hints(annotation).items()},
            )
        case typing.Literal:
            return _Scalar(str, arguments)
        case origin if origin is tuple and arguments[1:] == (...,):
            return _List(kind_of(arguments[0]))
        case origin if origin is frozenset:
            return _Set(kind_of(arguments[0]))
        case collections.abc.Mapping:
            return _Table(kind_of(arguments[0]), kind_of(arguments[1]))
        case typing.Union | types.UnionType:
            return _union(arguments)
        case _:
            raise TypeError(f"data.py knows no column for a field of type {annotation}")


def _union(members: tuple[Any, ...]) -> Kind:
    some = [member for member in members if member is not type(None)]
    kind = (
        kind_of(some[0])
        if len(some) == 1
        else _Either({member.__name__: kind_of(member) for member in some})
    )
    if len(some) == len(members):
        return kind
    if kind == _Scalar(float):
        raise TypeError(
            "None and nan would be the same in JSON; use another type than float | None"
        )
    return _Optional(kind)


# The columns: every field of a sample, in its order.
FIELDS = {name: kind_of(hint) for name, hint in typing.get_type_hints(TrainingSample).items()}
