"""The `anthropic` SDK against `/v1/messages`."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from nano_inference.errors import RequestTooLarge
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.server.api.anthropic.conftest import Scripted
from tests.server.scripted import Script, ScriptedClient

HELLO: Any = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALLS = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima", "days": [1, 2]}}\n</tool_call>'
)
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": ""},
}
CITED = {
    "type": "document",
    "source": {"type": "text", "data": "x"},
    "citations": {"enabled": True},
}


@pytest.fixture(scope="module", params=[False, True], ids=["lenient", "strict"])
def shared_sdk(scripted_server: Scripted, request: pytest.FixtureRequest) -> Iterator[Anthropic]:
    strict: bool = request.param
    with Anthropic(
        base_url=scripted_server.url, api_key="k", max_retries=0, _strict_response_validation=strict
    ) as client:
        yield client


@pytest.fixture
def sdk(shared_sdk: Anthropic, scripted: Scripted) -> Anthropic:
    """Return a client of a server whose engine has served no requests yet."""
    return shared_sdk


def types(message: Any) -> list[str]:
    return [block.type for block in message.content]


@pytest.mark.thorough(cases=["lenient"])
def test_create(sdk: Anthropic, scripted: Scripted):
    message: Any = sdk.messages.create(model="m", max_tokens=20, messages=HELLO, system="Be short.")
    assert (message.type, message.role, message.model) == ("message", "assistant", "m")
    assert message.id.startswith("msg_")
    assert message._request_id
    assert [block.to_dict() for block in message.content] == [
        {"type": "text", "text": "Hello there."}
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == len(scripted.client.requests[-1].prompt)
    assert message.usage.output_tokens == 4
    assert "system\nBe short." in scripted.prompt()


def test_raw_stream(sdk: Anthropic, scripted: Scripted):
    events = list(sdk.messages.create(model="m", max_tokens=20, messages=HELLO, stream=True))
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(
        e.delta.text
        for e in events
        if e.type == "content_block_delta" and e.delta.type == "text_delta"
    )
    assert text == "Hello there."


def test_stream_helper(sdk: Anthropic, scripted: Scripted):
    scripted.script = Script(cached_tokens=5)
    with sdk.messages.stream(model="m", max_tokens=20, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "Hello there."
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn"
    assert message.usage.cache_read_input_tokens == 5
    assert message.usage.input_tokens == len(scripted.client.requests[-1].prompt) - 5
    assert message.usage.output_tokens == 4


def test_async(scripted: Scripted):
    async def talk() -> None:
        async with AsyncAnthropic(base_url=scripted.url, api_key="k", max_retries=0) as sdk:
            message, other = await asyncio.gather(
                sdk.messages.create(model="m", max_tokens=20, messages=HELLO),
                sdk.messages.create(model="m", max_tokens=2, messages=HELLO),
            )
            assert message.content[0].to_dict() == {"type": "text", "text": "Hello there."}
            assert other.stop_reason == "max_tokens"
            async with sdk.messages.stream(model="m", max_tokens=20, messages=HELLO) as stream:
                assert "".join([text async for text in stream.text_stream]) == "Hello there."
            async for _ in await sdk.messages.create(
                model="m", max_tokens=20, messages=HELLO, stream=True
            ):
                pass

    asyncio.run(talk())


@pytest.mark.parametrize("portion", [1, 3, 1000])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_round_trip(sdk: Anthropic, scripted: Scripted, stream: bool, portion: int):
    scripted.script = Script(CALLS, portion=portion)
    asked: dict[str, Any] = {"model": "m", "max_tokens": 200, "tools": [WEATHER]}
    if stream:
        with sdk.messages.stream(**asked, messages=HELLO) as events:
            message: Any = events.get_final_message()
    else:
        message: Any = sdk.messages.create(**asked, messages=HELLO)
    assert '"name": "weather"' in scripted.prompt()
    assert types(message) == ["text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    text, paris, lima = message.content
    assert text.type == "text"
    assert text.text == "Let me look."
    assert paris.type == lima.type == "tool_use"
    assert (paris.name, paris.input) == ("weather", {"city": "Paris"})
    assert lima.input == {"city": "Lima", "days": [1, 2]}
    assert paris.id != lima.id

    scripted.script = Script("Sunny.")
    results: Any = [
        {"type": "tool_result", "tool_use_id": paris.id, "content": "sun"},
        {
            "type": "tool_result",
            "tool_use_id": lima.id,
            "content": [{"type": "text", "text": "?"}],
            "is_error": True,
        },
        {"type": "text", "text": "Well?"},
    ]
    turns: Any = [*HELLO, message.to_param(), {"role": "user", "content": results}]
    final = sdk.messages.create(**asked, messages=turns)
    assert types(final) == ["text"]
    prompt = scripted.prompt()
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>' in prompt
    assert (
        "tool\nsun<|im_end|>\n<|im_start|>tool\nError: "
        "?<|im_end|>\n<|im_start|>user\nWell?<|im_end|>" in prompt
    )


@pytest.mark.parametrize("stream", [False, True])
def test_thinking(sdk: Anthropic, scripted: Scripted, stream: bool):
    scripted.script = Script("<think>\nSurely hello.\n</think>\n\nHello!")
    asked: dict[str, Any] = {"model": "m", "max_tokens": 3000, "messages": HELLO}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    if stream:
        with sdk.messages.stream(**asked) as events:
            message: Any = events.get_final_message()
    else:
        message: Any = sdk.messages.create(**asked)
    assert scripted.prompt().endswith("<|im_start|>assistant\n")
    assert types(message) == ["thinking", "text"]
    thinking, text = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking.strip() == "Surely hello."
    assert thinking.signature
    assert text.type == "text"
    assert text.text == "Hello!"
    turns: Any = [*HELLO, message.to_param(), *HELLO]
    sdk.messages.create(model="m", max_tokens=20, messages=turns)
    assert "<think>Surely hello." in scripted.prompt()
    assert scripted.prompt().endswith("<think>\n\n</think>\n\n"), (
        "no thinking where it is not asked for"
    )


def test_stop_sequence(sdk: Anthropic, scripted: Scripted):
    message: Any = sdk.messages.create(
        model="m", max_tokens=20, messages=HELLO, stop_sequences=["there", "zzz"]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "there")
    assert message.content[0].to_dict() == {"type": "text", "text": "Hello "}


def test_prefill(sdk: Anthropic, scripted: Scripted):
    turns: Any = [*HELLO, {"role": "assistant", "content": "Well,"}]
    message: Any = sdk.messages.create(model="m", max_tokens=20, messages=turns)
    assert scripted.prompt().endswith("<|im_start|>assistant\nWell,")
    assert message.content[0].to_dict() == {"type": "text", "text": "Hello there."}


def test_extensions_reach_the_engine(sdk: Anthropic, scripted: Scripted):
    fields = {
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": False,
        "seed": 7,
        "cache_salt": "mine",
        "priority": -3,
        "keep_cache_seconds": 2.5,
        "cache_priority": 4,
    }
    more = {"logit_bias": {"17": 2.5}, "allowed_token_ids": [2, 17, 30], "stop_token_ids": [30]}
    sdk.messages.create(
        model="m",
        max_tokens=20,
        messages=HELLO,
        extra_body={**fields, **more, "temperature": 0.5, "top_k": 3},
    )
    params = scripted.client.requests[-1].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {17: 2.5}
    assert (params.allowed_token_ids, params.stop_token_ids) == ({2, 17, 30}, {30})
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 1.0)


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({}, 0.0),
        ({"cache_control": {"type": "ephemeral"}}, 0.0),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300.0),
        ({"keep_cache_seconds": 7.0, "cache_control": {"type": "ephemeral", "ttl": "5m"}}, 7.0),
        (
            {
                "system": [
                    {
                        "type": "text",
                        "text": "Be brief.",
                        "cache_control": {"type": "ephemeral", "ttl": "1h"},
                    }
                ],
                "cache_control": {"type": "ephemeral", "ttl": "5m"},
            },
            3600.0,
        ),
    ],
)
def test_time_to_live_keeps_the_blocks(
    sdk: Anthropic, scripted: Scripted, body: dict[str, Any], seconds: float
):
    sdk.messages.create(model="m", max_tokens=20, messages=HELLO, extra_body=body)
    assert scripted.client.requests[-1].params.keep_cache_seconds == seconds


@pytest.mark.parametrize("control", [{"type": "ephemeral", "ttl": "2h"}, {"type": "for ever"}, 5])
def test_other_times_to_live_are_refused(sdk: Anthropic, control: Any):
    with pytest.raises(anthropic.BadRequestError, match="cache_control"):
        sdk.messages.create(
            model="m", max_tokens=20, messages=HELLO, extra_body={"cache_control": control}
        )


def test_count_tokens_is_what_the_message_reports(sdk: Anthropic, scripted: Scripted):
    scripted.script = Script(cached_tokens=7)
    asked: dict[str, Any] = {
        "model": "m",
        "messages": HELLO,
        "system": "Be short.",
        "tools": [WEATHER],
    }
    asked["thinking"] = {"type": "adaptive"}
    counted = sdk.messages.count_tokens(**asked)
    assert not scripted.client.requests, "the engine was asked"
    usage = sdk.messages.create(**asked, max_tokens=20).usage
    assert counted.to_dict() == {"input_tokens": usage.input_tokens + 7}


def test_models(sdk: Anthropic):
    (model,) = sdk.models.list()
    assert sdk.models.retrieve("m") == model
    assert (model.id, model.type) == ("m", "model")


# -- what goes wrong -------------------------------------------------------------------------------


def body_of(caught: pytest.ExceptionInfo[anthropic.APIStatusError]) -> dict[str, Any]:
    body = caught.value.body
    assert isinstance(body, dict)
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return body["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"extra_body": {"temperature": 1.5}},
            "temperature must be less than or equal to 1, not 1.5",
        ),
        ({"max_tokens": 0}, "max_tokens must be greater than or equal to 1"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            'type "image"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            r"source\.type is missing",
        ),
        ({"messages": [{"role": "user", "content": [PDF]}]}, 'source type "base64"'),
        (
            {"messages": [{"role": "user", "content": [CITED]}]},
            "citations of a document are not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text is missing",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "Well, "}]},
            "cannot end with trailing whitespace",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
                ]
            },
            "no tool_use block of that id",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice of type any requires tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "names .x., which"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "t"}]}, "has no input_schema"),
        (
            {"extra_body": {"output_config": {"format": {"type": "json_schema"}}}},
            "output_config.format: a format of type json_schema requires a schema",
        ),
        ({"extra_body": {"guided_json": {"uniqueItems": True}}}, "guided_json: .*uniqueItems"),
        ({"extra_body": {"response_format": {"type": "text"}}}, "use output_config.format"),
        ({"extra_body": {"chat_template": "x"}}, "chat_template is not supported"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "tokenize"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences holds 17"),
        ({"stop_sequences": ["a" * 257]}, "stop_sequences holds a string of 257"),
        ({"extra_body": {"n": 2}}, "n: not supported here"),
        ({"extra_body": {"stop": ["a"]}}, "use stop_sequences"),
        ({"extra_body": {"top_logprobs": 2}}, "top_logprobs: not supported here"),
        ({"extra_body": {"logit_bias": {"x": 1}}}, "logit_bias has the key"),
        ({"extra_body": {"frequency_penalty": 3}}, "frequency_penalty"),
        ({"messages": HELLO * 51}, "the number of messages is 51"),
        (
            {"messages": [{"role": "user", "content": "many words " * 3000}]},
            r"prompt is too long: \d+ tokens > 4095 m",
        ),
    ],
)
def test_bad_requests(
    sdk: Anthropic, scripted: Scripted, fields: dict[str, Any], message: str, stream: bool
):
    asked: dict[str, Any] = {
        "model": "m",
        "max_tokens": 20,
        "messages": HELLO,
        "stream": stream,
    } | fields
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        sdk.messages.create(**asked)
    assert body_of(caught)["type"] == "invalid_request_error"
    assert not scripted.client.requests


def test_unknown_model(sdk: Anthropic):
    with pytest.raises(anthropic.NotFoundError, match="gpt") as caught:
        sdk.messages.create(model="gpt", max_tokens=20, messages=HELLO)
    assert body_of(caught)["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="gpt"):
        sdk.messages.count_tokens(model="gpt", messages=HELLO)


@pytest.mark.parametrize("stream", [False, True])
def test_engine_rejection_is_a_bad_request(sdk: Anthropic, scripted: Scripted, stream: bool):
    scripted.script = Script(refuse=RequestTooLarge("it does not fit"))
    with pytest.raises(anthropic.BadRequestError, match="it does not fit"):
        sdk.messages.create(model="m", max_tokens=20, messages=HELLO, stream=stream)


def test_failure_within_a_stream(sdk: Anthropic, scripted: Scripted):
    scripted.script = Script(fail_after=2)
    got = []
    stream = sdk.messages.create(model="m", max_tokens=20, messages=HELLO, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="could not continue"):
        got.extend(event.type for event in stream)
    assert got[0] == "message_start"
    assert "message_stop" not in got


def test_body_too_large(sdk: Anthropic):
    with pytest.raises(anthropic.RequestTooLargeError) as caught:
        sdk.messages.create(
            model="m", max_tokens=20, messages=[{"role": "user", "content": "a" * (1 << 20)}]
        )
    assert body_of(caught)["type"] == "request_too_large"


@pytest.mark.thorough
def test_queue_full():
    client = ScriptedClient(Script(delay=0.05, ends=False))
    config = ServerConfig(port=0, in_process=True, max_queued_samples=1)

    async def flood(url: str) -> list[Any]:
        async with AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as sdk:
            ask = [
                sdk.messages.create(model="scripted", max_tokens=5, messages=HELLO)
                for _ in range(40)
            ]
            return await asyncio.gather(*ask, return_exceptions=True)

    with running_server(client, config) as url:
        answers = asyncio.run(flood(url))
    refused = [each for each in answers if isinstance(each, anthropic.RateLimitError)]
    assert len(refused) == 40 - 33  # a batch of 32, and one request that waits
    assert all(isinstance(each, anthropic.types.Message) for each in answers if each not in refused)
    assert refused[0].response.headers["retry-after"]
    assert refused[0].type == "rate_limit_error"


@pytest.mark.thorough
def test_keys():
    config = ServerConfig(port=0, in_process=True, api_keys=("secret",))
    with running_server(ScriptedClient(), config) as url:
        asked: dict[str, Any] = {"model": "scripted", "max_tokens": 20, "messages": HELLO}
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            with Anthropic(
                base_url=url, api_key="unused", default_headers=headers, max_retries=0
            ) as sdk:
                assert sdk.messages.create(**asked).content
                assert sdk.messages.count_tokens(model="scripted", messages=HELLO).input_tokens
        for given in ({"api_key": "wrong"}, {"auth_token": "wrong"}):
            with Anthropic(base_url=url, max_retries=0, **given) as sdk:
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    sdk.messages.create(**asked)
                assert body_of(caught)["type"] == "authentication_error"
                with pytest.raises(anthropic.AuthenticationError):
                    sdk.messages.count_tokens(model="scripted", messages=HELLO)


@pytest.mark.thorough
def test_model_that_cannot_call_tools_answers_with_text():
    with (
        running_server(ScriptedClient()) as url,
        Anthropic(base_url=url, api_key="k", max_retries=0) as sdk,
    ):
        asked: dict[str, Any] = {"model": "scripted", "messages": HELLO, "tools": [WEATHER]}
        (block,) = sdk.messages.create(**asked, max_tokens=20).content
        assert (block.type, block.text) == ("text", "Hello there.")
        assert sdk.messages.count_tokens(**asked).input_tokens > 1
