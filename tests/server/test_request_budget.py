"""One budget for a whole HTTP request on every route that generates, and large answers in
pieces.
"""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from nano_inference.server.api.shared.answers import LazyArray, json_pieces
from nano_inference.server.config import ServerConfig
from nano_inference.server.http.replies import PIECE, WHOLE, PiecedReply, reply_in_pieces
from nano_inference.server.main import running_server
from tests.server.scripted import Script, ScriptedClient
from tests.server.streams import post

BUDGET = 2000
IDS = [7, 8]
CHAT = [{"role": "user", "content": "Hi"}]
MANY = {"n": 8, "max_tokens": 100}

# route, request beyond the budget, and the field that its client should lower
TOO_LARGE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": IDS, **MANY, "logprobs": 4}, "logprobs"),
    ("/v1/completions", {"prompt": IDS, "n": 50, "max_tokens": 100}, "max_tokens"),
    (
        "/v1/completions",
        {"prompt": IDS * 50, "n": 4, "max_tokens": 1, "prompt_logprobs": 5},
        "prompt_logprobs (with",
    ),
    (
        "/v1/completions",
        {"prompt": IDS * 50, "n": 4, "max_tokens": 1, "echo": True, "logprobs": 9},
        "prompt_logprobs",
    ),
    (
        "/v1/completions",
        {"prompt": IDS * 50, "n": 30, "max_tokens": 1, "return_token_ids": True},
        "n",
    ),
    (
        "/v1/completions",
        {"prompt": IDS, "n": 9, "max_tokens": 1, "allowed_token_ids": [*range(3, 999)]},
        "n",
    ),
    (
        "/v1/completions",
        {"prompt": IDS, "n": 9, "max_tokens": 1, "stop_token_ids": [*range(3, 999)]},
        "n",
    ),
    (
        "/v1/completions",
        {"prompt": IDS, "n": 9, "max_tokens": 1, "stop": ["a" * 250, "b" * 250]},
        "n",
    ),
    (
        "/v1/completions",
        {
            "prompt": IDS,
            "n": 9,
            "max_tokens": 1,
            "logit_bias": dict.fromkeys(map(str, range(3, 999)), 1),
        },
        "n",
    ),
    (
        "/v1/completions",
        {"prompt": IDS * 200, "n": 9, "max_tokens": 1, "repetition_penalty": 1.1},
        "n",
    ),
    (
        "/v1/completions",
        {"prompt": IDS, "n": 16, "max_tokens": 100, "raw_logprobs": True},
        "max_tokens",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, **MANY, "logprobs": True, "top_logprobs": 4},
        "top_logprobs",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "n": 2, "max_tokens": 1, "prompt_logprobs": 900},
        "prompt_logprobs",
    ),
    ("/v1/messages", {"model": "scripted", "messages": CHAT, "max_tokens": 5000}, "max_tokens"),
    (
        "/generate",
        {
            "input_ids": IDS,
            "sampling_params": {"n": 8, "max_new_tokens": 100},
            "return_logprob": True,
            "top_logprobs_num": 4,
        },
        "top_logprobs_num",
    ),
    (
        "/generate",
        {"input_ids": IDS, "sampling_params": {"n": 50, "max_new_tokens": 90}},
        "sampling_params.max_new_",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": IDS, "sampling_params": {**MANY, "logprobs": 4}},
        "sampling_params.logprobs",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": IDS * 50, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 40}},
        "sampling_params.prompt_logprobs",
    ),
]
BATCHES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [IDS] * 30, "max_tokens": 100}),
    ("/generate", {"input_ids": [IDS] * 30, "sampling_params": {"max_new_tokens": 100}}),
]


class Bounded(ScriptedClient):
    """Scripted engine with another budget."""

    budget = BUDGET

    def _engine_info(self):
        return msgspec.structs.replace(super()._engine_info(), max_request_entries=self.budget)


