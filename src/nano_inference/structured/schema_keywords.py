"""Keywords of JSON schemas: the type that each belongs to, the values that restrict nothing, and
checks of their values.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from nano_inference.errors import InvalidRequest

OF_TYPES: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "unevaluatedProperties",
        ]
    ),
    "array": frozenset(
        [
            "items",
            "prefixItems",
            "additionalItems",
            "minItems",
            "maxItems",
            "uniqueItems",
            "contains",
            "minContains",
            "maxContains",
            "unevaluatedItems",
        ]
    ),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
OF_ALL = frozenset(
    [
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "type",
    ]
)
ASSERTIONS = OF_ALL.union(*OF_TYPES.values())
# values with which a keyword restricts nothing
TRIVIAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "minItems": (0,),
    "minLength": (0,),
    "minProperties": (0,),
    "required": ([],),
    "patternProperties": ({},),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}),
    "additionalItems": (True,),
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "multipleOf": (),
}
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
    "02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"[12][0-9]{{3}}-{_DAY}"
_TIME = (
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\x2e[0-9]{1,6})?"
    "(Z|[\\x2b\\x2d]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_NAME = "[0-9A-Za-z]([0-9A-Za-z\\x2d]*[0-9A-Za-z])?"
_MAILBOX = "[0-9A-Za-z\\x2b\\x2d_]+"
# patterns for values of `format`, each for a part of the valid strings (no 29th of February)
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "ipv4": f"({_BYTE}[\\x2e]){{3}}{_BYTE}",
    "email": f"{_MAILBOX}([\\x2e]{_MAILBOX})*@{_NAME}([\\x2e]{_NAME})+",
}

# keywords of strings, by the method of `_Plain` that reads them
OF_STRINGS: Mapping[str, tuple[str, ...]] = {
    "format": ("format",),
    "pattern": ("pattern",),
    "length": ("minLength", "maxLength"),
}


def to_integers(bounds: dict[str, Any], inclusive: str, exclusive: str, sign: int) -> None:
    """Merge the bounds of integers into one inclusive bound. `sign` is 1 for lower bounds, -1 for
    upper ones.
    """
    candidates: list[int] = []
    if inclusive in bounds:
        candidates.append(sign * math.ceil(sign * bounds[inclusive]))
    if exclusive in bounds:
        candidates.append(sign * (math.floor(sign * bounds.pop(exclusive)) + 1))
    if candidates:
        bounds[inclusive] = sign * max(sign * each for each in candidates)


def object_of(name: str, value: Any) -> dict[str, Any]:
    """Return the value of a keyword that must be an object. Raises `InvalidRequest`."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object, not {value!r}.")
    return value


def schemas_of(name: str, said: Mapping[str, Any]) -> list[Any]:
    """Return the schemas that a keyword lists, or []. Raises `InvalidRequest`."""
    value = said.get(name, [])
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a list of schemas, not {value!r}.")
    return value


def count_of(name: str, said: Mapping[str, Any], missing: Any) -> Any:
    """Return the count of a keyword, at least 0, or `missing`. Raises `InvalidRequest`."""
    value = said.get(name, missing)
    if value is missing:
        return missing
    if isinstance(value, bool) or not _is_whole(value):
        raise InvalidRequest(f"{name} must be a whole number, not {value!r}.")
    return max(int(value), 0)


def type_of(value: Any) -> str:
    """Return the type of a JSON value. Integers are numbers."""
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def is_of_type(value: Any, type_: str) -> bool:
    """Return True if a JSON value is of a type."""
    if type_ == "integer":
        return type_of(value) == "number" and _is_whole(value)
    return type_of(value) == type_


def _is_whole(value: Any) -> bool:
    """Return True for a whole number. JSON's 1e400 is read as infinity, which is none."""
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal in JSON. `1` and `true` are not."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
