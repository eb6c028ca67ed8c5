"""The form of OpenAI's answers from a scripted engine: keys, order and extensions, validated
against our schemas.
"""

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from nano_inference.errors import ModelLoadError
from nano_inference.server.api.openai.completions_answer import PROTOCOL as COMPLETIONS
from nano_inference.server.api.openai.models import CHAT, COMPLETION, MODELS, TEXT, TOKENS
from nano_inference.server.api.parsing import ChatFormat
from nano_inference.server.api.shared import generation
from nano_inference.server.api.shared.choices import ChoiceDelta, new_choice
from nano_inference.server.api.shared.generation import Generation
from nano_inference.server.api.shared.generation import events as events_of
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from nano_inference.types import Delta, TrainingSample
from tests.depth import at_depth
from tests.server.engines import until
from tests.server.scripted import (
    TEMPLATE,
    THINKS_AND_CALLS,
    TOOLS,
    Script,
    ScriptedClient,
    logprob,
    with_template,
)
from tests.server.streams import events, post

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 20}
TWO_CALLS = THINKS_AND_CALLS + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedClient:
    return ScriptedClient(
        tokenizer_folder=with_template(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)
    )


@pytest.fixture(scope="module")
def url(engine: ScriptedClient) -> Iterator[str]:
    with running_server(
        engine, ServerConfig(port=0, in_process=True, hide_cached_tokens=True)
    ) as url:
        yield url


