"""Parsing of control requests: missing bodies, flags in the query or the JSON, invalid values."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.server import paths
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.requests.field_types import (
    INTEGER,
    ControlRequest,
    Flag,
    Mapped,
    RequiredText,
    Seconds,
    Text,
    Texts,
    Version,
    read_fields,
    whole,
    word,
    words,
)
from nano_inference.server.errors import ApiError
from nano_inference.server.main import RL_PROTOCOLS, RL_ROUTES
from nano_inference.server.server import Server
from tests.depth import at_depth
from tests.server.scripted import ScriptedClient, sources

SCALAR = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
)
VALUE = (
    SCALAR | st.lists(SCALAR, max_size=2) | st.dictionaries(st.text(max_size=3), SCALAR, max_size=2)
)


class Example(ControlRequest):
    """A field of each type."""

    flag: Flag = False
    text: Text | None = None
    required: RequiredText = "given"
    one: Annotated[str, word(("keep", "abort")), words(("keep", "abort"))] = "keep"
    number: Annotated[int, whole(0, 9), INTEGER] | None = None
    seconds: Seconds | None = None
    version: Version | None = None
    texts: Texts = ()
    mapped: Mapped | None = None


FIELDS = sorted(Example.model_fields)


def read(field: str, body: Mapping[str, Any], query: Mapping[str, list[str]]) -> object:
    """Return the value or the error."""
    try:
        return getattr(read_fields(Example, body, query), field)
    except ApiError as problem:
        return problem


@given(field=st.sampled_from(FIELDS), value=VALUE)
@settings(max_examples=at_depth(300), deadline=None)
def test_read_fields_reads_a_value_or_names_its_field(field: str, value: object) -> None:
    said = read(field, {field: value}, {})
    if isinstance(said, ApiError):
        assert (said.status, said.param) == (400, field)


@given(field=st.sampled_from(sorted({*FIELDS} - {"mapped"})), value=st.text(max_size=8))
@settings(max_examples=at_depth(300), deadline=None)
def test_read_fields_reads_a_query_as_the_json(field: str, value: str) -> None:
    assert read(field, {}, {field: [value]}) == read(field, {field: value}, {})


def test_read_fields_takes_the_json_first_and_null_as_nothing() -> None:
    assert read("flag", {"flag": False}, {"flag": ["true"]}) is False
    assert read("flag", {"flag": None}, {"flag": ["true"]}) is True
    assert read("flag", {}, {}) is False
    assert read("version", {"version": 7}, {}) == "7"
    assert read("texts", {}, {"texts": ["weights", "kv_cache"]}) == ("weights", "kv_cache")
    assert read("text", {"text": None, "unknown": 1}, {}) is None


class Needing(ControlRequest):
    """Request with required fields."""

    missing: ClassVar = {"version": "version is missing; it must be a string."}
    name: RequiredText
    count: Annotated[int, whole(0), INTEGER]
    version: Version


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "name is missing; it must be a string."),
        ({"name": ""}, "name is missing; it must be a string."),
        ({"name": "a"}, "count is missing; it must be an integer."),
        ({"name": "a", "count": 1}, "version is missing; it must be a string."),
        ({"name": 1}, "name must be a string, not 1."),
        ({"count": -1}, f"count must be an integer in [0, {2**63}], not -1."),
    ],
)
def test_read_fields_names_a_missing_field(body: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as error:
        read_fields(Needing, body, {})
    assert error.value.message == message
    assert error.value.param == message.partition(" ")[0]


def test_routes_are_known_to_access_and_errors() -> None:
    server = Server(ServerConfig(rl=True), sources(ScriptedClient()))
    router = APIRouter()
    for add in RL_ROUTES:
        add(router, server)
    routes: list[tuple[str, str]] = []
    for route in router.routes:
        assert isinstance(route, APIRoute)
        routes += [(route.path, method) for method in route.methods or ()]
    assert len(set(routes)) == len(routes)
    assert {path for path, _ in routes} <= paths.CONTROL
    assert set(RL_PROTOCOLS) <= paths.GENERATION


@pytest.mark.parametrize(
    "body", [b"", b"  ", b"{}", b"null", b"[]", b"{", b'{"new_version": ""}', b'{"x": NaN}']
)
def test_bodies(rl_server: str, body: bytes) -> None:
    reply = httpx.post(f"{rl_server}/update_weight_version", content=body)
    said = reply.json()
    assert reply.status_code == 400
    assert said["success"] is False
    assert said["message"] == said["error"]["message"]
    assert set(said["error"]) == {"message", "type", "param", "code"}


def test_training_has_wider_limits_unless_they_are_set() -> None:
    usual, training = ServerConfig(), ServerConfig(rl=True)
    assert (usual.max_samples, usual.max_logprobs, usual.request_timeout) == (128, 20, 600.0)
    assert training.max_samples >= 32 * 8  # a batch from TRL
    assert training.max_logprobs == -1
    assert training.max_queued_samples >= 4 * training.max_samples
    assert training.request_timeout > 3600
    assert ServerConfig(rl=True, max_samples=128).max_samples == 128