@pytest.fixture(scope="module")
def bounded() -> Iterator[tuple[str, Bounded]]:
    client = Bounded(Script("a b", ends=False, portion=100), max_model_len=10_000)
    with running_server(client, ServerConfig(port=0, rl=True)) as url:
        yield url, client


@pytest.mark.parametrize(("route", "body", "name"), TOO_LARGE)
def test_request_over_the_budget_is_a_400_with_the_limit(
    bounded: tuple[str, Bounded], route: str, body: dict[str, Any], name: str
) -> None:
    url, client = bounded
    before = len(client.requests)
    reply = httpx.post(url + route, json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    match = re.search(
        rf"max_request_entries={BUDGET}; lower {re.escape(name)}.* from (\d+) to (\d+)\.", message
    )
    assert match, message
    assert len(client.requests) == before, "it was sent to the engine"
    lowered = json.loads(
        re.sub(
            rf'("(?:{_field(body, name)})": ){match[1]}\b', rf"\g<1>{match[2]}", json.dumps(body)
        )
    )
    assert lowered != body
    assert httpx.post(url + route, json=lowered, timeout=60).status_code == 200


def _field(body: dict[str, Any], name: str) -> str:
    last = name.split(" ")[0].split(".")[-1]
    if last == "prompt_logprobs" and last not in json.dumps(body):
        return "logprobs"  # with echo
    return "max_new_tokens" if last == "max_new_" else last


@pytest.mark.parametrize(("route", "body"), BATCHES)
def test_prompts_of_a_batch_count_together(
    bounded: tuple[str, Bounded], route: str, body: dict[str, Any]
) -> None:
    url, client = bounded
    before = len(client.requests)
    message = post(url + route, body, 400)["error"]["message"]
    assert "send the first 19 in a separate request" in message
    assert len(client.requests) == before
    name = "prompt" if "prompt" in body else "input_ids"
    httpx.post(url + route, json=body | {name: body[name][:19]}, timeout=60).raise_for_status()


def test_batch_shares_its_mask_budget(bounded: tuple[str, Bounded]) -> None:
    url, client = bounded
    before = len(client.requests)
    body = {
        "prompt": [IDS, IDS],
        "n": 2,
        "max_tokens": 50,
        "top_p": 0.9,
        "sampling_mask": True,
        "seed": 1,
    }
    httpx.post(url + "/v1/completions", json=body, timeout=60)
    asked = client.requests[before:]
    assert len(asked) == 2
    assert sum(each.max_entries or 0 for each in asked) == BUDGET
    httpx.post(url + "/v1/completions", json=body | {"prompt": IDS * 50, "echo": True}, timeout=60)
    assert client.requests[-1].max_entries == BUDGET - 100, (
        "the prompt that is told twice is taken from the masks"
    )
    post(url + "/v1/completions", {"prompt": IDS, "max_tokens": 2})
    assert client.requests[-1].max_entries is None


@pytest.mark.thorough
def test_oversized_prompt_logprobs_are_rejected_by_default() -> None:
    client = ScriptedClient(max_model_len=10_000)
    with running_server(client, ServerConfig(port=0)) as url:
        body = {"prompt": [7] * 2000, "n": 128, "max_tokens": 1, "prompt_logprobs": 20}
        assert (
            "lower prompt_logprobs" in post(url + "/v1/completions", body, 400)["error"]["message"]
        )
        assert not client.requests


def test_mask_that_killed_the_engine_ends_only_its_samples(server: str) -> None:
    body = {
        "prompt": [7],
        "max_tokens": 60,
        "n": 128,
        "min_p": 1e-300,
        "temperature": 2,
        "sampling_mask": True,
        "ignore_eos": True,
    }
    choices = post(server + "/v1/completions", body)["choices"]
    assert len(choices) == 128
    assert {each["finish_reason"] for each in choices} == {"abort"}
    assert all("max_request_entries" in each["stop_reason"] for each in choices)
    assert sum(len(each["sampling_mask"]["token_ids"]) for each in choices) <= 5_000_000
    assert post(server + "/v1/completions", {"prompt": [7], "max_tokens": 2})["choices"]


# -- answers in pieces -----------------------------------------------------------------------------


def test_json_in_pieces_is_json() -> None:
    fields = {
        "a": 1,
        "b": {"c": LazyArray(({"d": LazyArray(range(5), 2)} for _ in range(2)), 1), "e": {}},
        "f": LazyArray(()),
        "g": [],
    }
    expected = {"a": 1, "b": {"c": [{"d": [0, 1, 2, 3, 4]}] * 2, "e": {}}, "f": [], "g": []}
    pieces = list(json_pieces(fields))
    assert json.loads(b"".join(pieces)) == expected
    assert len(pieces) > 5


def rows(count: int, made: list[int]) -> Iterator[dict[str, str]]:
    for _ in range(count):
        made.append(threading.get_ident())
        yield {"row": "x" * 1000}


def test_large_answer_is_encoded_in_pieces_off_the_event_loop() -> None:
    made: list[int] = []
    sent: list[dict[str, Any]] = []
    ahead: list[int] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        ahead.append(len(made) * 1000 - sum(len(each.get("body", b"")) for each in sent))

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def test() -> None:
        reply = await reply_in_pieces({"choices": LazyArray(rows(5000, made))}, aside=True)
        assert isinstance(reply, PiecedReply)
        assert len(made) * 1000 < WHOLE + 2 * PIECE
        await reply({"type": "http", "state": {}}, receive, send)  # pyright: ignore

    asyncio.run(test())
    assert len(made) == 5000
    assert threading.get_ident() not in made, "made on the thread of the event loop"
    assert b"content-length" not in dict(sent[0]["headers"])
    assert len(json.loads(b"".join(each["body"] for each in sent[1:]))["choices"]) == 5000
    assert max(ahead[1:]) < 4 * PIECE
    assert max(len(each["body"]) for each in sent[2:]) < 2 * PIECE


def test_client_that_is_gone_gets_no_more_made() -> None:
    made: list[int] = []

    class Connection:
        is_open = True

    async def send(message: dict[str, Any]) -> None:
        Connection.is_open = False

    async def test() -> None:
        reply = await reply_in_pieces(LazyArray(rows(5000, made)), aside=False)
        await reply({"type": "http", "state": {"connection": Connection}}, None, send)  # pyright: ignore

    asyncio.run(test())
    assert len(made) < 2000


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_large_answer_over_http_is_whole(version: str) -> None:
    client = ScriptedClient(Script("a b", ends=False, portion=1000), max_model_len=10_000)
    with running_server(client, ServerConfig(port=0)) as url:
        body = {"prompt": [7], "n": 8, "max_tokens": 1000, "logprobs": 20}
        if version == "1.1":
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert "content-length" not in reply.headers
            content = reply.content
        else:
            host, port = url.removeprefix("http://").split(":")
            data = json.dumps(body).encode()
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(
                    b"POST /v1/completions HTTP/1.0\r\ncontent-type: "
                    b"application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data
                )
                received = bytearray()
                while data := connection.recv(1 << 20):
                    received += data
            head, _, content = bytes(received).partition(b"\r\n\r\n")
            assert b"chunked" not in head.lower()
        assert len(content) > WHOLE + PIECE
        choices = json.loads(content)["choices"]
        assert [len(each["logprobs"]["top_logprobs"]) for each in choices] == [1000] * 8
        small = post(f"{url}/v1/completions", body | {"n": 1, "max_tokens": 2})
        assert small["choices"][0]["logprobs"]["tokens"] == choices[0]["logprobs"]["tokens"][:2]


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["in process", "over http"])
def test_worst_that_fits_stays_within_a_memory_limit(where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.worst_requests", where],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all answered" in done.stdout
