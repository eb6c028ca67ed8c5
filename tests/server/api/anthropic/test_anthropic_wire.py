"""Bytes on the wire: faults that break Anthropic clients, requests of Claude Code, random
bodies.
"""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.depth import at_depth
from tests.server.api.anthropic.anthropic_stream import accumulated, events_of
from tests.server.api.anthropic.conftest import Scripted
from tests.server.scripted import Script

BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 30,
    "messages": [{"role": "user", "content": "Hi"}],
}
SAYS = [
    "Hello there.",
    "<think>Hm.</think>Hello.",
    '<tool_call>{"name": "t", "arguments": {"a": 1}}</tool_call>',
    'Look: <tool_call>{"name": "t", "arguments": {}}</tool_call>',
    "",
]
TOOLS = [
    {"name": "t", "description": "A tool.", "input_schema": {"type": "object", "properties": {}}}
]


def post(
    scripted: Scripted, body: Any, path: str = "/v1/messages", **headers: str
) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        scripted.url + path, content=data, headers={"content-type": "application/json", **headers}
    )


@pytest.fixture(params=SAYS)
def streamed(scripted: Scripted, request: pytest.FixtureRequest) -> bytes:
    """Return the body of a streamed reply."""
    scripted.script = Script(request.param, cached_tokens=3)
    answer = post(scripted, BODY | {"stream": True, "tools": TOOLS})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.content


@pytest.mark.thorough(cases=["Hello there."])
def test_events_have_an_event_line(streamed: bytes):
    assert streamed.count(b"event: ") == streamed.count(b"data: ") == streamed.count(b"\n\n")
    events_of(streamed)


def test_message_start_is_first_and_counts_the_prompt(streamed: bytes):
    first = events_of(streamed)[0]
    assert first["type"] == "message_start"
    assert first["message"]["usage"]["input_tokens"] > 0


def test_block_starts_before_its_deltas(streamed: bytes):
    accumulated(streamed)


def test_message_delta_has_the_whole_usage(streamed: bytes):
    first, *_, last, _ = events_of(streamed)
    assert last["type"] == "message_delta"
    assert last["usage"]["input_tokens"] == first["message"]["usage"]["input_tokens"]
    assert last["usage"]["cache_read_input_tokens"] == 3
    assert last["usage"]["output_tokens"] > 0


def test_stream_ends_without_done(streamed: bytes):
    assert b"[DONE]" not in streamed


def test_stream_says_what_the_answer_says(scripted: Scripted, streamed: bytes):
    answer = post(scripted, BODY | {"tools": TOOLS}).json()
    one = accumulated(streamed)
    for message in (one, answer):
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert one == answer


def test_errors_have_the_shape_and_ids(scripted: Scripted):
    for path, status, body in (
        ("/v1/messages", 400, {}),
        ("/v1/messages", 400, b"{"),
        ("/v1/messages", 404, BODY | {"model": "other"}),
        ("/v1/messages/count_tokens", 400, {"model": "m"}),
        ("/v1/messages/batches", 404, BODY),
    ):
        answer = post(scripted, body, path, **{"x-request-id": "mine"})
        assert answer.status_code == status
        error = answer.json()
        assert error.keys() == {"type", "error", "request_id"}
        assert error["error"]["type"] == (
            "not_found_error" if status == 404 else "invalid_request_error"
        )
        assert answer.headers["request-id"] == error["request_id"] == "mine"


