"""Patterns of property names that only declared names match.

llguidance writes declared names first and names of `patternProperties` after them. If the patterns
match only declared names, llguidance still allows the comma, but no name can follow it. This module
moves such patterns into the declared properties, with the same meaning.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

_BYTES = LLTokenizer("byte")  # one token per byte
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else")


def without_spent_patterns(schema: Any) -> Any:
    """Return an equal schema in which names of `patternProperties` can follow declared ones."""
    if not isinstance(schema, dict):
        return schema
    parts: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            parts[name] = {key: without_spent_patterns(each) for key, each in value.items()}
        elif isinstance(value, list) and (name in _LISTS or name == "items"):
            parts[name] = [without_spent_patterns(each) for each in value]
        else:
            parts[name] = without_spent_patterns(value) if name in _SINGLE else value
    patterns = parts.get("patternProperties")
    if not patterns or parts.get("additionalProperties") is not False:
        return parts
    if not isinstance(patterns, dict):
        return parts
    properties = parts.get("properties", {})
    declared = dict.fromkeys([*properties, *parts.get("required", ())])
    if _more_names(patterns, declared):
        return parts
    del parts["patternProperties"]
    return {**parts, "properties": _joined(properties, declared, patterns)}


def _joined(
    properties: Mapping[str, Any], declared: Iterable[str], patterns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the declared properties, each with the schemas of the patterns that match it."""
    joined: dict[str, Any] = {}
    for name in declared:
        schemas = [properties[name]] if name in properties else []
        schemas += [schema for pattern, schema in patterns.items() if _matches(pattern, name)]
        joined[name] = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
    return joined


def _more_names(patterns: Iterable[str], declared: Iterable[str]) -> bool:
    """Return True if the patterns match names other than the declared ones."""
    matcher = _matcher(patterns, dict.fromkeys(declared, False), minProperties=1)
    if not matcher.try_consume_tokens(list(b"{")):
        return False
    words = np.zeros((_BYTES.vocab_size + 31) // 32, dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    quote = ord('"')
    return not matcher.is_error() and bool(words[quote // 32] >> (quote % 32) & 1)


def _matches(pattern: str, name: str) -> bool:
    text = json.dumps({name: None}, separators=(",", ":"), ensure_ascii=False).encode()
    matcher = _matcher([pattern], {})
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def _matcher(patterns: Iterable[str], properties: Mapping[str, Any], **others: Any) -> LLMatcher:
    schema = {
        "type": "object",
        "properties": properties,
        "patternProperties": {pattern: {} for pattern in patterns},
        "additionalProperties": False,
        **others,
    }
    options: Any = {"whitespace_flexible": False}
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    return LLMatcher(_BYTES, source, log_level=0)
