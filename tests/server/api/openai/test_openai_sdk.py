"""OpenAI's own client and LangChain's on a scripted engine: every parameter reaches the engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from nano_inference.errors import RequestTooLarge
from tests.server.scripted import THINKS_AND_CALLS, TOOLS, Script, ScriptedClient, with_template

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def lenient(url: str, script: ScriptedClient) -> Iterator[OpenAI]:
    """Return a client without strict mode: legacy completion chunks have `finish_reason: null`,
    which strict mode rejects although OpenAI sends it.
    """
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="scripted", messages=HELLO, logprobs=True, top_logprobs=2, n=2
    )
    first = reply.choices[0]
    assert [choice.message.content for choice in reply.choices] == ["Hello there, 🙂!"] * 2
    assert (first.finish_reason, first.message.role) == ("stop", "assistant")
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    said = b"".join(bytes(token.bytes or ()) for token in first.logprobs.content[:-1])
    assert said.decode() == first.message.content
    assert {len(token.top_logprobs) for token in first.logprobs.content} == {2}
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 2 * len(first.logprobs.content)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_as_a_stream(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="scripted",
        messages=HELLO,
        stream=True,
        n=2,
        logprobs=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    texts, tokens, reasons = ["", ""], [0, 0], list[str | None]([None, None])
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert reasons[choice.index] is None  # nothing after the end
        texts[choice.index] += choice.delta.content or ""
        tokens[choice.index] += len((choice.logprobs and choice.logprobs.content) or ())
        reasons[choice.index] = choice.finish_reason
        assert chunk.usage is None
    assert texts == ["Hello there, 🙂!"] * 2
    assert reasons == ["stop", "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == sum(tokens)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_stream_helper_and_many_at_once(url: str, script: ScriptedClient) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client:

            async def one() -> str:
                async with client.chat.completions.stream(
                    model="scripted", messages=HELLO
                ) as stream:
                    async for _ in stream:
                        pass
                    return (await stream.get_final_completion()).choices[0].message.content or ""

            async def other() -> str:
                reply = await client.chat.completions.create(model="scripted", messages=HELLO)
                return reply.choices[0].message.content or ""

            return await asyncio.gather(*[one() for _ in range(8)], *[other() for _ in range(8)])

    assert set(asyncio.run(ask())) == {"Hello there, 🙂!"}


def test_completions(client: OpenAI) -> None:
    reply = client.completions.create(
        model="scripted", prompt=["One", "Two"], n=2, logprobs=1, max_tokens=9
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.tokens[:2] == ["Hello", " there"]
    assert logprobs.text_offset[:3] == [0, 5, 11]
    ids = client.completions.create(model="scripted", prompt=[[1, 2], [3]], max_tokens=2)
    assert ids.usage is not None
    assert (ids.usage.prompt_tokens, ids.usage.completion_tokens) == (3, 4)
    assert [choice.finish_reason for choice in ids.choices] == ["length"] * 2


def test_completions_as_a_stream(lenient: OpenAI, client: OpenAI) -> None:
    def ask(client: OpenAI) -> list[Any]:
        return list(
            client.completions.create(model="scripted", prompt="One", max_tokens=20, stream=True)
        )

    chunks = ask(lenient)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there, 🙂!"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    # if this fails, remove the fixture
    with pytest.raises(openai.APIResponseValidationError):
        ask(client)


def test_tools_and_reasoning(client: OpenAI, script: ScriptedClient) -> None:
    script.script = Script(THINKS_AND_CALLS)
    reply = client.chat.completions.create(
        model="scripted", messages=HELLO, tools=TOOLS, tool_choice="auto"
    )
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == (
        "weather",
        '{"city": "Köln", "days": 2}',
    )
    told = choice.message.model_extra or {}
    assert told["reasoning"] == told["reasoning_content"]
    assert "The weather." in told["reasoning"]
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert (reply.usage.completion_tokens_details.reasoning_tokens or 0) > 3
    prompt = script.tokenizer.decode(script.requests[0].prompt, skip_special_tokens=False)
    assert '"name": "weather"' in prompt

    answer: Any = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": [{"type": "text", "text": "Rain."}],
    }
    script.script = Script("Rain!")
    again: Any = [*HELLO, choice.message.model_dump(exclude_none=True), answer]
    second = client.chat.completions.create(model="scripted", messages=again, tools=TOOLS)
    assert second.choices[0].message.content == "Rain!"
    prompt = script.tokenizer.decode(script.requests[1].prompt, skip_special_tokens=False)
    assert (
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln", "days": 2}}</tool_call>'
        in prompt
    )
    assert "Rain." in prompt


@pytest.mark.parametrize("portion", [1, 4, 100])
def test_tools_and_reasoning_as_a_stream(
    client: OpenAI, script: ScriptedClient, portion: int
) -> None:
    script.script = Script(THINKS_AND_CALLS, portion=portion)
    reasoning, names, arguments, ids, reason = "", [], "", [], None
    for chunk in client.chat.completions.create(
        model="scripted", messages=HELLO, tools=TOOLS, stream=True
    ):
        (choice,) = chunk.choices
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            assert call.function is not None
            ids += [call.id] if call.id is not None else []
            names += [call.function.name] if call.function.name is not None else []
            arguments += call.function.arguments or ""
        assert not (choice.delta.content or "").strip()
        reason = choice.finish_reason
    assert "The weather." in reasoning
    assert (names, len(ids), arguments) == (["weather"], 1, '{"city": "Köln", "days": 2}')
    assert reason == "tool_calls"


def test_tools_that_may_not_be_used(client: OpenAI, script: ScriptedClient) -> None:
    script.script = Script("Never <tool_call>.")
    reply = client.chat.completions.create(
        model="scripted", messages=HELLO, tools=TOOLS, tool_choice="none"
    )
    assert reply.choices[0].message.content == "Never <tool_call>."
    assert '"weather"' not in script.tokenizer.decode(script.requests[0].prompt)
    client.chat.completions.create(
        model="scripted", messages=HELLO, tools=TOOLS, tool_choice="required"
    )
    grammar = script.requests[-1].params.grammar
    assert grammar is not None
    assert "weather" in grammar.text


def test_errors_are_the_sdk_s_own(client: OpenAI, script: ScriptedClient) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="scripted", messages=HELLO, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO, stream=True)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="scripted", prompt="word " * 600)
    assert long.value.code == "context_length_exceeded"
    assert script.requests == []
    script.script = Script(refuse=RequestTooLarge("it can never fit."))
    with pytest.raises(openai.BadRequestError, match="never fit"):
        client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
    script.script = Script(fail_after=0)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="scripted", messages=HELLO)
    script.script = Script(fail_after=2)
    with (
        pytest.raises(openai.APIError),
        client.chat.completions.stream(model="scripted", messages=HELLO) as stream,
    ):
        list(stream)  # part of the stream has been sent


def test_extensions_through_extra_body(client: OpenAI, script: ScriptedClient) -> None:
    extra = {
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "cache_salt": "s",
        "priority": -1,
        "raw_logprobs": True,
        "return_token_ids": True,
    }
    reply = client.chat.completions.create(
        model="scripted",
        messages=HELLO,
        seed=-1,
        max_completion_tokens=4,
        logit_bias={"9": -5},
        extra_body=extra,
    )
    params = script.requests[0].params
    assert {name: getattr(params, name) for name in extra if hasattr(params, name)} == {
        **{name: value for name, value in extra.items() if name != "return_token_ids"},
        "stop_token_ids": frozenset([5]),
    }
    assert (params.seed, params.max_tokens, dict(params.logit_bias)) == (2**64 - 1, 4, {9: -5.0})
    told = reply.choices[0].model_extra or {}
    assert (len(told["token_ids"]), len(told["raw_logprobs"]), told["seed"]) == (4, 4, 2**64 - 1)
    assert (reply.model_extra or {})["prompt_token_ids"] == script.requests[0].prompt


# importing and using langchain-core raises its own deprecation warnings
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::UserWarning"
)
def test_langchain(url: str, script: ScriptedClient) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="scripted", base_url=f"{url}/v1", api_key="none", max_retries=0)  # pyright: ignore
    assert model.invoke([HumanMessage("Hello")]).content == "Hello there, 🙂!"
    assert "".join(str(chunk.content) for chunk in model.stream("Hello")) == "Hello there, 🙂!"
    script.script = Script(THINKS_AND_CALLS)
    called = model.bind_tools(TOOLS).invoke("Weather?")
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [
        ("weather", {"city": "Köln", "days": 2})
    ]


def test_template_folder_matches_the_tests_assumptions(tmp_path: Path) -> None:
    assert (
        ScriptedClient(tokenizer_folder=with_template(tmp_path / "t", None)).tokenizer.chat_template
        is None
    )
