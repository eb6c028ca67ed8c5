"""Structured output as `/openapi.json` describes it, tested by schemathesis: every field is
described, and no grammar causes a server error unless a sample reaches a limit of its matcher.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from nano_inference.config import EngineConfig
from nano_inference.server.api.shared.fields import GrammarFields
from nano_inference.server.api.shared.grammars import ROWS
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama

USER = {"role": "user", "content": "Hello"}
# route -> other fields of a request, place of the grammars, and the route's own fields
ROUTES: Mapping[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "/v1/chat/completions": (
        {"messages": [USER], "max_tokens": 8},
        "",
        ("response_format", "tools"),
    ),
    "/v1/completions": ({"prompt": "Hello", "max_tokens": 8}, "", ("response_format",)),
    "/v1/messages": (
        {"model": "tiny", "messages": [USER], "max_tokens": 8},
        "",
        ("output_config", "output_format", "tools"),
    ),
    "/inference/v1/generate": ({"token_ids": [5, 6]}, "sampling_params", ()),
    "/generate": ({"input_ids": [5, 6]}, "sampling_params", ()),
}

# fields that turn tools into grammars
FORCED = {"/v1/chat/completions": "required", "/v1/messages": {"type": "any"}}

# The description says only that a schema is an object and a grammar a string: random ones are
# rejected early. These add words of JSON schemas, regular expressions and notations.
NAME = {"enum": ["a", "b", "$ref", "type", 'q"']}
NUMBER = {"type": "integer", "minimum": -3, "maximum": 12}
REGEX = {"type": "string", "pattern": r"^[a-c0.*+?()|\[\]{},^$\\dwsbpL-]{1,12}$"}
VALUES = {"type": "array", "items": {"enum": [1, "x", None, -0.5, "ü", []]}, "maxItems": 3}


def _schemas(inner: Any) -> dict[str, Any]:
    """Return a schema of JSON schemas whose parts are `inner`."""
    types = ["object", "array", "string", "integer", "number", "boolean", "null", "strin", 5]
    formats = ["date-time", "uuid", "email", "ipv4", "color"]
    numbers = ("minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength")
    properties = {
        "type": {"enum": types},
        "properties": {"type": "object", "propertyNames": NAME, "additionalProperties": inner},
        "required": {"type": "array", "items": NAME, "maxItems": 2},
        "additionalProperties": {"anyOf": [{"type": "boolean"}, inner]},
        "items": inner,
        "prefixItems": {"type": "array", "items": inner, "maxItems": 2},
        "anyOf": {"type": "array", "items": inner, "maxItems": 2},
        "oneOf": {"type": "array", "items": inner, "maxItems": 2},
        "allOf": {"type": "array", "items": inner, "maxItems": 2},
        "not": inner,
        "enum": VALUES,
        "const": {"enum": [1, "x", None, {"a": [1]}]},
        "pattern": REGEX,
        "format": {"enum": formats},
        "$ref": {"enum": ["#", "#/$defs/a", "#/properties/a", "http://x/y", ""]},
        "$defs": {"type": "object", "properties": {"a": inner}, "additionalProperties": False},
        **dict.fromkeys((*numbers, "minItems", "maxItems", "minProperties"), NUMBER),
    }
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "maxProperties": 4,
    }


SCHEMA = {
    "anyOf": [_schemas(_schemas({"enum": [{}, True, {"type": "string"}]})), {"type": "boolean"}]
}
NOTATION = {
    "type": "string",
    "pattern": r'^(root ::= |start: |a: "b"\nstart: a |)("a"|\[a-c\]|/a+b/|root|a|%json \{\}| |\||\(|\)|\*|\+|\n){1,8}$',
}


def _exactly(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


STRUCTURES = {
    "structures": {
        "type": "array",
        "items": _exactly({"begin": NAME, "schema": SCHEMA, "end": NAME}),
        "maxItems": 2,
    },
    "triggers": {"type": "array", "items": NAME, "maxItems": 2},
}
INNER = {"type": "object", "properties": {"type": {"const": "regex"}, "pattern": REGEX}}
FORMAT = {
    "type": "object",
    "properties": {
        "type": {"enum": ["tag", "sequence", "regex", "any_text", "const_string"]},
        "elements": {"type": "array", "items": INNER, "maxItems": 2},
        "content": INNER,
        "pattern": REGEX,
        **dict.fromkeys(("begin", "end", "value"), NAME),
    },
    "required": ["type"],
    "additionalProperties": False,
}


TOLD: dict[str, Any] = {
    **dict.fromkeys(("json", "schema", "json_schema", "guided_json"), SCHEMA),
    **dict.fromkeys(("regex", "structured_outputs_regex", "guided_decoding_regex"), REGEX),
    **dict.fromkeys(("guided_regex", "whitespace_pattern", "guided_whitespace_pattern"), REGEX),
    **dict.fromkeys(("grammar", "ebnf", "guided_grammar"), NOTATION),
    **dict.fromkeys(("parameters", "input_schema"), SCHEMA["anyOf"][0]),
    "structural_tag": {"anyOf": [_exactly(STRUCTURES), _exactly({"format": FORMAT})]},
    **STRUCTURES,
    "format": FORMAT,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tiny_llama(tmp_path_factory.mktemp("described"), seed=0)
    write_tokenizer(folder, "{% for message in messages %}{{ message.content }}{% endfor %}")
    config = EngineConfig(str(folder), num_threads=1, kv_cache_memory=2**22, seed=0)
    served = ServerConfig(
        port=0, in_process=True, rl=True, served_model_name=("tiny",), tool_format="hermes"
    )
    with running_server(config, served) as url:
        yield url


@pytest.fixture(scope="module")
def description(url: str) -> dict[str, Any]:
    return httpx.get(url + "/openapi.json").json()


def fields_of(description: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the fields of a route that may hold a grammar, with their descriptions."""
    body = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    _, within, own = ROUTES[path]
    properties = body["schema"]["properties"]
    if within:
        properties = _object(properties[within])["properties"]
    return {name: properties[name] for name in (*GrammarFields.model_fields, *own)}


