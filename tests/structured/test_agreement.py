"""Backends agree on their common languages, and none allows a text that a schema forbids."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import Grammar
from nano_inference.structured.backend import Matcher
from nano_inference.structured.grammar import COMPACT, BackendName
from nano_inference.text.tokenizer import Tokenizer
from tests.depth import at_depth
from tests.structured.schemas import document_of, schema_of, text_of
from tests.structured.vocabularies import (
    BACKENDS,
    EOS,
    accepts,
    byte_tokenizer,
    compiled,
    mask,
    vocabulary_of,
)

ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?$")
LIKELY = ' "\\}],:0123456789abcdefgtrunxyz-.'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def validator(schema: dict[str, Any]) -> Any:
    kind = jsonschema.Draft202012Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


@pytest.mark.thorough(cases=["xgrammar"])
@settings(max_examples=at_depth(60), deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("backend", BACKENDS)
def test_document_is_accepted_if_it_is_valid(
    backend: BackendName, seed: int, tokenizer: Tokenizer
) -> None:
    rng = random.Random(seed)
    schema = schema_of(rng, bounds=backend != "outlines")
    grammar = Grammar.json_schema(schema, whitespace=COMPACT)
    for _ in range(6):
        document = document_of(schema, rng)
        text = text_of(document)
        is_valid = validator(schema).is_valid(document)
        # backends that count characters reject escapes and more than six digits
        plain = backend == "llguidance" or (
            "\\" not in text and len(text) < 120 and ".000" not in text
        )
        if not is_valid or plain:
            assert accepts(grammar, text, tokenizer, backend) == is_valid, (schema, text)


@pytest.mark.thorough(cases=["xgrammar"])
@settings(max_examples=at_depth(60), deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_draws_are_valid_for_the_default_backend_too(
    backend: BackendName, seed: int, tokenizer: Tokenizer
) -> None:
    rng = random.Random(seed)
    schema = schema_of(rng, bounds=backend != "outlines")
    grammar = Grammar.json_schema(schema, whitespace=COMPACT)
    for _ in range(3):
        text = drawn(
            compiled(grammar, tokenizer, backend), compiled(grammar, tokenizer), rng, tokenizer
        )
        if text is not None:
            assert validator(schema).is_valid(json.loads(text)), (schema, text)


def drawn(matcher: Matcher, other: Matcher, rng: random.Random, tokenizer: Tokenizer) -> str | None:
    """Draw a text whose tokens the other backend allows too. Return None if it does not end."""
    vocabulary = vocabulary_of(tokenizer)
    (delete,) = tokenizer.encode("\x7f")  # llguidance requires it escaped
    lead = tokenizer.encode("\ud55c")[0]
    token_ids: list[int] = []
    for _ in range(100):
        allowed = mask(matcher, vocabulary) - {delete}
        known = mask(other, vocabulary)
        # llguidance has fewer escapes, xgrammar allows the bytes of a surrogate
        if ESCAPE.search(tokenizer.decode(token_ids)) or token_ids[-1:] == [lead]:
            allowed &= known
        assert allowed <= known
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.4):
            return tokenizer.decode(token_ids)
        allowed -= {EOS}
        likely = [each for each in allowed if tokenizer.decode([each]) in LIKELY]
        token_ids.append(rng.choice(sorted(likely if likely and rng.random() < 0.8 else allowed)))
        matcher.accept(token_ids[-1])
        other.accept(token_ids[-1])
    return None


@pytest.mark.thorough(cases=["outlines-schema1-valid1-invalid1"])
@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "array", "items": False}, ["[]"], ["[1]"]),
        ({"items": [{"type": "null"}, {}]}, ['[null,{"a":1}]'], ["[1,1]", "[null]x"]),
        (
            {"prefixItems": [{"type": "null"}, {"type": "boolean"}], "minItems": 2, "maxItems": 2},
            ["[null,true]"],
            ["[]", "[null]", "[null,true,1]"],
        ),
        ({"prefixItems": [{}, {}], "minItems": 1}, ["[1,{}]"], ["[]"]),
        ({"items": [{"type": "null"}, {}], "minItems": 2}, ["[null,1]"], ["[]", "[null]"]),
        (
            {
                "type": "object",
                "properties": {"a": {"prefixItems": [{}, {}], "minItems": 2}},
                "required": ["a"],
            },
            ['{"a":[1,"b"]}'],
            ['{"a":[]}', '{"a":[1]}'],
        ),
        ({"type": ["null", "boolean"], "minLength": 3}, ["null", "true"], ['"aaa"', "1"]),
        ({"const": {"a.": [1, "b"]}}, ['{"a.":[1,"b"]}'], ['{"ab":[1,"b"]}', "{}"]),
        ({"enum": [1, "1", True], "type": ["string", "boolean"]}, ['"1"', "true"], ["1"]),
        ({"oneOf": [{"type": "null"}, {"maxLength": 1}]}, ["null", '"a"'], ['"ab"', "1"]),
        (
            {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a":1}', '{"b":null}'],
            ["{}", '{"c":1}'],
        ),
        (
            {"allOf": [{"$ref": "#/definitions/a~1b"}], "definitions": {"a/b": {"type": "null"}}},
            ["null"],
            ["1"],
        ),
        (
            {"properties": {"a": False, "b": {"type": "null"}}, "required": ["b", "c"]},
            ['{"b":null,"c":1}'],
            ['{"a":1,"b":null,"c":1}', '{"b":null}'],
        ),
        (
            {"type": "object", "additionalProperties": {"type": "boolean"}},
            ["{}", '{"x":true,"y":false}'],
            ['{"x":1}'],
        ),
        (
            {"type": "string", "format": "date-time"},
            ['"2024-02-28T23:59:59.5Z"'],
            ['"2024-02-30T00:00:00Z"', '"2024-02-28T23:59:59"'],
        ),
        ({"type": "string", "format": "email"}, ['"a.b@c-d.org"'], ['"a@"', '"a b@c.org"']),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_plain_form_allows_exactly_the_schemas_language(
    backend: BackendName,
    schema: dict[str, Any],
    valid: list[str],
    invalid: list[str],
    tokenizer: Tokenizer,
) -> None:
    grammar = Grammar.json_schema(schema, whitespace=COMPACT)
    assert [text for text in valid if not accepts(grammar, text, tokenizer, backend)] == []
    assert [text for text in invalid if accepts(grammar, text, tokenizer, backend)] == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "pattern", ["a|ab", "(a|ab)c?", "[^a-y]{2}", r"\d+(\.\d{1,2})?", "x.z", "é+?"]
)
def test_patterns_mean_the_same(backend: BackendName, pattern: str, tokenizer: Tokenizer) -> None:
    grammar = Grammar.regex(pattern)
    for text in ("a", "ab", "abc", "zz", "z{", "12", "1.25", "1.", "x\nz", "xyz", "éé", "x\rz"):
        expected = re.fullmatch(pattern, text) is not None
        assert accepts(grammar, text, tokenizer, backend) == expected, text
