"""Requests that OpenAI's routes accept or reject. A rejected request never reaches the engine."""

import json
import logging
import string
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.errors import InvalidRequest
from nano_inference.server.api.openai.chat_answer import PROTOCOL as CHATS
from nano_inference.server.api.openai.completions_answer import PROTOCOL as COMPLETIONS
from nano_inference.server.api.parsing import ChatFormat
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError, api_error_of
from nano_inference.server.main import running_server
from tests.depth import at_depth
from tests.server.scripted import ScriptedClient
from tests.server.streams import post

LIMITS = ServerConfig(
    port=0,
    in_process=True,
    max_samples=8,
    max_stop=2,
    max_stop_length=10,
    max_logit_bias=3,
    max_messages=4,
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT: dict[str, Any] = {"prompt": "Hello"}


@pytest.fixture(scope="module")
def engine() -> ScriptedClient:
    return ScriptedClient(max_model_len=256)


@pytest.fixture(scope="module")
def url(engine: ScriptedClient) -> Iterator[str]:
    with running_server(engine, LIMITS) as url:
        yield url


@pytest.fixture(scope="module")
def served(engine: ScriptedClient) -> Served:
    return Served("scripted", engine._engine_info(), engine.tokenizer, ChatFormat(), LIMITS)


def refusal(body: object, served: Served, *, chat: bool) -> ApiError:
    """Return the error of a rejected body. Check the processor time, since the machine may be
    busy.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    began = time.thread_time()
    with pytest.raises((ApiError, InvalidRequest)) as raised:
        (CHATS if chat else COMPLETIONS).prepare(data, served, "id")
    assert time.thread_time() - began < 0.05
    return api_error_of(raised.value)


BOTH = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 256}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 2**40}, "n"),
    ({"n": False}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": ["a", "b", "c"]}, "stop"),
    ({"stop": "x" * 11}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop.0"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {str(i): 1 for i in range(4)}}, "logit_bias"),
    ({"stop_token_ids": [49152]}, "stop_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
    ({"allowed_token_ids": []}, None),
    ({"min_tokens": 9, "max_tokens": 8}, None),
    ({"sampling_mask": True}, None),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"keep_cache_seconds": -1}, "keep_cache_seconds"),
    ({"keep_cache_seconds": 86401}, "keep_cache_seconds"),
    ({"keep_cache_seconds": "5m"}, "keep_cache_seconds"),
    ({"cache_priority": 1}, None),
    ({"keep_cache_seconds": 5, "cache_priority": 2**31}, "cache_priority"),
    ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
    (
        {"prompt_cache_retention": "24h", "keep_cache_seconds": 5},
        "prompt_cache_retention",
    ),
    (
        {"prompt_cache_retention": "in-memory", "keep_cache_seconds": 5},
        "prompt_cache_retention",
    ),
    ({"prompt_cache_retention": "in_memory", "cache_priority": 5}, None),
    ({"priority": 2**31}, "priority"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"model": 5}, "model"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"bad_words": "x"}, "bad_words"),
    ({"skip_special_tokens": 0}, "skip_special_tokens"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),  # without logprobs
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
]
OF_TEXT = [
    ({"store": True}, "store"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": [[1], 2]}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1] * 256}, "prompt"),
    ({"prompt": ["a"] * 9}, "prompt"),
    ({"prompt": ["a"] * 3, "n": 3}, "prompt"),
    ({"prompt": "word " * 100_000}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"top_logprobs": 2}, "top_logprobs"),
]
OF_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": CHAT["messages"] * 5}, "messages"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages"),
    (
        {"messages": [{"role": "assistant", "content": None, "function_call": {}}]},
        "messages.0.function_call",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 256}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": []}, "messages must be a list of 1 or more, not a list of 0."),
        ({"messages": "hi"}, 'messages must be a list, not "hi".'),
        ({"messages": [5]}, "messages.0 must be an object, not 5."),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content must be a string or a list of parts, not 5.",
        ),
        ({"temperature": "1"}, 'temperature must be a number, not "1".'),
        ({"max_tokens": 4.5}, "max_tokens must be an integer, not 4.5."),
        ({"stream": "yes"}, 'stream must be true or false, not "yes".'),
        ({"stop": 5}, "stop must be a string or a list of strings, not 5."),
        ({"cache_salt": ""}, 'cache_salt must be a string of length 1 or more, not "".'),
        ({"stream": True, "stream_options": 5}, "stream_options must be an object, not 5."),
        ({"n": 9}, "n is 9; this server accepts at most 8."),
        (
            {"max_tokens": 999},
            "This model's maximum context length is 256 tokens, and the request is longer: 31 in "
            "the prompt and 999 "
            "for the completion; lower max_tokens to 225.",
        ),
    ],
)
def test_refusal_is_one_sentence_for_people(
    served: Served, change: dict[str, Any], said: str
) -> None:
    assert refusal(CHAT | change, served, chat=True).message == said


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("change", "param"), BOTH)
def test_completions_and_chat_reject_the_same_fields(
    served: Served, change: dict[str, Any], param: str | None, chat: bool
) -> None:
    problem = refusal((CHAT if chat else TEXT) | change, served, chat=chat)
    assert (problem.status, problem.param) == (400, param)
    assert len(problem.message) < 300


@pytest.mark.parametrize(("change", "param"), OF_TEXT)
def test_completions_refuse(served: Served, change: dict[str, Any], param: str) -> None:
    problem = refusal(TEXT | change, served, chat=False)
    assert (problem.status, problem.param) == (400, param)


@pytest.mark.parametrize(("change", "param"), OF_CHAT)
def test_chat_refuses(served: Served, change: dict[str, Any], param: str) -> None:
    problem = refusal(CHAT | change, served, chat=True)
    assert (problem.status, problem.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"5",
        b'"x"',
        b"{",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e400}',
        b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "metadata": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
    ],
)
def test_loose_json_is_rejected(served: Served, body: bytes) -> None:
    assert refusal(body, served, chat=False).status == 400


@pytest.mark.thorough
def test_refused_request_never_reaches_the_engine(url: str, engine: ScriptedClient) -> None:
    engine.requests.clear()
    error = post(f"{url}/v1/completions", TEXT | {"temperature": 3, "stream": True}, 400)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (
        post(f"{url}/v1/completions", TEXT | {"model": "x\n\x1b[31m"}, 404)["error"]["code"]
        == "model_not_found"
    )
    assert "\x1b" not in json.dumps(
        post(f"{url}/v1/chat/completions", CHAT | {"model": "x\n\x1b[31m"}, 404)
    )
    assert engine.requests == []


def test_fields_that_change_nothing_are_taken(served: Served) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "response_format": {"type": "text"},
        "logit_bias": None,
        "stop": None,
        "n": None,
        "best_of": 1,
        "guided_json": None,
        "use_beam_search": False,
        "top_k": -1,
        "model": "scripted",
    }
    plain = COMPLETIONS.prepare(json.dumps(TEXT).encode(), served, "id")
    assert (
        COMPLETIONS.prepare(json.dumps(TEXT | harmless).encode(), served, "id").asks == plain.asks
    )
    chat = {
        "verbosity": "low",
        "modalities": ["text"],
        "functions": [],
        "tool_choice": "none",
        "tools": [],
    }
    CHATS.prepare(json.dumps(CHAT | harmless | chat).encode(), served, "id")


def test_unknown_field_is_logged_once(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps(TEXT | {"frobnicate\n": 1}).encode()
    with caplog.at_level(logging.WARNING, "nano_inference.server"):
        for _ in range(3):
            COMPLETIONS.prepare(body, served, "id")
    assert [
        record.getMessage() for record in caplog.records if "frobnicate" in record.getMessage()
    ] == ['ignoring an unknown field of a request: "frobnicate\\n"']


def test_defaults(served: Served) -> None:
    (ask,) = COMPLETIONS.prepare(json.dumps(TEXT).encode(), served, "id").asks
    assert ask.params.max_tokens == 16
    (ask,) = COMPLETIONS.prepare(json.dumps({"prompt": [1] * 250}).encode(), served, "id").asks
    assert ask.params.max_tokens == 6
    (ask,) = CHATS.prepare(json.dumps(CHAT).encode(), served, "id").asks
    assert ask.params.max_tokens == 256 - len(ask.prompt)


NAMES = sorted(
    {name for change, _ in [*BOTH, *OF_TEXT, *OF_CHAT] for name in change}
    | {"echo", "metadata", "return_token_ids"}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.text(string.printable, max_size=5),
    st.sampled_from(["user", "text", "auto", 2**63, 10**400, -0.0, "\ud800", 49151, 49152]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, "role", "1"]), inner)
    ),
    max_leaves=6,
)


@pytest.mark.thorough
@settings(max_examples=at_depth(400), deadline=None)
@given(st.booleans(), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_fuzzed_bodies_are_read_or_rejected(
    served: Served, chat: bool, change: dict[str, Any]
) -> None:
    base = CHAT | {"max_tokens": 5} if chat else TEXT
    # writes NaN, Infinity and lone surrogates unchanged
    body = json.dumps(base | change).encode()
    began = time.thread_time()
    try:
        (CHATS if chat else COMPLETIONS).prepare(body, served, "id")
        error = None
    except (ApiError, InvalidRequest) as problem:
        error = api_error_of(problem)
    assert time.thread_time() - began < 0.05
    assert error is None or error.status in (400, 404)
    assert error is None or error.message.encode()


def test_fuzzed_bodies_over_http(url: str) -> None:
    with httpx.Client() as http:

        @settings(max_examples=at_depth(60), deadline=None)
        @given(st.booleans(), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
        def check(chat: bool, change: dict[str, Any]) -> None:
            path, base = (
                ("chat/completions", CHAT | {"max_tokens": 5}) if chat else ("completions", TEXT)
            )
            reply = http.post(f"{url}/v1/{path}", content=json.dumps(base | change))
            assert reply.status_code in (200, 400, 404), reply.text
            if reply.status_code != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

        check()
