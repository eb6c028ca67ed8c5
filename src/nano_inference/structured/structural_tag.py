"""Structural tags: free text with tagged parts that follow a schema, written as a Lark grammar.

Servers accept two notations, and this module reads both: the older one of vLLM and SGLang
(`structures` and `triggers`) and xgrammar's tree (`format`).
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from nano_inference.errors import InvalidRequest
from nano_inference.structured.pattern_names import without_spent_patterns

MOST_DEPTH = 32  # depth of a tree of formats
ANYTHING = r"/(.|\n)*/"
_ESCAPE_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)
FORMATS = (
    "const_string",
    "json_schema",
    "regex",
    "any_text",
    "sequence",
    "or",
    "tag",
    "triggered_tags",
    "tags_with_separator",
)


def lark_of(tag: Mapping[str, Any], json_options: Mapping[str, Any]) -> str:
    """Return a structural tag as a Lark grammar.

    Args:
        tag: Structural tag in either notation.
        json_options: llguidance's options for the schemas in the tag.

    Raises `InvalidRequest` for unknown or malformed formats.
    """
    rules = _Rules(json_options)
    if "format" in tag:
        start = rules.format(tag["format"], 0)
    elif "structures" in tag or "triggers" in tag:
        tags = [
            {
                "begin": each.get("begin"),
                "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
                "end": each.get("end"),
            }
            for each in _objects("structures", tag.get("structures"))
        ]
        start = rules.format(
            {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}, 0
        )
    else:
        raise InvalidRequest(
            "a structural tag needs `format`, or `structures` and `triggers`; it has "
            f"{', '.join(tag) or 'nothing'}."
        )
    return "\n".join(["%llguidance {}", f"start: {start}", *rules.lines, ""])


def literal(text: str) -> str:
    """Return a string literal of Lark, or nothing for an empty text."""
    return _json(text) if text else ""


def schema_part(schema: Any, options: Mapping[str, Any]) -> str:
    """Return JSON that matches a schema, as a part of a rule."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"a JSON schema must be an object, not {schema!r}.")
    return "%json " + _json({**without_spent_patterns(schema), "x-guidance": dict(options)})


def _json(value: Any) -> str:
    """Return JSON as Lark reads it: with an escape for the DEL character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Rules:
    def __init__(self, json_options: Mapping[str, Any]) -> None:
        self.lines: list[str] = []
        self._options = json_options
        self._count = 0

    def _named(self, body: str, *, prefix: str = "part", attributes: str = "") -> str:
        self._count += 1
        name = f"{prefix}_{self._count}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _until(self, text: str) -> str:
        """Return a part for any text that ends at the first appearance of `text`."""
        return self._named(f"{ANYTHING} {literal(text)}", prefix="until", attributes="[lazy]")

    def format(self, format_: Any, depth: int) -> str:
        """Return a format as a part of a rule."""
        if depth > MOST_DEPTH:
            raise InvalidRequest(f"a structural tag is nested deeper than {MOST_DEPTH} formats.")
        if not isinstance(format_, Mapping):
            raise InvalidRequest(f"a structural tag's format must be an object, not {format_!r}.")
        kind = format_.get("type")
        make = getattr(self, f"_{kind}", None) if kind in FORMATS else None
        if make is None:
            raise InvalidRequest(
                f"unknown format {kind!r} of a structural tag; use one of {', '.join(FORMATS)}."
            )
        return make(format_, depth + 1)

    def _const_string(self, format_: Mapping[str, Any], _: int) -> str:
        return self._named(literal(_text("value", format_.get("value"))))

    def _json_schema(self, format_: Mapping[str, Any], _: int) -> str:
        return self._named(schema_part(format_.get("json_schema"), self._options))

    def _regex(self, format_: Mapping[str, Any], _: int) -> str:
        pattern = _text("pattern", format_.get("pattern"))
        escaped = _ESCAPE_OR_SLASH.sub(lambda each: each[0].replace("/", r"\/")[-2:], pattern)
        return self._named(self._named(f"/{escaped}/", prefix="TEXT"))

    def _any_text(self, _: Mapping[str, Any], __: int) -> str:
        return self._named(self._named(ANYTHING, prefix="TEXT"))

    def _sequence(self, format_: Mapping[str, Any], depth: int) -> str:
        return self._named(" ".join(self._elements(format_, depth)))

    def _or(self, format_: Mapping[str, Any], depth: int) -> str:
        return self._named(" | ".join(self._elements(format_, depth)))

    def _elements(self, format_: Mapping[str, Any], depth: int) -> list[str]:
        parts = [self.format(each, depth) for each in _objects("elements", format_.get("elements"))]
        if not parts:
            raise InvalidRequest(f"a structural tag's {format_['type']!r} has no elements.")
        return parts

    def _tag(self, tag: Mapping[str, Any], depth: int, known: str = "") -> str:
        """Return a tag as a part of a rule, without `known`, the written part of its beginning."""
        begin = _text("begin", tag.get("begin"))
        end = _text("end", tag.get("end"))
        content = tag.get("content")
        rest = literal(begin[len(known) :])
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            # the text ends where the closing string appears
            return self._named(f"{rest} {self._until(end)}")
        return self._named(f"{rest} {self.format(content, depth)} {literal(end)}")

    def _triggered_tags(self, format_: Mapping[str, Any], depth: int) -> str:
        triggers = format_.get("triggers")
        if not isinstance(triggers, list) or not triggers:
            raise InvalidRequest("a structural tag needs a list of triggers.")
        triggers = [_text("trigger", each, empty=False) for each in triggers]
        tags = _objects("tags", format_.get("tags"))
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            begin = _text("begin", tag.get("begin"), empty=False)
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise InvalidRequest(
                    f"tag {begin!r} must begin with one of the triggers: {', '.join(triggers)}."
                )
            by_trigger[trigger].append(self._tag(tag, depth, trigger))
        parts = [
            self._named(f"{self._until(trigger)} ({' | '.join(of_trigger)})")
            for trigger, of_trigger in by_trigger.items()
            if of_trigger
        ]
        if not parts:
            raise InvalidRequest("a structural tag has no tags.")
        some = f"({' | '.join(parts)})"
        tail = self._named(ANYTHING, prefix="TEXT")
        if format_.get("stop_after_first"):
            return self._named(f"{some} | {tail}" if not format_.get("at_least_one") else some)
        return self._named(f"{some}{'+' if format_.get('at_least_one') else '*'} {tail}")

    def _tags_with_separator(self, format_: Mapping[str, Any], depth: int) -> str:
        tags = [self._tag(each, depth) for each in _objects("tags", format_.get("tags"))]
        if not tags:
            raise InvalidRequest("a structural tag has no tags.")
        one = self._named(" | ".join(tags))
        if format_.get("stop_after_first"):
            body = one
        else:
            separator = literal(_text("separator", format_.get("separator", "")))
            body = self._named(f"{one} ({separator} {one})*")
        return body if format_.get("at_least_one") else self._named(f"{body}?")


def _text(name: str, value: Any, *, empty: bool = True) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise InvalidRequest(f"{name} of a structural tag must be a string, not {value!r}.")
    return value


def _objects(name: str, value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise InvalidRequest(f"{name} of a structural tag must be a list of objects.")
    return value
