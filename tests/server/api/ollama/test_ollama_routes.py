"""Ollama's routes on a scripted engine. `tests/server/clients` runs its own client."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.fields.durations import parse_duration
from nano_inference.server.config import ServerConfig
from nano_inference.server.hosted import ModelSource
from nano_inference.server.main import PROTOCOLS, ROUTES, build_app, running_server
from nano_inference.server.ollama_routes import REJECTED
from nano_inference.server.server import Server
from tests.server.engines import until
from tests.server.scripted import (
    TEMPLATE,
    THINKS_AND_CALLS,
    Script,
    ScriptedClient,
    logprob,
    with_template,
)

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


class Scripted:
    def __init__(self, client: ScriptedClient, url: str) -> None:
        self.client, self.url = client, url

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": "m"} | body, timeout=30)

    def lines(self, path: str, **body: Any) -> list[dict[str, Any]]:
        reply = self.post(path, **body)
        assert reply.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in reply.text.splitlines()]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = with_template(tmp_path_factory.mktemp("tokenizer") / "t", TEMPLATE)
    client = ScriptedClient(tokenizer_folder=folder)
    with running_server(client, ServerConfig(port=0, served_model_name="m")) as url:
        yield Scripted(client, url)


def test_chat_streams_lines(scripted: Scripted) -> None:
    scripted.client.script = Script("Hello there.")
    lines = scripted.lines("/api/chat", **ASK)
    assert "".join(line["message"]["content"] for line in lines) == "Hello there."
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    last = lines[-1]
    assert last["done_reason"] == "stop"
    assert last["eval_count"] == 4
    assert last["total_duration"] >= last["eval_duration"] >= 0
    assert {line["model"] for line in lines} == {"m"}
    whole = scripted.post("/api/chat", **ASK, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello there."}
    counts = ("prompt_eval_count", "eval_count", "done_reason")
    assert [whole[name] for name in counts] == [last[name] for name in counts]


@pytest.mark.parametrize("stream", [True, False])
def test_chat_returns_thought_and_calls(scripted: Scripted, stream: bool) -> None:
    scripted.client.script = Script(THINKS_AND_CALLS)
    if stream:
        messages = [line["message"] for line in scripted.lines("/api/chat", **ASK, tools=[TOOL])]
    else:
        messages = [scripted.post("/api/chat", **ASK, tools=[TOOL], stream=False).json()["message"]]
    thought = "".join(each.get("thinking", "") for each in messages)
    assert "What is asked?" in thought
    assert "".join(each["content"] for each in messages).strip() == ""
    (calls,) = [each["tool_calls"] for each in messages if "tool_calls" in each]
    assert [call["function"]["name"] for call in calls] == ["weather"]
    assert calls[0]["function"]["arguments"] == {"city": "Köln", "days": 2}


def test_history_reaches_the_template(scripted: Scripted) -> None:
    scripted.client.script = Script("Yes.")
    call = {"function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    assert scripted.post("/api/chat", messages=messages, tools=[TOOL], stream=False).is_success
    prompt = scripted.client.tokenizer.decode(
        scripted.client.requests[-1].prompt, skip_special_tokens=False
    )
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>' in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


def test_options_become_sampling_parameters(scripted: Scripted) -> None:
    scripted.client.script = Script("a b c d e f")
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.75,
        "min_p": 0.25,
        "seed": 3,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_predict": 3,
        "stop": ["x"],
        "num_gpu": 1,
        "num_thread": 2,
        "mirostat": 0,
    }
    reply = scripted.post("/api/chat", **ASK, options=options, stream=False).json()
    assert (reply["eval_count"], reply["done_reason"]) == (3, "length")
    params = scripted.client.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.75, 0.25)
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, 0.5)
    assert (params.frequency_penalty, params.seed, params.stop) == (0.25, 3, ("x",))


def test_num_ctx_limits_prompt_and_answer(scripted: Scripted) -> None:
    scripted.client.script = Script("a ", ends=False)
    ask = ASK | {"stream": False}
    whole = scripted.post("/api/chat", **ask, options={"num_predict": 1}).json()
    prompt = whole["prompt_eval_count"]
    for num_predict in (-1, -2, None):
        options = {"num_ctx": prompt + 5, "num_predict": num_predict}
        assert scripted.post("/api/chat", **ask, options=options).json()["eval_count"] == 5
    reply = scripted.post("/api/chat", **ask, options={"num_ctx": prompt})
    assert reply.status_code == 400
    assert "num_ctx" in reply.json()["error"]
    reply = scripted.post("/api/chat", **ask, options={"num_ctx": 10**6, "num_predict": 2})
    assert reply.json()["eval_count"] == 2  # clamped, as in Ollama


@pytest.mark.parametrize("format", ["json", {"type": "object", "properties": {"a": {}}}])
def test_format_becomes_a_grammar(scripted: Scripted, format: object) -> None:
    scripted.client.script = Script("{}")
    assert scripted.post("/api/chat", **ASK, format=format, stream=False).is_success
    grammar = scripted.client.requests[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "json"


def test_generate_continues_a_context(scripted: Scripted) -> None:
    scripted.client.script = Script("Hello.")
    first = scripted.post("/api/generate", prompt="Hi", system="Be brief.", stream=False).json()
    request = scripted.client.requests[-1]
    assert first["response"] == "Hello."
    assert first["context"][: len(request.prompt)] == request.prompt
    assert len(first["context"]) == len(request.prompt) + first["eval_count"]
    context = first["context"]
    second = scripted.lines("/api/generate", prompt="More", context=context)[-1]
    request = scripted.client.requests[-1]
    assert request.prompt[: len(context)] == context
    assert second["prompt_eval_count"] == len(request.prompt)
    raw = scripted.post("/api/generate", prompt="Hi", raw=True, stream=False).json()
    assert scripted.client.tokenizer.decode(scripted.client.requests[-1].prompt) == "Hi"
    assert "context" not in raw


def test_logprobs_of_tokens(scripted: Scripted) -> None:
    scripted.client.script = Script("Hello there.")
    ask = ASK | {"logprobs": True, "top_logprobs": 2}
    whole = scripted.post("/api/chat", **ask, stream=False).json()["logprobs"]
    assert [row["logprob"] for row in whole] == [logprob(i) for i in range(4)]
    assert "".join(row["token"] for row in whole[:3]) == "Hello there."
    assert {len(row["top_logprobs"]) for row in whole} == {2}
    streamed = scripted.lines("/api/chat", **ask)
    assert [row for line in streamed for row in line.get("logprobs", ())] == whole


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, "reads only text"),
        ("/api/chat", {"options": {"num_predict": 0}}, "num_predict is 0"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ("/api/chat", {"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
        ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature must be"),
        ("/api/chat", {"keep_alive": "soon"}, "keep_alive must be"),
        ("/api/chat", {"format": "yaml"}, "format: it must be"),
        ("/api/chat", {"format": {"type": "nonsense"}}, "format: "),
        ("/api/chat", {"top_logprobs": 1}, "top_logprobs requires"),
        ("/api/chat", {"max_tokens": 3}, "use options.num_predict"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "raw does not support"),
        ("/api/generate", {"prompt": "a", "context": [10**6]}, "context holds 1000000"),
        ("/api/embed", {"input": "a", "dimensions": 3}, "dimensions is not supported"),
    ],
)
def test_bad_values_are_rejected_by_name(
    scripted: Scripted, path: str, body: dict[str, Any], said: str
) -> None:
    before = len(scripted.client.requests)
    fields = (ASK if path == "/api/chat" else {}) | body
    reply = scripted.post(path, **fields)
    assert reply.status_code == 400
    assert said in reply.json()["error"]
    assert list(reply.json()) == ["error"]
    assert len(scripted.client.requests) == before


def test_error_in_a_stream_is_a_line(scripted: Scripted) -> None:
    scripted.client.script = Script("Hello there.", fail_after=2)
    lines = scripted.lines("/api/chat", **ASK)
    assert "could not continue" in lines[-1]["error"]


@pytest.mark.parametrize("route", REJECTED)
def test_routes_of_a_store_are_rejected_by_name(scripted: Scripted, route: str) -> None:
    method, path = route.split()
    reply = httpx.request(method, scripted.url + path, json={"model": "x"})
    assert reply.status_code == 501
    assert REJECTED[route] in reply.json()["error"]


def test_lists_describe_the_model(scripted: Scripted) -> None:
    tags = httpx.get(scripted.url + "/api/tags").json()["models"]
    assert [row["name"] for row in tags] == ["m"]
    (running,) = httpx.get(scripted.url + "/api/ps").json()["models"]
    assert (running["name"], running["context_length"]) == ("m", 2048)
    shown = scripted.post("/api/show").json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["template"] == TEMPLATE
    assert scripted.post("/api/show", model="m:latest").is_success
    missing = scripted.post("/api/show", model="x")
    assert (missing.status_code, list(missing.json())) == (404, ["error"])
    assert httpx.get(scripted.url + "/api/version").json()["version"]


def test_empty_requests_load_and_unload() -> None:
    async def test() -> None:
        sources = [ModelSource((name,), lambda: ScriptedClient(Script())) for name in "ab"]
        server = Server(ServerConfig(), sources)
        app = build_app(server, PROTOCOLS, ROUTES)
        transport = httpx.ASGITransport(app)
        async with (
            server.running(),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            await until(lambda: server.lifecycle.is_ready)
            b = server.pool.named("b")
            for path, empty in (("/api/generate", {}), ("/api/chat", {"messages": []})):
                reply = (await client.post(path, json={"model": "b"} | empty)).json()
                assert (reply["done"], reply["done_reason"]) == (True, "load")
                assert b.status == "loaded"
                off = {"model": "b:latest", "keep_alive": "0s"} | empty
                for _ in range(2):  # it need not be loaded
                    reply = (await client.post(path, json=off)).json()
                    assert (reply["done"], reply["done_reason"]) == (True, "unload")
                    assert b.status == "unloaded"
            ask = ASK | {"model": "b", "keep_alive": "1h30m", "stream": False}
            reply = (await client.post("/api/chat", json=ask)).json()
            assert reply["load_duration"] > 0
            (row,) = [
                row for row in (await client.get("/api/ps")).json()["models"] if row["name"] == "b"
            ]
            assert row["context_length"] == 2048
            assert 5390 < b.expires_in <= 5400
            assert (await client.post("/api/chat", json=ask | {"keep_alive": 0})).is_success
            await until(lambda: b.status == "unloaded")

    asyncio.run(asyncio.wait_for(test(), 60))


@given(st.integers(0, 99), st.integers(0, 59), st.floats(0, 59).map(lambda x: round(x, 3)))
def test_durations_are_read_as_go_writes_them(hours: int, minutes: int, seconds: float) -> None:
    total = hours * 3600 + minutes * 60 + seconds
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == pytest.approx(total)
    assert parse_duration(f"-{minutes}m") == -60 * minutes
    assert parse_duration(str(seconds)) == parse_duration(seconds) == seconds


@pytest.mark.parametrize("text", ["", "m", "10 x", "1h-5m", "nan", "inf", True, None, [1]])
def test_other_durations_are_rejected(text: Any) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)