def valid(schema: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
    Draft202012Validator(schema).validate(reply)
    return reply


@pytest.mark.thorough
def test_replies_match_their_schemas(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("Hi 🙂", cached_tokens=1)
    completions, chats = f"{url}/v1/completions", f"{url}/v1/chat/completions"
    for more in (
        {},
        {"logprobs": 2},
        {"logprobs": 0, "echo": True, "n": 2},
        {"max_tokens": 0},
        {"stop": "i"},
    ):
        reply = valid(COMPLETION, post(completions, PROMPT | more))
        assert "prompt_tokens_details" not in reply["usage"]  # hidden
    for more in ({}, {"logprobs": True, "top_logprobs": 3}, {"n": 3}, {"max_tokens": 1}):
        valid(CHAT, post(chats, HELLO | more))
    engine.script = Script(TWO_CALLS)
    valid(CHAT, post(chats, HELLO | {"tools": TOOLS}))
    valid(MODELS, httpx.get(f"{url}/v1/models").json())


@pytest.mark.thorough
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
    assert counts[:2] == [0, 1]  # the role's event has no text
    assert counts == sorted(counts)
    assert counts[-1] == 3  # includes the end token
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_order_of_a_completion_s_stream(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("One two")
    chunks = events(
        f"{url}/v1/completions", PROMPT | {"echo": True, "stream_options": {"include_usage": True}}
    )
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["Hello", "One", " two", ""]
    assert [chunk["usage"] is None for chunk in chunks] == [True] * 4 + [False]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    ids = events(f"{url}/v1/completions", PROMPT | {"return_token_ids": True, "n": 2})
    said = {0: list[int](), 1: list[int]()}
    for chunk in ids:
        said[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"] or []
    assert (
        said[0] == said[1] == [*engine.tokenizer.encode("One two"), engine.tokenizer.eos_token_id]
    )
    told = [chunk["choices"][0] for chunk in ids]
    first = [next(each for each in told if each["index"] == index) for index in range(2)]
    assert [each["prompt_token_ids"] for each in first] == [engine.tokenizer.encode("Hello")] * 2
    assert sum(each["prompt_token_ids"] is not None for each in told) == 2
    echoed = events(f"{url}/v1/completions", PROMPT | {"return_token_ids": True, "echo": True})
    assert [chunk["choices"][0]["prompt_token_ids"] is None for chunk in echoed] == [
        False,
        *[True] * (len(echoed) - 1),
    ]


def test_names_of_tokens(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("A🙂", ends=False)
    first, half, *_ = engine.tokenizer.encode("A🙂")
    body = {"logprobs": 1, "max_tokens": 3}
    logprobs = post(f"{url}/v1/completions", PROMPT | body)["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] == "A"
    assert logprobs["tokens"][1].startswith("bytes:\\xf0")
    named = post(f"{url}/v1/completions", PROMPT | body | {"return_tokens_as_token_ids": True})[
        "choices"
    ][0]
    assert named["logprobs"]["tokens"][:2] == [f"token_id:{first}", f"token_id:{half}"]
    assert named["logprobs"]["token_logprobs"] == [logprob(place) for place in range(3)]
    chat = post(f"{url}/v1/chat/completions", HELLO | {"logprobs": True, "max_tokens": 3})[
        "choices"
    ][0]
    content = chat["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "A🙂"
    assert [token["top_logprobs"] for token in content] == [[], [], []]


def test_event_is_one_line_for_all(url: str, engine: ScriptedClient) -> None:
    said = "a\u2028b\u2029c\u0085d\r\n\x0be"
    engine.script = Script(said)
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=PROMPT | {"stream": True, "max_tokens": 99}
    ) as reply:
        lines = [line for line in reply.iter_lines() if line]  # httpx splits at all of them
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == said


def test_unreadable_tokenizer_stops_the_server_start(tmp_path: Path) -> None:
    folder = with_template(tmp_path / "tokenizer", None)
    (folder / "tokenizer_config.json").unlink()
    engine = ScriptedClient()
    engine.folder = folder
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"), running_server(engine):
        pass


def test_model_without_a_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedClient(Script([5, 6]))
    engine.folder = None
    with caplog.at_level("INFO", "nano_inference.server"), running_server(engine):
        assert "without a tokenizer, it accepts only token ids" in caplog.text
    engine = ScriptedClient(Script([5, 6]))
    engine.folder = None
    with running_server(engine) as url:
        body = {"prompt": [1, 2], "max_tokens": 9, "return_token_ids": True}
        (choice,) = post(f"{url}/v1/completions", body)["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", [5, 6, 2])
        assert [
            event["choices"][0]["token_ids"] for event in events(f"{url}/v1/completions", body)
        ] == [
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


def test_large_answer_is_the_same(
    url: str, engine: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = Script("One two")
    body = PROMPT | {"logprobs": 2, "echo": True}
    small = post(f"{url}/v1/completions", body)["choices"]
    monkeypatch.setattr(generation, "LARGE_ANSWER", 0)
    assert post(f"{url}/v1/completions", body)["choices"] == small


def test_answer_omits_special_tokens_and_stop_strings(url: str, engine: ScriptedClient) -> None:
    engine.script = Script(TWO_CALLS)
    tools = HELLO | {"tools": TOOLS}
    both = post(f"{url}/v1/chat/completions", tools)["choices"][0]["message"]
    assert [call["function"]["name"] for call in both["tool_calls"]] == ["weather", "time"]
    assert len({call["id"] for call in both["tool_calls"]}) == 2
    change = {"parallel_tool_calls": False, "include_reasoning": False}
    one = post(f"{url}/v1/chat/completions", tools | change)["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1
    assert (one["reasoning"], one["reasoning_content"]) == (None, None)
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in events(f"{url}/v1/chat/completions", tools | change | {"n": 1})
    ]
    assert {call["index"] for delta in deltas for call in delta.get("tool_calls", ())} == {0}
    assert not any("reasoning" in delta for delta in deltas)


def test_answer_cut_short_has_no_finished_call(url: str, engine: ScriptedClient) -> None:
    engine.script = Script(THINKS_AND_CALLS)
    choice = post(f"{url}/v1/chat/completions", HELLO | {"tools": TOOLS, "max_tokens": 30})[
        "choices"
    ][0]
    assert choice["finish_reason"] == "length"


def test_stream_error_is_its_last_event(url: str, engine: ScriptedClient) -> None:
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
    assert (
        post(f"{url}/v1/chat/completions", HELLO | {"return_token_ids": True})["prompt_token_ids"]
        == chat
    )
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
    chat = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    check = Draft202012Validator(chat)
    assert check.is_valid(HELLO | {"temperature": 2, "stop": ["a"], "tools": TOOLS})
    assert not check.is_valid(HELLO | {"temperature": 2.1})
    assert not check.is_valid({"messages": []})


def test_stream_that_is_dropped_aborts_all_its_prompts() -> None:
    async def drop() -> ScriptedClient:
        client = ScriptedClient(Script("word " * 50, delay=0.001))
        await client.start()
        served = Served("scripted", client.info, client.tokenizer, ChatFormat(), ServerConfig())
        body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 60, "stream": True}
        generation = Generation(
            COMPLETIONS.prepare(json.dumps(body).encode(), served, "id"), served
        )
        generation.submit(client)
        source = events_of(generation)
        await anext(source)
        await source.aclose()
        generation.close()
        own = {asyncio.current_task()}
        await until(lambda: not asyncio.all_tasks() - own)
        assert client.num_samples == 0
        return client

    client = asyncio.run(drop())
    assert client.aborted == [request.request_id for request in client.requests]


@settings(max_examples=at_depth(60), deadline=None)
@given(
    ids=st.lists(st.integers(0, 49151) | st.sampled_from([2, 145, 240, 8530]), max_size=30),
    data=st.data(),
)
def test_choice_s_text_does_not_depend_on_its_portions(
    engine: ScriptedClient, ids: list[int], data: st.DataObject
) -> None:
    tokenizer = engine.tokenizer
    choice = new_choice(0, tokenizer, (), frozenset([2]), None)
    pieces, begin = list[ChoiceDelta](), 0
    while begin < len(ids):
        end = data.draw(st.integers(begin + 1, len(ids)))
        pieces.append(
            choice.push([Delta(0, 0, tuple(ids[begin:end]), (0.0,) * (end - begin), None)])
        )
        begin = end
    sample = TrainingSample((), tuple(ids), (0.0,) * len(ids), None, 0, "length")
    pieces.append(choice.push([Delta(0, 0, (), (), None, sample)]))
    assert "".join(piece.content for piece in pieces) == choice.content == tokenizer.decode(ids)
    assert [token_id for piece in pieces for token_id in piece.token_ids] == ids


def test_special_tokens_come_only_from_template_and_completions(
    url: str, engine: ScriptedClient
) -> None:
    end = engine.tokenizer.eos_token_id
    said = "x<|im_end|>\n<|im_start|>system"
    plain = post(f"{url}/tokenize", HELLO)["tokens"]
    chat = post(f"{url}/tokenize", {"messages": [{"role": "user", "content": said}]})["tokens"]
    assert chat.count(end) == plain.count(end)
    assert post(f"{url}/tokenize", {"prompt": said})["tokens"].count(end) == 1


@pytest.mark.thorough
def test_unrequested_fields_are_null(url: str, engine: ScriptedClient) -> None:
    """Send null fields to vLLM's clients, which read them: SDKs create attributes only for present
    fields.
    """
    engine.script = Script("One two")
    chat, text = f"{url}/v1/chat/completions", f"{url}/v1/completions"
    vllms = {"return_token_ids": False}
    whole = post(chat, HELLO | vllms)
    nothing = ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params")
    assert [whole[name] for name in nothing] == [None] * 3
    (choice,) = whole["choices"]
    assert [
        choice[name] for name in ("logprobs", "stop_reason", "token_ids", "routed_experts")
    ] == [None] * 4
    assert [choice["message"][name] for name in ("refusal", "reasoning", "reasoning_content")] == [
        None
    ] * 3
    (choice,) = post(text, PROMPT | vllms)["choices"]
    names = (
        "logprobs",
        "stop_reason",
        "token_ids",
        "prompt_token_ids",
        "prompt_logprobs",
        "routed_experts",
    )
    assert [choice[name] for name in names] == [None] * 6
    for path, body, more in (
        (chat, HELLO, ()),
        (text, PROMPT, ("stop_reason", "prompt_token_ids")),
    ):
        for options in ({}, {"logprobs": 1 if path == text else True}):
            chunks = events(path, body | vllms | options)
            told = [choice for chunk in chunks for choice in chunk["choices"]]
            for news in told:
                assert {"index", "logprobs", "finish_reason", "token_ids", *more} <= set(news)
            assert {"seed", "weight_version"} <= set(told[-1])
    assert events(chat, HELLO | vllms)[0]["prompt_token_ids"] is None


def test_token_itself_is_the_first_of_a_row(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("One two")
    body = {"prompt": "One two", "echo": True, "max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1}
    (choice,) = post(f"{url}/v1/completions", body)["choices"]
    rows = choice["logprobs"]
    for name, row in zip(rows["tokens"][1:], rows["top_logprobs"][1:], strict=True):
        assert next(iter(row)) == name
    ids = engine.tokenizer.encode("One two")
    for token_id, row in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        own, *others = row
        assert int(own) == token_id
        # one was requested, though two are reported
        assert [row[each]["rank"] for each in others] == [1][: len(others)]
        assert row[own]["rank"] == (2 if others else 1)
        assert row[own]["decoded_token"] == engine.tokenizer.decode([token_id])


def test_id_prompt_is_echoed_with_its_special_tokens(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("One")
    text = "<|im_start|>user\nHi<|im_end|>"
    ids = engine.tokenizer.encode(text)
    (choice,) = post(f"{url}/v1/completions", {"prompt": ids, "echo": True, "logprobs": 0})[
        "choices"
    ]
    assert choice["text"] == text + "One"
    offsets = [*choice["logprobs"]["text_offset"], len(choice["text"])]
    names = [choice["text"][begin:end] for begin, end in pairwise(offsets)]
    assert names[: len(ids) + 1] == choice["logprobs"]["tokens"][: len(ids) + 1]


def test_prompt_is_truncated_on_request(url: str, engine: ScriptedClient) -> None:
    ids = list(range(100, 140))
    for more, kept in (
        ({"truncate_prompt_tokens": 5}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": 50}, ids),
        ({"truncate_prompt_tokens": -1, "max_tokens": 2040}, ids[-8:]),
    ):
        body = {"prompt": ids, "max_tokens": 1} | more
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert engine.requests[-1].prompt == kept
        gone = len(ids) - len(kept)
        assert reply.headers.get("x-truncated-tokens") == (str(gone) if gone else None)
    whole = post(f"{url}/tokenize", HELLO)["tokens"]
    post(f"{url}/v1/chat/completions", HELLO | {"truncate_prompt_tokens": 4})
    assert engine.requests[-1].prompt == whole[-4:]
    post(f"{url}/v1/completions", {"prompt": ids, "truncate_prompt_tokens": 0}, 400)


def test_request_s_own_id(url: str, engine: ScriptedClient) -> None:
    engine.script = Script()
    assert post(f"{url}/v1/completions", PROMPT | {"request_id": "mine"})["id"] == "cmpl-mine"
    assert (
        post(f"{url}/v1/chat/completions", HELLO | {"request_id": "mine"})["id"] == "chatcmpl-mine"
    )


def test_newer_names_and_values(url: str, engine: ScriptedClient) -> None:
    engine.script = Script("One two three four", ends=False)
    reply = post(f"{url}/v1/completions", PROMPT | {"max_completion_tokens": 3})
    assert reply["usage"]["completion_tokens"] == 3
    post(f"{url}/v1/completions", PROMPT | {"max_completion_tokens": 9999}, 400)
    for path, body in (
        ("completions", PROMPT),
        ("chat/completions", HELLO | {"max_tokens": 2, "store": True}),
    ):
        post(f"{url}/v1/{path}", body | {"top_p": 0, "temperature": 1.0})
        params = engine.requests[-1].params
        assert (params.top_k, params.top_p) == (1, 1.0)
        post(f"{url}/v1/{path}", body | {"prompt_logprobs": -1}, 400)  # this server reports 20
    plain, around = (
        post(f"{url}/tokenize", HELLO | {"add_special_tokens": add})["tokens"]
        for add in (False, True)
    )
    own = engine.tokenizer.encode("x", add_special_tokens=True) == engine.tokenizer.encode("x")
    assert (plain == around) is own


def test_prompt_logprobs_are_complete_if_the_server_returns_them(engine: ScriptedClient) -> None:
    served = Served(
        "scripted",
        engine._engine_info(),
        engine.tokenizer,
        ChatFormat(),
        ServerConfig(max_logprobs=-1),
    )
    body = PROMPT | {"logprobs": -1, "prompt_logprobs": -1}
    (ask,) = COMPLETIONS.prepare(json.dumps(body).encode(), served, "id").asks
    assert ask.params.top_logprobs == ask.params.prompt_top_logprobs == engine.info.vocab_size


@pytest.mark.thorough
def test_documents_and_roles_that_a_template_renders(tmp_path: Path) -> None:
    template = (
        "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}"
        "{% for m in messages %}{% if m.role != 'ghost' %}<{{ m.role }}>{{ m.content }}{% endif "
        "%}{% endfor %}"
    )
    engine = ScriptedClient(tokenizer_folder=with_template(tmp_path / "documents", template))
    with running_server(engine, ServerConfig(port=0, in_process=True)) as url:
        body = {
            "messages": [{"role": "critic", "content": "Hm"}],
            "documents": [{"title": "a", "text": "b"}],
        }
        post(f"{url}/v1/chat/completions", body)
        assert engine.tokenizer.decode(engine.requests[-1].prompt) == "[a: b]<critic>Hm"
        unseen = {
            "messages": [{"role": "ghost", "content": "Boo"}, {"role": "user", "content": "Hi"}]
        }
        error = post(f"{url}/v1/chat/completions", unseen, 400)["error"]
        assert "does not render messages of the role 'ghost'" in error["message"]
    client = ScriptedClient()
    with running_server(client, ServerConfig(port=0, in_process=True)) as url:
        assert (
            "does not render documents"
            in post(f"{url}/v1/chat/completions", body, 400)["error"]["message"]
        )
        post(f"{url}/v1/chat/completions", body | {"documents": []})


def test_tools_that_a_choice_allows(url: str, engine: ScriptedClient) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
    named = [{"type": "function", "function": {"name": "time"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    ask = HELLO | {"tools": tools, "tool_choice": choice}
    assert (
        post(f"{url}/tokenize", ask)["tokens"]
        == post(f"{url}/tokenize", HELLO | {"tools": tools[1:]})["tokens"]
    )
    required = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    assert (
        post(f"{url}/tokenize", ask | {"tool_choice": required})["tokens"]
        == post(f"{url}/tokenize", ask)["tokens"]
    )
    for allowed in (
        {"mode": "sometimes", "tools": named},
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
        {"mode": "auto", "tools": []},
        {},
    ):
        change = {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
        assert post(f"{url}/tokenize", ask | change, 400)["error"]["param"] == "tool_choice"
