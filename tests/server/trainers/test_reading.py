"""How control requests are read: bodies that are missing, flags in the query or the JSON, values
that are none.
"""

from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.server import paths
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.main import RL_PROTOCOLS, RL_ROUTES
from nano_inference.server.server import Server
from nano_inference.server.trainers.reading import Fields
from tests.depth import at_depth
from tests.server.scripted import ScriptedClient

SCALAR = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
)
VALUE = (
    SCALAR | st.lists(SCALAR, max_size=2) | st.dictionaries(st.text(max_size=3), SCALAR, max_size=2)
)
READS: dict[str, Any] = {
    "flag": lambda fields: fields.flag("x", default=False),
    "text": lambda fields: fields.text("x"),
    "word": lambda fields: fields.word("x", ("keep", "abort"), "keep"),
    "number": lambda fields: fields.number("x", least=0, most=9),
    "seconds": lambda fields: fields.seconds("x"),
    "version": lambda fields: fields.version("x"),
    "texts": lambda fields: fields.texts("x"),
    "part": lambda fields: fields.part("x"),
}


def read(kind: str, fields: Fields) -> object:
    """The value, or the refusal."""
    try:
        return READS[kind](fields)
    except ApiError as problem:
        return problem


@given(kind=st.sampled_from(sorted(READS)), value=VALUE)
@settings(max_examples=at_depth(300), deadline=None)
def test_a_value_is_read_or_refused_by_name(kind: str, value: object) -> None:
    said = read(kind, Fields({"x": value}, {}))
    if isinstance(said, ApiError):
        assert (said.status, said.param) == (400, "x")


@given(kind=st.sampled_from(sorted(set(READS) - {"part"})), value=st.text(max_size=8))
@settings(max_examples=at_depth(300), deadline=None)
def test_a_query_says_what_the_json_says(kind: str, value: str) -> None:
    assert read(kind, Fields({}, {"x": [value]})) == read(kind, Fields({"x": value}, {}))


def test_the_json_goes_first_and_null_says_nothing() -> None:
    assert Fields({"x": False}, {"x": ["true"]}).flag("x", default=True) is False
    assert Fields({"x": None}, {"x": ["true"]}).flag("x", default=False) is True
    assert Fields({}, {}).flag("x", default=True) is True
    assert Fields({"x": 7}, {}).version("x") == "7"
    assert Fields({}, {"tags": ["weights", "kv_cache"]}).texts("tags") == ("weights", "kv_cache")


def test_each_route_is_known_to_access_and_errors() -> None:
    server = Server(ServerConfig(rl=True), ScriptedClient())
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
    assert training.max_samples >= 32 * 8  # a batch of TRL's
    assert training.max_logprobs == -1
    assert training.max_queued_samples >= 4 * training.max_samples
    assert training.request_timeout > 3600
    assert ServerConfig(rl=True, max_samples=128).max_samples == 128