def _object(schema: Any) -> Any:
    """Return the description of an object that may be null or one of several."""
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if "properties" in (found := _object(each)):
            return found
    return schema


@pytest.mark.parametrize("path", ROUTES)
def test_fields_are_described(description: Mapping[str, Any], path: str) -> None:
    described = fields_of(description, path)
    for name in ROWS:
        first, *rest = name.split(".")
        schema = described.get(first)
        if schema is None:
            assert first in {"format"}.union(*(own for *_, own in ROUTES.values()))  # Ollama's
            continue
        for part in rest:
            schema = _object(schema)["properties"][part]
        assert set(schema) & {"type", "anyOf"}, name


def told(schema: Any, name: str) -> Any:
    """Return a description with more detail on the parts of grammars."""
    if name in TOLD and "properties" not in _object(schema):
        return TOLD[name]
    if isinstance(schema, dict) and "anyOf" in schema:
        return {"anyOf": [told(each, name) for each in schema["anyOf"] if each != {"type": "null"}]}
    if isinstance(schema, dict) and "properties" in schema:
        parts = {each: told(part, each) for each, part in schema["properties"].items()}
        return {**schema, "properties": parts, "additionalProperties": False}
    if isinstance(schema, dict) and "items" in schema:
        return {**schema, "items": told(schema["items"], name), "minItems": 1, "maxItems": 2}
    return schema


def body_of(path: str, name: str, field: Any) -> dict[str, Any]:
    """Return a valid request with this field."""
    base, within, _ = ROUTES[path]
    if name == "tools":
        base = base | {"tool_choice": FORCED[path]}
    said = {name: told(field, name)}
    if within:
        limit = "max_new_tokens" if path == "/generate" else "max_tokens"
        said = {within: _exactly({limit: {"const": 8}, **said})}
    return _exactly({each: {"const": value} for each, value in base.items()} | said)


def play(description: Mapping[str, Any], url: str, path: str, examples: int) -> dict[int, int]:
    """Send one request per grammar and return the number of replies by status."""
    seen: dict[int, int] = {}

    def check(case: Any) -> None:
        reply = case.call()
        if reply.status_code == 500:  # a matcher has limits, which a sample may reach
            assert "limit" in reply.json()["error"]["message"], (case.body, reply.text)
        else:
            assert reply.status_code in (200, 400), (case.body, reply.text)
        seen[reply.status_code] = seen.get(reply.status_code, 0) + 1

    quiet = settings(
        max_examples=examples,
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    for name, field in fields_of(description, path).items():
        schema = {"application/json": {"schema": body_of(path, name, field)}}
        body = {"required": True, "content": schema}
        operation = {"requestBody": body, "responses": {"200": {"description": "The answer"}}}
        narrow = {**description, "paths": {path: {"post": operation}}}
        loaded: Any = schemathesis.openapi.from_dict(narrow)
        loaded.config.update(base_url=url)
        (found,) = loaded.get_all_operations()
        quiet(given(case=found.ok().as_strategy())(check))()
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize("path", ROUTES)
def test_grammars_cause_no_server_error(
    description: Mapping[str, Any], url: str, path: str
) -> None:
    seen = play(description, url, path, 4)
    assert seen[200] > 10, seen
    assert seen[400] > 10, seen


@pytest.mark.slow
@pytest.mark.parametrize("path", ROUTES)
def test_grammars_cause_no_server_error_in_a_long_run(
    description: Mapping[str, Any], url: str, path: str
) -> None:
    seen = play(description, url, path, 100)
    assert seen[200] > 300, seen
    assert seen[400] > 100, seen
