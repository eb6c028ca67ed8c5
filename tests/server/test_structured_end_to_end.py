"""Hundreds of schemas, sampled at temperature 1 from a server: every sample that ended by itself is
valid.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nano_inference.config import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama

pytestmark = pytest.mark.slow
NUM_SCHEMAS, NUM_SAMPLES = 300, 4

NAMES = st.sampled_from(["a", "bc", "ä ö", 'q"uote', "\\back", "日本", "$ref", "type"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-999, 999), st.text(max_size=6))


@st.composite
def _numbers(draw: Any) -> dict[str, Any]:
    least, size = draw(st.integers(-200, 200)), draw(st.integers(0, 500))
    kind = draw(st.sampled_from(["integer", "number"]))
    return {"type": kind, "minimum": least, "maximum": least + size}


@st.composite
def _strings(draw: Any) -> dict[str, Any]:
    least = draw(st.integers(0, 4))
    more = st.sampled_from(
        [
            {"minLength": least, "maxLength": least + 6},
            {"pattern": "^[a-f]{2,5}$"},
            {"pattern": "^(x|yy|[0-9]{3})-?$"},
            {"format": "date"},
            {"format": "uuid"},
            {"maxLength": 5},
        ]
    )
    return {"type": "string"} | draw(more)


_LEAVES = st.one_of(
    _numbers(),
    _strings(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, SCALARS),
)


@st.composite
def _objects(draw: Any, inner: Any) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


@st.composite
def _arrays(draw: Any, inner: Any) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    return {
        "type": "array",
        "items": draw(inner),
        "minItems": least,
        "maxItems": least + draw(st.integers(0, 2)),
    }


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.builds(lambda each: {"anyOf": each}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)
PAIR = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
BY_HAND: list[dict[str, Any]] = [
    {"$defs": {"node": PAIR | {"additionalProperties": False}}, "$ref": "#/$defs/node"},
    {"type": ["integer", "null"], "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    {"prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2}
    | {"type": "array"},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"const": 1}}}
    | {"additionalProperties": False},
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tiny_llama(tmp_path_factory.mktemp("end-to-end"), seed=0)
    write_tokenizer(folder, "{% for message in messages %}{{ message.content }}{% endfor %}")
    config = EngineConfig(str(folder), num_threads=1, kv_cache_memory=2**25, seed=0)
    with running_server(config, ServerConfig(port=0, in_process=True)) as url:
        yield url


def schemas() -> list[dict[str, Any]]:
    """Return the configured number of schemas, always the same ones."""
    found = {json.dumps(each): each for each in BY_HAND}

    @settings(
        max_examples=4 * NUM_SCHEMAS,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS)
    def draw(schema: dict[str, Any]) -> None:
        found[json.dumps(schema)] = schema

    draw()
    return list(found.values())[:NUM_SCHEMAS]


def test_finished_answer_is_valid(url: str) -> None:
    asked = schemas()
    assert len(asked) == NUM_SCHEMAS

    def ask(place: int) -> httpx.Response:
        schema = asked[place]
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {
            "messages": [{"role": "user", "content": "Go."}],
            "n": NUM_SAMPLES,
            "seed": place,
            "temperature": 1.0,
            "max_tokens": 400,
            "response_format": format,
            "structured_outputs": {"disable_any_whitespace": bool(place % 2)},
        }
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)

    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(ask, range(NUM_SCHEMAS)))
    ended = refused = 0
    for schema, reply in zip(asked, replies, strict=True):
        if reply.status_code == 400:
            assert "response_format" in reply.json()["error"]["param"], reply.text
            refused += 1
            continue
        assert reply.status_code == 200, (schema, reply.text)
        for choice in reply.json()["choices"]:
            assert choice["finish_reason"] in ("stop", "length")
            if choice["finish_reason"] == "stop":
                read = json.loads(choice["message"]["content"])
                jsonschema.validate(read, schema, cls=jsonschema.Draft202012Validator)
                ended += 1
    print(f"{ended} answers ended by themselves; {refused} schemas were refused")
    assert ended > NUM_SCHEMAS * NUM_SAMPLES * 0.8
    assert refused <= NUM_SCHEMAS * 0.02
