"""Schemas in plain form: rejections that name the fault, and keywords that stay."""

import json
import math
from typing import Any

import pytest

from nano_inference import Grammar, InvalidRequest
from nano_inference.structured.backend import backend_named
from nano_inference.structured.grammar import BackendName
from nano_inference.structured.plain_schema import Abilities, plain_schema
from nano_inference.structured.regular import NotPlain, plain_pattern, plain_regex
from tests.structured.vocabularies import BACKENDS

ALL = Abilities(
    "all",
    frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "items",
            "maxItems",
            "minItems",
            "prefixItems",
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
            "minLength",
            "maxLength",
            "pattern",
            "format",
        }
    ),
    recursion=True,
)
OBJECT = {"type": "object"}
ARRAY = {"type": "array"}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "null"}}, "not"),
        ({"if": {}, "then": False}, "if"),
        ({"$dynamicRef": "#a"}, r"\$dynamicRef"),
        ({"allOf": [{"type": "null"}, {"enum": [None]}]}, "allOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [{"enum": [1]}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 2}, "minimum"),
        ({"enum": ["a", "aaa"], "maxLength": 2}, "maxLength"),
        ({"anyOf": [{}], "properties": {}}, "properties"),
        ({**OBJECT, "patternProperties": {"^a": {}}}, "patternProperties"),
        ({**OBJECT, "propertyNames": {"maxLength": 2}}, "propertyNames"),
        ({**OBJECT, "minProperties": 1}, "minProperties"),
        ({**OBJECT, "maxProperties": 1}, "maxProperties"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({**OBJECT, "dependencies": {"a": ["b"]}}, "dependencies"),
        ({**OBJECT, "unevaluatedProperties": {"type": "null"}}, "unevaluatedProperties"),
        ({**ARRAY, "uniqueItems": True}, "uniqueItems"),
        ({**ARRAY, "contains": {"type": "null"}}, "contains"),
        ({**ARRAY, "unevaluatedItems": False}, "unevaluatedItems"),
        ({"prefixItems": [{}], "minItems": 2}, "minItems"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "string", "format": "hostname"}, "format"),
        ({"type": "string", "format": "uuid", "maxLength": 3}, "minLength|maxLength"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "uniqueItems"),
        ({"properties": {"a": {"$id": "x"}}}, r"\$id"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_unenforced_keyword_is_rejected_by_name(
    backend: BackendName, schema: dict[str, Any], keyword: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"{backend} cannot enforce `({keyword})`"):
        backend_named(backend).check(Grammar.json_schema(schema))
    backend_named(backend).check(Grammar.json_schema(schema, lenient=True))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": 1.1234567},
        {"type": "number", "exclusiveMinimum": True, "minimum": 1},
        {"type": "integer", "maximum": 2**60},
        {"type": "number", "multipleOf": 0.5},
        {"enum": [2**60]},
    ],
)
def test_numbers_that_a_backend_would_round_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="all cannot enforce"):
        plain_schema(json.dumps(schema), ALL)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (False, "no text is allowed"),
        ({"type": "poem"}, "type must be one of .*; got 'poem'"),
        ({"properties": {"a": False}, "required": ["a"]}, "no text is allowed"),
        ({"minLength": 3, "maxLength": 2}, "no text is allowed"),
        ({"minItems": 3, "maxItems": 2}, "no text is allowed"),
        ({"$ref": "other.json"}, "`\\$ref` only within the schema"),
        ({"$ref": "#/a/b"}, "does not exist in the schema"),
        ({"properties": []}, "must be an object"),
        ({"required": "a"}, "list of names"),
        ({"type": "string", "minLength": "a"}, "whole number"),
        ({"type": "array", "minItems": math.inf}, "whole number"),
        ({"type": "integer", "enum": [math.inf]}, "no text is allowed"),
        ({"anyOf": []}, "list of schemas"),
        ({"items": 3}, "object or a boolean"),
        ({"prefixItems": 5}, "prefixItems must be a list of schemas, not 5"),
    ],
)
def test_schema_that_is_wrong_is_an_error(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        plain_schema(json.dumps(schema), ALL)


def test_schema_too_deep_or_too_large_is_an_error_not_a_crash() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="too large"):
        plain_schema(json.dumps(deep), ALL)
    wide = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 4} for n in range(12)}
    bomb = {"$ref": "#/$defs/d0", "$defs": {**wide, "d12": {}}}
    with pytest.raises(InvalidRequest, match="too large"):
        plain_schema(json.dumps(bomb), Abilities("none", frozenset()))
    plain_schema(json.dumps(bomb), ALL)  # keeps references


def test_reference_to_itself_needs_recursion() -> None:
    node = {"properties": {"next": {"$ref": "#"}}}
    with pytest.raises(InvalidRequest, match=r"recursive `\$ref` \(#\)"):
        plain_schema(json.dumps(node), Abilities("none", ALL.keywords))
    plain = plain_schema(json.dumps(node), ALL)
    assert plain["properties"] == {"next": {"$ref": "#/$defs/d0"}}
    assert plain["$defs"]["d0"]["properties"] == {"next": {"$ref": "#/$defs/d0"}}


def test_bounds_of_integers_are_whole_and_reached() -> None:
    schema = {"type": "integer", "minimum": 1.5, "exclusiveMinimum": 3, "exclusiveMaximum": 7.5}
    assert plain_schema(json.dumps(schema), ALL) == {"type": "integer", "minimum": 4, "maximum": 7}
    schema = {"type": "number", "minimum": 2, "exclusiveMinimum": 2, "maximum": 1, "title": "x"}
    assert plain_schema(json.dumps(schema), ALL) == {
        "type": "number",
        "exclusiveMinimum": 2,
        "maximum": 1,
    }


@pytest.mark.parametrize("pattern", [
    "(?i)a", "(?=a)", r"\ba", r"\p{L}", r"\1", "a**", "a{,3}", "a{2}{3}", "(a", "a)", "[a", "a|",
    "(|a)", "[[:alpha:]]", "[a&&b]", "^a|b", "a$b", "[b-a]", r"[\w-z]", r"[a-\d]", r"[\D]", "[]",
])  # fmt: skip
def test_schema_without_a_plain_form_is_rejected(pattern: str) -> None:
    with pytest.raises(NotPlain):
        plain_regex(pattern)


def test_plain_forms() -> None:
    assert plain_regex(r"^(?:a|b)+?[\d_]{2,}\.$") == r"(a|b)+[0-9\x5f]{2,}[\x2e]"
    assert plain_regex("a|b") == "(a|b)"
    # engines disagree on `\w`, `\d`, `\s` and their negations beyond ASCII
    assert plain_regex(r"[^\w]") == plain_regex(r"\W")
    assert plain_regex(r"[^\s\d]") == r"[\x00-\x08\x0e-\x1f\x21-\x2f\x3a-\x7f]"
    inside = r"[\x20-\x21\x23-\x5b\x5d-\x7e" + "\xa0-\ud7ff\ue000-\U0010ffff]"
    assert plain_pattern("a") == f"{inside}*a{inside}*"
    assert plain_pattern("^[^b]$") == inside.replace("#", "").replace(r"\x5d-\x7e", r"\x5d-ac-\x7e")
    with pytest.raises(NotPlain, match="is not allowed there"):
        plain_pattern('^"$')
