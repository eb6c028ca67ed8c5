"""Grammars of values in other notations than JSON: literals, and text between markers."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nano_inference.errors import InvalidRequest
from nano_inference.server.api.parsing.tool_formats import Notation
from nano_inference.server.api.parsing.typed_values import TEXT, kinds_of, resolved
from nano_inference.structured.schema_keywords import ASSERTIONS, FORMATS, OF_TYPES, TRIVIAL, TYPES
from nano_inference.structured.structural_tag import literal, schema_part

BARE_KEY = r"[A-Za-z0-9_.\-]+"
_BARE_KEY = re.compile(BARE_KEY)
_MOST_DEPTH = 32  # limit for schemas in schemas
_READ = {  # keywords that the rules of a type read
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
}
_CLASSES = {r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]"}  # in JSON schema they are ASCII

Schema = Mapping[str, Any]
Write = Callable[[str], str]  # text -> a part of a rule, with markers as their tokens


def regex_of(text: str) -> str:
    """Return a regular expression for exactly this text, as Lark reads it."""
    return "".join(
        each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text
    )


def without(text: str, pattern: str = "(.|\\n)*") -> str:
    """Return a terminal for text that matches a pattern and does not contain `text`."""
    return f"(/{pattern}/ & ~/(.|\\n)*{regex_of(text)}(.|\\n)*/)"


class ValueRules:
    """Rules of values of one tool.

    Attributes:
        lines: Lines of the grammar, to which rules are added.
        root: Schema of the tool's arguments.

    Args:
        lines, root: As the attributes.
        prefix: Beginning of the rules' names.
        strict: Reject keywords that cannot be enforced. False: ignore them.
        options: llguidance's options for JSON.
        write: Writes text as a part of a rule.
        is_token: True for a marker that is a special token.
    """

    def __init__(
        self,
        lines: list[str],
        root: Schema,
        prefix: str,
        *,
        strict: bool,
        options: Mapping[str, Any],
        write: Write,
        is_token: Callable[[str], bool],
    ) -> None:
        self.lines = lines
        self.root, self._prefix, self._strict = root, prefix, strict
        self._options, self._write, self._is_token = options, write, is_token
        self._names: dict[str, str] = {}  # rules by what they match
        self._count = 0

    def _named(self, body: str, kind: str = "v") -> str:
        self._count += 1
        name = f"{self._prefix}_{kind}{self._count}"
        self.lines.append(f"{name}: {body or literal_empty()}")
        return name

    def _refuse(self, problem: str) -> None:
        if self._strict:
            raise InvalidRequest(f"{problem} cannot be enforced in this model's tool calls.")

    # -- the arguments -----------------------------------------------------------------------------

    def properties(self) -> tuple[Mapping[str, Any], Sequence[str], Any]:
        """Return the tool's parameters, the names of the required ones, and the schema of others.

        Raises `InvalidRequest` if a keyword next to them cannot be enforced.
        """
        schema = self._followed(self.root)
        self._require_read(schema, "object")
        for name in ("anyOf", "oneOf", "allOf", "not", "if"):
            if name in schema:
                self._refuse(f"`{name}` of a tool's parameters")
        properties = schema.get("properties") or {}
        required = [name for name in schema.get("required") or () if isinstance(name, str)]
        if missing := [name for name in required if name not in properties]:
            properties = {**properties, **{name: {} for name in missing}}
        return properties, required, schema.get("additionalProperties", True)

    def _followed(self, schema: Any) -> Schema:
        for _ in range(_MOST_DEPTH):
            if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
                break
            schema = resolved(schema["$ref"], self.root)
        return schema if isinstance(schema, Mapping) else {}

    def _require_read(self, schema: Schema, kind: str) -> None:
        for name in OF_TYPES[kind] & schema.keys() - _READ[kind]:
            if schema[name] not in TRIVIAL.get(name, ()):
                self._refuse(f"`{name}`")

    # -- values between markers --------------------------------------------------------------------

    def tagged(self, schema: Any, end: str, forbidden: str, *, json_only: bool = False) -> str:
        """Return a value and the marker after it. A string is written without quotes.

        Args:
            schema: Schema of the value.
            end: Text after the value.
            forbidden: Text that a string must not contain.
            json_only: True for a value that is not a string.
        """
        kinds = kinds_of(schema, self.root)
        if not json_only and kinds == TEXT:
            return self._text(schema, end, forbidden, 0)
        if not json_only and "string" in kinds and self._is_loose(schema):
            return self._text({}, end, forbidden, 0)  # text that is no other value is a string
        return f"{self.json(schema)} {self._write(end)}"

    def json(self, schema: Any) -> str:
        """Return JSON of a part of the tool's schema."""
        return self._named(schema_part(self._with_definitions(schema), self._options), "j")

    def _with_definitions(self, schema: Any) -> Any:
        """Return a schema that needs no other: its references point to a copy of the root."""
        if not isinstance(schema, Mapping) or '"$ref"' not in json.dumps(schema):
            return schema
        moved = _moved(schema)
        root = _moved(self.root)
        return {**moved, "$defs": {**(moved.get("$defs") or {}), "root": root}}

    def _is_loose(self, schema: Any) -> bool:
        """Return True if any value of the allowed types is valid."""
        if not isinstance(schema, Mapping):
            return True
        asserted = ASSERTIONS & schema.keys()
        if asserted <= {"type"}:
            return True
        options = schema.get("anyOf")
        return (
            asserted == {"anyOf"}
            and isinstance(options, list)
            and all(
                isinstance(each, Mapping) and ASSERTIONS & each.keys() <= {"type"}
                for each in options
            )
        )

    def text_of(self, schema: Any) -> Schema:
        """Return the schema of a value's texts, without its other types."""
        if kinds_of(schema, self.root) != TEXT and self._is_loose(schema):
            return {"type": "string"}
        return {**schema, "type": "string"}

    def _text(self, schema: Any, end: str, forbidden: str, depth: int) -> str:
        """Return text that a schema allows, and the marker after it."""
        key = f"text {end} {json.dumps(schema, sort_keys=True)}"
        if key not in self._names:
            self._names[key] = self._named(self._text_rule(schema, end, forbidden, depth), "t")
        return self._names[key]

    def _text_rule(self, schema: Any, end: str, forbidden: str, depth: int) -> str:
        schema = schema if isinstance(schema, Mapping) else {}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            texts = [each for each in values if isinstance(each, str)]
            for text in texts:
                if forbidden in text:
                    raise InvalidRequest(
                        f"this model's tool calls cannot carry the value {text!r}, which contains "
                        f"{forbidden}."
                    )
            return " | ".join(f"{literal(each)} {self._write(end)}" for each in texts)
        if depth <= _MOST_DEPTH:
            if isinstance(reference := schema.get("$ref"), str):
                return self._text(resolved(reference, self.root), end, forbidden, depth + 1)
            for name in ("anyOf", "oneOf"):
                if isinstance(options := schema.get(name), list):
                    texts = [each for each in options if "string" in kinds_of(each, self.root)]
                    return " | ".join(self._text(each, end, forbidden, depth + 1) for each in texts)
        terminal = without(forbidden, self._pattern(schema))
        self._count += 1
        name = f"{self._prefix.upper()}_TEXT{self._count}"
        if self._is_token(end):
            self.lines.append(f"{name}: {terminal}")
            return f"{name} {self._write(end)}"
        self.lines.append(f"{name}: {terminal} {literal(end)}")
        return name

    def _pattern(self, schema: Schema) -> str:
        """Return a pattern for the strings that a schema allows."""
        keywords = sorted(OF_TYPES["string"] & schema.keys())
        for name in ("allOf", "not", "if"):
            if name in schema:
                self._refuse(f"`{name}` of a string")
        if "pattern" in keywords:
            self._require_alone(keywords, {"pattern"})
            return self._searched(str(schema["pattern"]))
        if "format" in keywords:
            self._require_alone(keywords, {"format"})
            if (pattern := FORMATS.get(str(schema["format"]))) is not None:
                return pattern
            self._refuse(f"`format` {schema['format']!r} of a string")
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not least and most is None:
            return "(.|\\n)*"
        return f"(.|\\n){{{least},{'' if most is None else most}}}"

    def _require_alone(self, keywords: Sequence[str], names: set[str]) -> None:
        if others := set(keywords) - names:
            self._refuse(f"`{min(others)}` next to `{min(names)}`")

    def _searched(self, pattern: str) -> str:
        """Return a pattern for whole texts that contain a match of this one."""
        begins = pattern.startswith("^")
        ends = pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[int(begins) : len(pattern) - int(ends)]
        free = re.sub(r"\\.|\[\^?(\\.|[^\]\\])*\]", "", inner)
        if re.search(r"[$^]|\(\?(?!:)|\\[1-9bB]", free + "".join(re.findall(r"\\[1-9bB]", inner))):
            self._refuse(f"`pattern` {pattern!r} of a string")
            return "(.|\\n)*"
        inner = re.sub(r"\\.", lambda each: _CLASSES.get(each[0], each[0]), inner)
        inner = re.sub(r"\\?/", r"\\/", inner)
        anything = "(.|\\n)*"
        return f"{'' if begins else anything}({inner}){'' if ends else anything}"

    # -- literals ----------------------------------------------------------------------------------

    def literal(self, schema: Any, notation: Notation, depth: int = 0) -> str:
        """Return a value in a notation of literals."""
        if depth > _MOST_DEPTH:
            self._refuse(f"a schema deeper than {_MOST_DEPTH}")
            schema = {}
        schema = schema if isinstance(schema, Mapping) else {}
        key = f"literal {json.dumps(schema, sort_keys=True)}"
        if key not in self._names:
            self._count += 1
            self._names[key] = name = f"{self._prefix}_l{self._count}"
            body = self._literal_rule(schema, notation, depth)
            self.lines.append(f"{name}: {body}")
        return self._names[key]

    def _literal_rule(self, schema: Schema, notation: Notation, depth: int) -> str:
        if isinstance(reference := schema.get("$ref"), str):
            return self.literal(resolved(reference, self.root), notation, depth + 1)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return " | ".join(self._written(each, notation) for each in values)
        for name in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(name), list) and options:
                return " | ".join(self.literal(each, notation, depth + 1) for each in options)
        for name in ("allOf", "not", "if"):
            if name in schema:
                self._refuse(f"`{name}`")
        kinds = kinds_of(schema, self.root)
        kinds = kinds - {"integer"} if "number" in kinds else kinds
        return " | ".join(
            self._of_kind(kind, schema, notation, depth) for kind in TYPES if kind in kinds
        )

    def _of_kind(self, kind: str, schema: Schema, notation: Notation, depth: int) -> str:
        match kind:
            case "null":
                return literal(notation.null)
            case "boolean":
                return f"{literal(notation.true)} | {literal(notation.false)}"
            case "array":
                return self._array(schema, notation, depth)
            case "object":
                self._require_read(schema, "object")
                properties = schema.get("properties") or {}
                required = [each for each in schema.get("required") or () if each in properties]
                members = self.members(
                    properties,
                    required,
                    schema.get("additionalProperties", True),
                    notation,
                    (":" + notation.gap, notation.bare_keys),
                    depth,
                )
                return f'"{{" {members} "}}"'
            case "string" if not notation.escapes:
                quote = notation.quotes[0]
                said = {name: schema[name] for name in OF_TYPES["string"] & schema.keys()}
                return f"{self._write(quote)} {self._text(said, quote, quote, 0)}"
            case _:
                known = OF_TYPES["string" if kind == "string" else "number"]
                said = {name: schema[name] for name in sorted(known & schema.keys())}
                return self.json({"type": kind, **said})

    def _array(self, schema: Schema, notation: Notation, depth: int) -> str:
        self._require_read(schema, "array")
        items = schema.get("items", {})
        item = self.literal({} if isinstance(items, bool | list) else items, notation, depth + 1)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        some = f"{item} ({literal(',' + notation.gap)} {item}){more}"
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def members(
        self,
        properties: Mapping[str, Any],
        required: Sequence[str],
        others: Any,
        notation: Notation,
        keys: tuple[str, bool],
        depth: int = 0,
    ) -> str:
        """Return the keys and values of an object, in the order of its schema.

        Args:
            properties: Schemas of the declared keys.
            required: Keys that must be there.
            others: Schema of undeclared keys, which appear only if none are declared.
            notation: Notation of the literals.
            keys: Text between key and value, and True if keys are written without quotes.
            depth: Depth of the schema in others.
        """
        assign, bare = keys
        comma = literal("," + notation.gap)
        if not properties:
            if others is False:
                return ""
            key = f"/{BARE_KEY}/" if bare else self.json({"type": "string", "minLength": 1})
            if bare:
                self._count += 1
                self.lines.append(f"{self._prefix.upper()}_KEY{self._count}: {key}")
                key = f"{self._prefix.upper()}_KEY{self._count}"
            value = self.literal({} if others is True else others, notation, depth + 1)
            member = self._named(f"{key} {literal(assign)} {value}", "m")
            return f"({member} ({comma} {member})*)?"
        first = ""  # members from here on, if none was written before
        rest = ""  # and if one was
        for name in reversed(list(properties)):
            schema = properties[name]
            value = self.literal(schema, notation, depth + 1)
            key = self._key_text(name, notation, bare=bare)
            member = self._named(f"{key} {literal(assign)} {value}", "m")
            optional = name not in required
            begun = f"{member} {rest}"
            others = f"({begun} | {first})" if first else f"({begun})?"
            first = others if optional else begun
            following = f"({comma} {member}){'?' if optional else ''} {rest}"
            rest = self._named(following, "r")
            first = self._named(first, "f") if not first.endswith("?") else first
        return first

    def _key_text(self, name: str, notation: Notation, *, bare: bool) -> str:
        if bare and _BARE_KEY.fullmatch(name):
            return literal(name)
        return self._written(name, notation)

    def _written(self, value: Any, notation: Notation) -> str:
        """Return a known value as a part of a rule."""
        if isinstance(value, str) and not notation.escapes:
            quote = notation.quotes[0]
            if quote in value:
                raise InvalidRequest(
                    f"this model's tool calls cannot carry the text {value!r}, which contains "
                    f"{quote}."
                )
            return f"{self._write(quote)} {literal(value)} {self._write(quote)}"
        if isinstance(value, str):
            return literal(json.dumps(value, ensure_ascii=False))
        if isinstance(value, bool):
            return literal(notation.true if value else notation.false)
        if value is None:
            return literal(notation.null)
        comma = literal("," + notation.gap)
        if isinstance(value, list):
            items = f" {comma} ".join(self._written(each, notation) for each in value)
            return f'"[" {items} "]"'
        if isinstance(value, dict):
            colon = literal(":" + notation.gap)
            members = f" {comma} ".join(
                f"{self._key_text(key, notation, bare=notation.bare_keys)} {colon} "
                f"{self._written(each, notation)}"
                for key, each in value.items()
            )
            return f'"{{" {members} "}}"'
        return literal(json.dumps(value))


def literal_empty() -> str:
    """Return a part that matches nothing but the empty text."""
    return '""'


def _moved(schema: Any) -> Any:
    """Return a schema with its references to `#` below `#/$defs/root`."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: f"#/$defs/root{value[1:]}"
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value)
        for name, value in schema.items()
    }
