"""Plain JSON schemas, for backends that ignore keywords they do not know.

A backend lists the keywords that it enforces. The plain form has no others: a schema with another
keyword is rejected, and the error names the keyword. The plain form may allow less than the schema,
such as no properties other than the declared ones, but never more. Every part of it is one of

- `{"$ref": "#/$defs/NAME"}`, with those definitions at the root,
- `{"enum": [...]}`,
- `{"anyOf": [...]}`,
- `{"type": NAME, ...}`, with keywords of that type only.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from nano_inference.errors import InvalidRequest
from nano_inference.structured.regular import NotPlain, plain_pattern
from nano_inference.structured.schema_keywords import (
    ASSERTIONS,
    FORMATS,
    OF_ALL,
    OF_STRINGS,
    OF_TYPES,
    TRIVIAL,
    TYPES,
    count_of,
    is_of_type,
    object_of,
    same,
    schemas_of,
    to_integers,
    type_of,
)

MOST_DEPTH = 64  # levels of nested schemas
MOST_PARTS = 20_000  # limit for a plain form
MOST_INTEGER = 2**53
MOST_DECIMALS = 6  # decimals of numeric bounds


@dataclass(frozen=True, slots=True)
class Abilities:
    """Features of JSON schema that a backend enforces.

    Attributes:
        name: Name of the backend.
        keywords: Keywords that it enforces, among those that belong to one type.
        recursion: True if definitions may refer to themselves. False: every reference is replaced
            by its target.
    """

    name: str
    keywords: frozenset[str]
    recursion: bool = False


def plain_schema(text: str, abilities: Abilities, lenient: bool = False) -> dict[str, Any]:
    """Return a schema in its plain form.

    Args:
        text: The schema as JSON.
        abilities: Features of the backend that will read it.
        lenient: Omit keywords that the backend cannot enforce.

    Raises `InvalidRequest` that names the keyword.
    """
    root = json.loads(text)
    return _Plain(root, abilities, lenient).whole()


def parts_of(plain: Any) -> Iterator[dict[str, Any]]:
    """Yield every part of a plain form, so that a backend can change some in place."""
    yield plain
    inner = [
        *plain.get("anyOf", ()),
        *plain.get("prefixItems", ()),
        *plain.get("properties", {}).values(),
        *plain.get("$defs", {}).values(),
        *(plain[name] for name in ("items", "additionalProperties") if plain.get(name)),
    ]
    for part in inner:
        yield from parts_of(part)


class _Unsatisfiable(Exception):
    """A schema allows no value."""


class _Plain:
    def __init__(self, root: Any, abilities: Abilities, lenient: bool) -> None:
        self._root, self._can, self._lenient = root, abilities, lenient
        self._names: dict[str, str] = {}  # names of definitions, by pointer
        self._definitions: dict[str, Any] = {}
        self._inlining: list[str] = []
        self._parts = 0

    def whole(self) -> dict[str, Any]:
        """Return the plain form of the whole schema."""
        try:
            plain = self.part(self._root, 0)
        except _Unsatisfiable as problem:
            raise InvalidRequest(f"{problem}: no text is allowed.") from None
        if self._definitions:
            # some backends ignore the definitions of a root that is only a reference
            plain = {"anyOf": [plain]} if "$ref" in plain else plain
            return {**plain, "$defs": self._definitions}
        return plain

    def part(self, schema: Any, depth: int) -> dict[str, Any]:
        """Return the plain form of a schema. Raises `_Unsatisfiable`."""
        self._parts += 1
        if depth > MOST_DEPTH or self._parts > MOST_PARTS:
            raise InvalidRequest(
                f"the schema is too large for {self._can.name}: it is nested deeper than "
                f"{MOST_DEPTH} or, with references replaced, has more than {MOST_PARTS} parts."
            )
        if schema is False:
            raise _Unsatisfiable("a schema is `false`")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequest(f"a schema must be an object or a boolean, not {schema!r}.")
        said = {
            name: value
            for name, value in schema.items()
            if name in ASSERTIONS and value not in TRIVIAL.get(name, ())
        }
        if depth and "$id" in schema:
            self._refuse("$id", "below the root")
        for name in ("not", "if", "$dynamicRef", "$recursiveRef"):
            if name in said:
                self._refuse(name)
                del said[name]
        return self._by_form(said, depth + 1)

    def _by_form(self, said: dict[str, Any], depth: int) -> dict[str, Any]:
        for name, read in (
            ("$ref", self._reference),
            ("const", self._values),
            ("enum", self._values),
            ("anyOf", self._choice),
            ("oneOf", self._choice),
            ("allOf", self._all),
        ):
            if name in said:
                return read(name, said, depth)
        return self._typed(said, depth)

    def _refuse(self, name: str, why: str = "") -> None:
        """Reject a keyword, or ignore it if lenient."""
        if not self._lenient:
            raise InvalidRequest(
                f"{self._can.name} cannot enforce `{name}`{' ' if why else ''}{why}; try another "
                "backend, or set `lenient` to ignore the keyword."
            )

    def _refuse_beside(self, name: str, said: Mapping[str, Any], known: Sequence[str]) -> None:
        for other in said:
            if other not in known:
                self._refuse(other, f"next to `{name}`")

    # references

    def _reference(self, name: str, said: Mapping[str, Any], depth: int) -> dict[str, Any]:
        self._refuse_beside(name, said, [name])
        pointer = said[name]
        target = self._at(pointer)
        if not self._can.recursion:
            if pointer in self._inlining:
                raise InvalidRequest(
                    f"{self._can.name} cannot enforce a recursive `$ref` ({pointer}); try another "
                    "backend."
                )
            self._inlining.append(pointer)
            try:
                return self.part(target, depth)
            finally:
                self._inlining.pop()
        return self._definition(pointer, target, depth)

    def _definition(self, pointer: str, target: Any, depth: int) -> dict[str, Any]:
        known = self._names.get(pointer)
        if known is None:
            known = self._names[pointer] = f"d{len(self._names)}"
            try:
                self._definitions[known] = self.part(target, depth)
            except _Unsatisfiable:
                self._names[pointer] = ""
                raise
        if not known:
            raise _Unsatisfiable(f"`$ref` {pointer!r} allows nothing")
        return {"$ref": f"#/$defs/{known}"}

    def _at(self, pointer: Any) -> Any:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise InvalidRequest(
                f"{self._can.name} supports `$ref` only within the schema, such as "
                f'"#/$defs/name", not {pointer!r}.'
            )
        target = self._root
        for step in unquote(pointer).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            elif isinstance(target, dict) and step in target:
                target = target[step]
            else:
                raise InvalidRequest(f"`$ref` {pointer!r} does not exist in the schema.")
        return target

    # values and choices

    def _values(self, name: str, said: Mapping[str, Any], _: int) -> dict[str, Any]:
        self._refuse_beside(name, said, ["enum", "const", "type"])
        values = said.get("enum", [said.get("const")])
        if not isinstance(values, list):
            raise InvalidRequest(f"enum must be a list, not {values!r}.")
        if "enum" in said and "const" in said:
            values = [each for each in values if same(each, said["const"])]
        if "type" in said:
            types = self._types(said["type"])
            values = [each for each in values if any(is_of_type(each, type_) for type_ in types)]
        if any(isinstance(each, int) and abs(each) > MOST_INTEGER for each in values):
            self._refuse(name, f"with integers beyond {MOST_INTEGER}")
        if not values:
            raise _Unsatisfiable(f"`{name}` leaves no value")
        return {"enum": values}

    def _choice(self, name: str, said: Mapping[str, Any], depth: int) -> dict[str, Any]:
        self._refuse_beside(name, said, [name, "type"])
        options = said[name]
        if not isinstance(options, list) or not options:
            raise InvalidRequest(f"{name} must be a list of schemas, not {options!r}.")
        if "type" in said:
            options = [self._with_type(each, said["type"], name) for each in options]
        parts: list[dict[str, Any]] = []
        for option in options:
            try:
                parts.append(self.part(option, depth))
            except _Unsatisfiable:
                continue
        if not parts:
            raise _Unsatisfiable(f"`{name}` leaves no schema")
        if name == "oneOf" and not self._are_apart(parts):
            self._refuse(name, "of schemas that may allow the same value")
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _with_type(self, option: Any, types: Any, name: str) -> Any:
        """Return a choice's option, restricted to these types."""
        if option is True:
            return {"type": types}
        if isinstance(option, dict) and not OF_ALL.intersection(option):
            return {**option, "type": types}
        if isinstance(option, dict) and OF_ALL.intersection(option) == {"type"}:
            types = self._types(types)
            option_types = self._types(option["type"])
            shared = [
                each
                for each in option_types
                if each in types or (each == "integer" and "number" in types)
            ]
            if "integer" in types and "number" in option_types:
                shared.append("integer")
            return {**option, "type": shared} if shared else False
        self._refuse("type", f"next to `{name}`")
        return option

    def _are_apart(self, parts: Sequence[dict[str, Any]]) -> bool:
        """Return True if it is evident that no value belongs to two of these schemas."""
        seen: set[str] = set()
        for part in parts:
            marks = self._marks(part)
            if marks is None or seen & marks:
                return False
            seen |= marks
        return True

    def _marks(self, part: Mapping[str, Any]) -> set[str] | None:
        """Return the types of a schema's values, or None if they are not evident."""
        if "enum" in part:
            return {type_of(each) for each in part["enum"]}
        if "anyOf" in part:
            inner = [self._marks(each) for each in part["anyOf"]]
            return None if None in inner else set().union(*(each for each in inner if each))
        if "type" not in part:
            return None
        return {"number" if part["type"] == "integer" else part["type"]}

    def _all(self, name: str, said: Mapping[str, Any], depth: int) -> dict[str, Any]:
        schemas = said[name]
        if isinstance(schemas, list) and len(schemas) == 1 and len(said) == 1:
            return self.part(schemas[0], depth)
        self._refuse(name)
        return self._by_form({key: value for key, value in said.items() if key != name}, depth)

    # types

    def _types(self, types: Any) -> list[str]:
        types = types if isinstance(types, list) else [types]
        for name in types:
            if name not in TYPES:
                raise InvalidRequest(f"type must be one of {', '.join(TYPES)}; got {name!r}.")
        if not types:
            raise InvalidRequest("type must name a type.")
        return types

    def _typed(self, said: Mapping[str, Any], depth: int) -> dict[str, Any]:
        if not said:
            return self._anything()
        if "type" in said:
            types = self._types(said["type"])
            types = [each for each in types if each != "integer" or "number" not in types]
        else:  # values of other types are also valid; the plain form allows only these
            types = [each for each, names in OF_TYPES.items() if names.intersection(said)]
        makers = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._number,
        }
        parts: list[dict[str, Any]] = []
        for type_ in types:
            keywords = OF_TYPES["number" if type_ == "integer" else type_]
            typed = {name: value for name, value in said.items() if name in keywords}
            make = makers.get(type_)
            parts.append({"type": type_} if make is None else make(type_, typed, depth))
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _anything(self) -> dict[str, Any]:
        if not self._can.recursion:
            return {"anyOf": [{"type": each} for each in TYPES if each != "integer"]}
        if "any" not in self._definitions:
            again = {"$ref": "#/$defs/any"}
            self._definitions["any"] = {
                "anyOf": [
                    *({"type": each} for each in ("null", "boolean", "number", "string")),
                    {"type": "array", "items": again},
                    {"type": "object", "additionalProperties": again},
                ]
            }
        return {"$ref": "#/$defs/any"}

    def _enforced(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords that the backend enforces, and reject the others."""
        for name in said:
            if name not in self._can.keywords:
                self._refuse(name)
        return {name: value for name, value in said.items() if name in self._can.keywords}

    def _object(self, _: str, said: Mapping[str, Any], depth: int) -> dict[str, Any]:
        said = dict(said)
        if isinstance(unevaluated := said.get("unevaluatedProperties"), bool):
            del said["unevaluatedProperties"]
            said.setdefault("additionalProperties", unevaluated)
        said = self._enforced(said)
        properties = object_of("properties", said.get("properties", {}))
        required = said.get("required", [])
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            raise InvalidRequest(f"required must be a list of names, not {required!r}.")
        others = said.get("additionalProperties", True)
        named = properties | {name: others for name in required if name not in properties}
        if not named and others is not False:
            any_one = self._can.recursion or others not in (True, {})
            return {"type": "object"} | (
                {"additionalProperties": self.part(others, depth)} if any_one else {}
            )
        plain: dict[str, Any] = {}
        for name, schema in named.items():
            try:
                plain[name] = self.part(schema, depth)
            except _Unsatisfiable:
                if name in required:
                    raise
        return {
            "type": "object",
            "properties": plain,
            "required": [name for name in plain if name in required],
            "additionalProperties": False,
        }

    def _array(self, _: str, said: Mapping[str, Any], depth: int) -> dict[str, Any]:
        said = {name: value for name, value in said.items() if name != "additionalItems"}
        if "items" in said or "prefixItems" in said:
            said.pop("unevaluatedItems", None)
        said = self._enforced(said)
        least, most = count_of("minItems", said, 0), count_of("maxItems", said, None)
        if most is not None and (most < least):
            raise _Unsatisfiable("`minItems` exceeds `maxItems`")
        items = said.get("items", True)
        first = items if isinstance(items, list) else schemas_of("prefixItems", said)
        plain: dict[str, Any]
        if first:
            # stricter than JSON schema: no more items than listed, and for outlines no fewer
            if not least <= len(first) <= (len(first) if most is None else most):
                self._refuse("minItems" if least > len(first) else "maxItems", "next to a tuple")
            plain = {"type": "array", "prefixItems": [self.part(each, depth) for each in first]}
            return {**plain, "minItems": least} if least else plain
        plain = {"type": "array"}
        try:
            if items not in (True, {}) or self._can.recursion:
                plain["items"] = self.part(items, depth)
        except _Unsatisfiable:
            if least:
                raise
            most = 0
        if most == 0:
            return {"type": "array", "maxItems": 0}
        if least:
            plain["minItems"] = least
        return plain if most is None else {**plain, "maxItems": most}

    def _string(self, _: str, said: Mapping[str, Any], __: int) -> dict[str, Any]:
        said = self._enforced(said)
        plain: dict[str, Any] = {"type": "string"}
        for name in ("format", "pattern", "length"):
            keywords = {key: said[key] for key in OF_STRINGS[name] if key in said}
            if not keywords:
                continue
            if len(plain) > 1:  # backends read only one of them
                self._refuse(next(iter(keywords)), f"next to `{list(plain)[1]}`")
            else:
                plain |= getattr(self, f"_{name}")(keywords)
        return plain

    def _format(self, said: Mapping[str, Any]) -> dict[str, Any]:
        pattern = FORMATS.get(said["format"]) if isinstance(said["format"], str) else None
        if pattern is None:
            self._refuse("format", f"{said['format']!r}")
            return {}
        return {"pattern": pattern}

    def _pattern(self, said: Mapping[str, Any]) -> dict[str, Any]:
        pattern = said["pattern"]
        if not isinstance(pattern, str):
            raise InvalidRequest(f"pattern must be a string, not {pattern!r}.")
        try:
            return {"pattern": plain_pattern(pattern)}
        except NotPlain as problem:
            self._refuse("pattern", f"{pattern!r} with {problem}")
            return {}

    def _length(self, said: Mapping[str, Any]) -> dict[str, Any]:
        least, most = count_of("minLength", said, 0), count_of("maxLength", said, None)
        if most is not None and most < least:
            raise _Unsatisfiable("`minLength` exceeds `maxLength`")
        return {"minLength": least} | ({} if most is None else {"maxLength": most})

    def _number(self, type_: str, said: Mapping[str, Any], _: int) -> dict[str, Any]:
        if said.get("multipleOf") == 1 and type_ == "integer":
            said = {name: value for name, value in said.items() if name != "multipleOf"}
        bounds = {
            name: bound
            for name, bound in self._enforced(said).items()
            if self._is_bound(name, bound, type_)
        }
        for inclusive, exclusive, sign in (
            ("minimum", "exclusiveMinimum", 1),
            ("maximum", "exclusiveMaximum", -1),
        ):
            if type_ == "integer":
                to_integers(bounds, inclusive, exclusive, sign)
            elif inclusive in bounds and exclusive in bounds:  # the stricter one
                tighter = sign * bounds[inclusive] > sign * bounds[exclusive]
                del bounds[exclusive if tighter else inclusive]
        return {"type": type_, **bounds}

    def _is_bound(self, name: str, bound: Any, type_: str) -> bool:
        """Return True for a number that backends read exactly, and reject any other."""
        exact = (
            not isinstance(bound, bool)
            and isinstance(bound, int | float)
            and abs(bound) <= MOST_INTEGER
            and (type_ == "integer" or round(bound, MOST_DECIMALS) == bound)
        )
        if not exact:
            self._refuse(name, f"of {bound!r}")
        return exact