def claude_code() -> dict[str, Any]:
    """Return the body of a Claude Code request."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Where."},
            "lines": {"type": ["integer", "null"]},
        },
        "required": ["path"],
        "additionalProperties": False,
    }
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools = [
        {"name": f"Tool{i}", "description": f"Number {i}.\n\nUse it.", "input_schema": schema}
        for i in range(20)
    ]
    reminder = "<system-reminder>\nThe date is today.\n</system-reminder>\n"
    call = {
        "type": "tool_use",
        "id": "toolu_01",
        "name": "Tool3",
        "input": {"path": "/a"},
        **cached,
    }
    return {
        "model": "m",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=abc12;"},
            {"type": "text", "text": "You are Claude Code.", **cached},
            {"type": "text", "text": "Be good.", **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": reminder},
                    {"type": "text", "text": "Read /a"},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I read it.", "signature": "EqQB"},
                    {"type": "text", "text": "I'll read it."},
                    call,
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_01",
                        "content": "1\tnothing",
                        "is_error": False,
                    },
                    {"type": "text", "text": "And?", **cached},
                ],
            },
        ],
        "tools": tools,
        "metadata": {"user_id": '{"device_id":"a","session_id":"b"}'},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "something_new": {"of": "2027"},
    }


CLAUDE_CODE_HEADERS = {
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,unheard-of-2027-01-01",
    "anthropic-version": "2023-06-01",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-timeout": "600",
}


def test_claude_code(scripted: Scripted):
    scripted.script = Script(
        'Well. <tool_call>{"name": "Tool7", "arguments": {"path": "/b"}}</tool_call>'
    )
    body = claude_code()
    answer = post(scripted, body, "/v1/messages?beta=true", **CLAUDE_CODE_HEADERS)
    message = accumulated(answer.content)
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
    assert message["content"][1]["input"] == {"path": "/b"}
    assert message["stop_reason"] == "tool_use"
    prompt = scripted.prompt()
    assert "billing" not in prompt
    assert "You are Claude Code.\nBe good." in prompt
    assert all(f'"Tool{i}"' in prompt for i in range(20))
    for name in ("stream", "max_tokens", "metadata"):
        del body[name]
    counted = post(scripted, body, "/v1/messages/count_tokens?beta=true", **CLAUDE_CODE_HEADERS)
    assert counted.json() == {"input_tokens": message["usage"]["input_tokens"]}


# -- random bodies ---------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
BLOCK = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "x"]
        )
    },
    optional={
        "text": st.text(max_size=6) | JSON,
        "id": st.just("a") | JSON,
        "tool_use_id": st.just("a") | JSON,
        "name": st.text(max_size=6) | JSON,
        "input": st.dictionaries(st.text(max_size=4), JSON, max_size=2) | JSON,
        "content": st.text(max_size=5) | JSON,
        "thinking": st.text(max_size=5) | JSON,
    },
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | JSON},
    optional={"content": st.text(max_size=8) | st.lists(BLOCK, max_size=3) | JSON},
)
NUMBER = (
    st.integers(-2, 5)
    | st.floats()
    | st.sampled_from([2**31, 2**63, 2**64, -(2**70), 1e308])
    | JSON
)
NUMBERS = """max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty n
min_tokens seed priority logprobs"""
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": JSON,
    "messages": st.lists(MESSAGE, max_size=3) | JSON,
    "system": st.text(max_size=5) | st.lists(BLOCK, max_size=2) | JSON,
    "tools": st.lists(
        st.fixed_dictionaries({"name": st.text(max_size=3)}, optional={"input_schema": JSON})
    )
    | JSON,
    "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "none", "x"])})
    | JSON,
    "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled"])}) | JSON,
    "stop_sequences": st.lists(st.text(max_size=3), max_size=3) | JSON,
    "stream": st.booleans() | JSON,
    "logit_bias": st.dictionaries(
        st.integers(-1, 60000).map(str) | st.text(max_size=3), NUMBER, max_size=2
    )
    | JSON,
    "allowed_token_ids": st.lists(NUMBER, max_size=2) | JSON,
    "stop_token_ids": st.lists(NUMBER, max_size=2) | JSON,
    "cache_salt": st.text(max_size=3) | JSON,
    "ignore_eos": st.booleans() | JSON,
    "output_config": st.fixed_dictionaries({}, optional={"effort": JSON, "format": JSON}) | JSON,
    **dict.fromkeys(NUMBERS.split(), NUMBER),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a valid body with some invalid fields."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True))
    return BODY | {name: draw(FIELDS[name]) for name in names}


@pytest.mark.thorough
@settings(max_examples=at_depth(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies() | JSON, st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]))
def test_fuzzed_bodies_cause_no_server_error(scripted_server: Scripted, body: Any, path: str):
    answer = post(scripted_server, body, path)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        accumulated(answer.content)
    elif answer.status_code != 200:
        assert answer.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert "Traceback" not in answer.text


@pytest.mark.thorough
@settings(max_examples=at_depth(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=60))
def test_invalid_json_is_rejected(scripted_server: Scripted, body: bytes):
    assert post(scripted_server, body).status_code == 400
