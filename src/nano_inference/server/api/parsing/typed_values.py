"""Values that a model writes as text, without JSON's quotes, and their types by a tool's schema."""

import json
from collections.abc import Mapping
from typing import Any

from nano_inference.server.api.parsing.scanning import JsonMender

ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
TEXT = frozenset({"string"})
_MOST_DEPTH = 16  # limit for references and alternatives

Schema = Mapping[str, Any]


def kinds_of(schema: object, root: Schema, depth: int = 0) -> frozenset[str]:
    """Return JSON schema's names of the types that a schema allows. A schema that does not say
    allows any.

    Args:
        schema: Schema of a value.
        root: Schema that its references point into.
        depth: Depth of the schema in others.
    """
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return ANY
    kinds = _kinds_said(schema)
    if isinstance(reference := schema.get("$ref"), str):
        kinds &= kinds_of(resolved(reference, root), root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list) and options:
            kinds &= frozenset[str]().union(*(kinds_of(each, root, depth + 1) for each in options))
    for part in schema.get("allOf") or ():
        kinds &= kinds_of(part, root, depth + 1)
    return kinds or ANY


def _kinds_said(schema: Schema) -> frozenset[str]:
    """Return the types that a schema allows by its own keywords."""
    kinds = ANY
    if (named := schema.get("type")) is not None:
        kinds &= frozenset({named} if isinstance(named, str) else filter(_is_str, named))
    if isinstance(values := schema.get("enum"), list):
        kinds &= frozenset(map(kind_of, values))
    if "const" in schema:
        kinds &= {kind_of(schema["const"])}
    if kinds == ANY and "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if kinds == ANY and "items" in schema else kinds


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def kind_of(value: object) -> str:
    """Return JSON schema's name of a value's type."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    kinds = ((str, "string"), (float, "number"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def resolved(reference: str, root: Schema) -> object:
    """Return the part of a schema that a reference names, or None."""
    if not reference.startswith("#"):
        return None
    value: Any = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def properties_of(root: Schema) -> Mapping[str, object]:
    """Return the schemas of a tool's parameters by name."""
    schema: object = root
    for _ in range(_MOST_DEPTH):
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            schema = resolved(schema["$ref"], root)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def json_of(text: str, kinds: frozenset[str]) -> str:
    """Return text as JSON of one of the kinds: JSON stays, with small mistakes mended, if its type
    is allowed. Any other text becomes a string.
    """
    if kinds == TEXT:
        return quoted(text)
    scanner, stripped = JsonMender(), text.strip()
    end = scanner.feed(stripped, 0)
    if not scanner.complete and not scanner.failed:
        scanner.feed(" ", 0)  # ends a number
    written = scanner.taken()
    if end < len(stripped) or not scanner.complete:
        return quoted(text)
    value = json.loads(written)
    kind = kind_of(value)
    is_whole = kind == "number" and "integer" in kinds and value == value // 1
    if kind in kinds or is_whole or (kind == "integer" and "number" in kinds):
        return written
    return quoted(text)


def quoted(text: str) -> str:
    """Return a JSON string."""
    return json.dumps(text, ensure_ascii=False)
