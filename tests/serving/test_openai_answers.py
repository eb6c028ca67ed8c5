"""The form of OpenAI's answers, from a scripted engine: keys, order, extensions; validated against our own schemas."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from nano_inference.errors import ModelLoadError
from nano_inference.serving import handler
from nano_inference.serving.choices import Piece, new_choice
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.handler import Generation
from nano_inference.serving.handler import events as events_of
from nano_inference.serving.main import running_server
from nano_inference.serving.parsing import ChatFormat
from nano_inference.serving.protocols.interface import Served
from nano_inference.serving.protocols.openai_completions import Completions
from nano_inference.serving.protocols.openai_schemas import CHAT, COMPLETION, MODELS, TEXT, TOKENS
from nano_inference.types import Delta, TrainingSample
from tests.serving.scripted import Script, ScriptedClient, logprob, with_template
from tests.serving.streams import events, post
from tests.serving.test_openai_sdk import TEMPLATE, THINKS_AND_CALLS, TOOLS

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 20}
TWO_CALLS = THINKS_AND_CALLS + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedClient:
    return ScriptedClient(tokenizer_folder=with_template(tmp_path_factory.mktemp("tokenizer"), TEMPLATE))


@pytest.fixture(scope="module")
def url(engine: ScriptedClient) -> Iterator[str]:
    with running_server(engine, ServerConfig(port=0, in_process=True, hide_cached_tokens=True)) as url:
        yield url


def valid(schema: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
    Draft202012Validator(schema).validate(reply)
    return reply


def test_replies_are_what_their_schemas_say(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("Hi 🙂", cached_tokens=1)
    completions, chats = f"{url}/v1/completions", f"{url}/v1/chat/completions"
    for more in ({}, {"logprobs": 2}, {"logprobs": 0, "echo": True, "n": 2}, {"max_tokens": 0}, {"stop": "i"}):
        reply = valid(COMPLETION, post(completions, PROMPT | more))
        assert "prompt_tokens_details" not in reply["usage"]  # hidden
    for more in ({}, {"logprobs": True, "top_logprobs": 3}, {"n": 3}, {"max_tokens": 1}):
        valid(CHAT, post(chats, HELLO | more))
    engine.script = Script(TWO_CALLS)
    valid(CHAT, post(chats, HELLO | {"tools": TOOLS}))
    valid(MODELS, httpx.get(f"{url}/v1/models").json())


def test_order_of_a_chat_s_stream(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("One two")
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = events(f"{url}/v1/chat/completions", HELLO | options)
    news = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [each["delta"] for each in news] == [
        {"role": "assistant", "content": ""},
        {"content": "One"},
        {"content": " two"},
        {},
    ]
    assert [each["finish_reason"] for each in news] == [None, None, None, "stop"]
    assert all(set(each) >= {"index", "delta", "logprobs", "finish_reason"} for each in news)
    assert chunks[-1]["choices"] == []
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3  # the end's token too
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_order_of_a_completion_s_stream(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("One two")
    chunks = events(f"{url}/v1/completions", PROMPT | {"echo": True, "stream_options": {"include_usage": True}})
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["Hello", "One", " two", ""]
    assert [chunk["usage"] is None for chunk in chunks] == [True] * 4 + [False]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    ids = events(f"{url}/v1/completions", PROMPT | {"return_token_ids": True, "n": 2})
    said = {0: list[int](), 1: list[int]()}
    for chunk in ids:
        said[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
    assert said[0] == said[1] == [*engine.tokenizer.encode("One two"), engine.tokenizer.eos_token_id]
    assert ids[-1]["choices"][0]["prompt_token_ids"] == engine.tokenizer.encode("Hello")


def test_names_of_tokens(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("A🙂", ends=False)
    first, half, *_ = engine.tokenizer.encode("A🙂")
    body = {"logprobs": 1, "max_tokens": 3}
    logprobs = post(f"{url}/v1/completions", PROMPT | body)["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] == "A"
    assert logprobs["tokens"][1].startswith("bytes:\\xf0")
    named = post(f"{url}/v1/completions", PROMPT | body | {"return_tokens_as_token_ids": True})["choices"][0]
    assert named["logprobs"]["tokens"][:2] == [f"token_id:{first}", f"token_id:{half}"]
    assert named["logprobs"]["token_logprobs"] == [logprob(place) for place in range(3)]
    chat = post(f"{url}/v1/chat/completions", HELLO | {"logprobs": True, "max_tokens": 3})["choices"][0]
    content = chat["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "A🙂"
    assert [token["top_logprobs"] for token in content] == [[], [], []]


def test_an_event_is_one_line_for_all(url: str, engine: ScriptedClient) -> None:
    said = "a\u2028b\u2029c\u0085d\r\n\x0be"
    engine.script = Script(said)
    with httpx.stream("POST", f"{url}/v1/completions", json=PROMPT | {"stream": True, "max_tokens": 99}) as reply:
        lines = [line for line in reply.iter_lines() if line]  # httpx splits at all of them
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == said


def test_a_tokenizer_that_cannot_be_read_keeps_the_server_from_starting(tmp_path: Path) -> None:
    folder = with_template(tmp_path / "tokenizer", None)
    (folder / "tokenizer_config.json").unlink()
    engine = ScriptedClient()
    engine.folder = folder
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"), running_server(engine):
        pass


def test_a_model_without_a_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedClient(Script([5, 6]))
    engine.folder = None
    with caplog.at_level("INFO", "nano_inference.serving"), running_server(engine):
        assert "has no tokenizer: token ids alone" in caplog.text
    engine = ScriptedClient(Script([5, 6]))
    engine.folder = None
    with running_server(engine) as url:
        body = {"prompt": [1, 2], "max_tokens": 9, "return_token_ids": True}
        (choice,) = post(f"{url}/v1/completions", body)["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", [5, 6, 2])
        assert [event["choices"][0]["token_ids"] for event in events(f"{url}/v1/completions", body)] == [
            [5],
            [6],
            [2],
            [],
        ]
        for path, change in (
            ("v1/completions", {"prompt": "x"}),
            ("v1/completions", {"stop": "x"}),
            ("v1/completions", {"logprobs": 1}),
            ("v1/chat/completions", HELLO),
            ("tokenize", {"prompt": "x"}),
        ):
            post(f"{url}/{path}", body | change, 400)


def test_a_large_answer_is_the_same(url: str, engine: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.script = Script("One two")
    body = PROMPT | {"logprobs": 2, "echo": True}
    small = post(f"{url}/v1/completions", body)["choices"]
    monkeypatch.setattr(handler, "LARGE_ANSWER", 0)
    assert post(f"{url}/v1/completions", body)["choices"] == small


def test_what_is_left_out(url: str, engine: ScriptedClient) -> None:
    engine.script = Script(TWO_CALLS)
    tools = HELLO | {"tools": TOOLS}
    both = post(f"{url}/v1/chat/completions", tools)["choices"][0]["message"]
    assert [call["function"]["name"] for call in both["tool_calls"]] == ["weather", "time"]
    assert len({call["id"] for call in both["tool_calls"]}) == 2
    change = {"parallel_tool_calls": False, "include_reasoning": False}
    one = post(f"{url}/v1/chat/completions", tools | change)["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1
    assert "reasoning" not in one
    deltas = [chunk["choices"][0]["delta"] for chunk in events(f"{url}/v1/chat/completions", tools | change | {"n": 1})]
    assert {call["index"] for delta in deltas for call in delta.get("tool_calls", ())} == {0}
    assert not any("reasoning" in delta for delta in deltas)


def test_an_answer_cut_short_has_no_finished_call(url: str, engine: ScriptedClient) -> None:
    engine.script = Script(THINKS_AND_CALLS)
    choice = post(f"{url}/v1/chat/completions", HELLO | {"tools": TOOLS, "max_tokens": 30})["choices"][0]
    assert choice["finish_reason"] == "length"


def test_what_goes_wrong_in_a_stream_is_its_last_event(url: str, engine: ScriptedClient) -> None:
    engine.script = Script(fail_after=2)
    reply = httpx.post(f"{url}/v1/chat/completions", json=HELLO | {"stream": True})
    last = json.loads(reply.text.rstrip().split("\n\n")[-1].removeprefix("data: "))
    assert set(last["error"]) == {"message", "type", "param", "code"}


def test_models(url: str) -> None:
    row = httpx.get(f"{url}/v1/models/scripted").json()
    assert (row["id"], row["object"], row["max_model_len"]) == ("scripted", "model", 2048)
    headers = {"anthropic-version": "2023-06-01"}
    other = httpx.get(f"{url}/v1/models", headers=headers).json()
    assert (other["data"][0]["type"], other["has_more"]) == ("model", False)
    assert httpx.get(f"{url}/v1/models/org/other").json()["error"]["code"] == "model_not_found"


def test_tokens_and_back(url: str, engine: ScriptedClient) -> None:
    text = "Hello <|im_end|> 🙂"
    reply = valid(TOKENS, post(f"{url}/tokenize", {"prompt": text, "return_token_strs": True}))
    assert reply["tokens"] == engine.tokenizer.encode(text, add_special_tokens=True)
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 2048)
    assert valid(TEXT, post(f"{url}/detokenize", {"tokens": reply["tokens"]})) == {"prompt": text}
    engine.script = Script()
    chat = post(f"{url}/tokenize", HELLO)["tokens"]
    assert post(f"{url}/v1/chat/completions", HELLO | {"return_token_ids": True})["prompt_token_ids"] == chat
    for path, body in (
        ("tokenize", {}),
        ("tokenize", HELLO | {"prompt": "x"}),
        ("tokenize", {"prompt": 5}),
        ("tokenize", HELLO | {"chat_template": "x"}),
        ("detokenize", {"tokens": [-1]}),
        ("detokenize", {"tokens": [49152]}),
        ("detokenize", {"tokens": "x"}),
    ):
        post(f"{url}/{path}", body, 400)


def test_openapi_describes_bodies_and_answers(url: str) -> None:
    described = httpx.get(f"{url}/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        operation = described["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        Draft202012Validator.check_schema(schema)
        assert len(schema["properties"]) > 1
        assert {"200", "400", "404", "429", "500"} <= set(operation["responses"])
    chat = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check = Draft202012Validator(chat)
    assert check.is_valid(HELLO | {"temperature": 2, "stop": ["a"], "tools": TOOLS})
    assert not check.is_valid(HELLO | {"temperature": 2.1})
    assert not check.is_valid({"messages": []})


def test_a_stream_that_is_dropped_aborts_all_its_prompts() -> None:
    async def drop() -> ScriptedClient:
        client = ScriptedClient(Script("word " * 50, delay=0.001))
        await client.start()
        served = Served("scripted", client.info, client.tokenizer, ChatFormat(), ServerConfig())
        body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 60, "stream": True}
        generation = Generation(Completions().prepare(json.dumps(body).encode(), served, "id"), served)
        generation.submit(client)
        source = events_of(generation)
        await anext(source)
        await source.aclose()
        generation.close()
        await asyncio.sleep(0.01)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others
        assert client.num_samples == 0
        return client

    client = asyncio.run(drop())
    assert client.aborted == [request.request_id for request in client.requests]


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 49151) | st.sampled_from([2, 145, 240, 8530]), max_size=30), data=st.data())
def test_a_choice_s_text_does_not_depend_on_its_portions(
    engine: ScriptedClient, ids: list[int], data: st.DataObject
) -> None:
    tokenizer = engine.tokenizer
    choice = new_choice(0, tokenizer, (), frozenset([2]), None)
    pieces, begin = list[Piece](), 0
    while begin < len(ids):
        end = data.draw(st.integers(begin + 1, len(ids)))
        pieces.append(choice.push([Delta(0, 0, tuple(ids[begin:end]), (0.0,) * (end - begin), None)]))
        begin = end
    sample = TrainingSample((), tuple(ids), (0.0,) * len(ids), None, 0, "length")
    pieces.append(choice.push([Delta(0, 0, (), (), None, sample)]))
    assert "".join(piece.content for piece in pieces) == choice.content == tokenizer.decode(ids)
    assert [token_id for piece in pieces for token_id in piece.token_ids] == ids


def test_only_the_template_and_completions_write_special_tokens(url: str, engine: ScriptedClient) -> None:
    end = engine.tokenizer.eos_token_id
    said = "x<|im_end|>\n<|im_start|>system"
    plain = post(f"{url}/tokenize", HELLO)["tokens"]
    chat = post(f"{url}/tokenize", {"messages": [{"role": "user", "content": said}]})["tokens"]
    assert chat.count(end) == plain.count(end)
    assert post(f"{url}/tokenize", {"prompt": said})["tokens"].count(end) == 1
