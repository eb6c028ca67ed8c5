"""Sessions over HTTP: token-exact turns, forks, limits, and the view of open requests."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from nano_inference.checkpoints.loading import resolve_model
from nano_inference.config import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.main import running_server
from nano_inference.server.sessions.store import SessionOptions, SessionStore
from nano_inference.text.chat import encode_chat
from nano_inference.text.conversation import Conversation
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.conftest import SMOLLM2

HI = {"role": "user", "content": "Say a word."}
MORE = {"role": "user", "content": "Another one."}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture
def api(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client


def opened(api: httpx.Client, **fields: Any) -> str:
    reply = api.post("/sessions", json={"messages": [HI], **fields})
    assert reply.status_code == 201, reply.text
    return reply.json()["id"]


def sampled(api: httpx.Client, name: str, **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 6, "temperature": 0.7, "seed": 3, "return_token_ids": True, **fields}
    reply = api.post(f"/sessions/{name}/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_turns_keep_their_sampled_ids(api: httpx.Client, tokenizer: Tokenizer) -> None:
    name = opened(api, on_rewrite="keep")
    first = sampled(api, name, logprobs=True)
    ids = first["choices"][0]["token_ids"]
    second = sampled(api, name, messages=[MORE])
    kept = api.get(f"/sessions/{name}/tokens").json()
    prompt = encode_chat(tokenizer, [HI])
    assert kept["token_ids"][: len(prompt) + len(ids)] == [*prompt, *ids]
    authors = [span["author"] for span in kept["spans"]]
    assert authors == ["template", "model", "template", "model"]
    at = second["prompt_token_ids"]
    assert kept["token_ids"] == [*at, *second["choices"][0]["token_ids"]]
    assert sum(kept["loss_mask"]) == len(ids) + len(second["choices"][0]["token_ids"])
    rows = first["choices"][0]["logprobs"]["content"]
    assert kept["logprobs"][len(prompt) : len(prompt) + len(ids)] == pytest.approx(
        [row["logprob"] for row in rows], abs=1e-6
    )


def test_branch_has_the_bits_of_fresh_ids(api: httpx.Client) -> None:
    name = opened(api, on_rewrite="keep", keep_cache_seconds=60)
    sampled(api, name)
    api.post(f"/sessions/{name}/messages", json={"messages": [MORE]})
    branches = api.post(f"/sessions/{name}/fork", json={"n": 3}).json()["data"]
    assert {each["parent"] for each in branches} == {name}
    answers = [sampled(api, each["id"], seed=5 + at) for at, each in enumerate(branches)]
    prompt = answers[0]["prompt_token_ids"]
    for at, answer in enumerate(answers):
        assert answer["prompt_token_ids"] == prompt
        fresh = api.post(
            "/v1/completions",
            json={
                "prompt": prompt,
                "max_tokens": 6,
                "temperature": 0.7,
                "seed": 5 + at,
                "return_token_ids": True,
                "cache_salt": "fresh",
            },
        ).json()
        assert fresh["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    # the origin is where it was
    assert api.get(f"/sessions/{name}").json()["state"] == "open"


def test_stream_becomes_the_next_turn(server: str, api: httpx.Client) -> None:
    name = opened(api, on_rewrite="keep")
    client = OpenAI(base_url=f"{server}/sessions/{name}", api_key="none")
    events = client.chat.completions.create(
        model="smollm2", messages=[], max_tokens=5, temperature=0, stream=True
    )
    text = "".join(each.choices[0].delta.content or "" for each in events if each.choices)
    state = api.get(f"/sessions/{name}").json()
    assert (state["state"], state["num_messages"]) == ("answered", 2)
    assert text
    with pytest.raises(BadRequestError, match="append first"):
        client.chat.completions.create(model="smollm2", messages=[])
    client.chat.completions.create(model="smollm2", messages=[MORE], max_tokens=3)
    assert api.get(f"/sessions/{name}").json()["num_messages"] == 4


def test_tool_result_continues_a_session(api: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    name = opened(api, tools=[tool], on_rewrite="keep")
    answer = sampled(api, name, tool_choice="required", max_tokens=60)
    calls = answer["choices"][0]["message"].get("tool_calls") or [{"id": "1"}]
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "5"}
    reply = api.post(f"/sessions/{name}/messages", json={"messages": [result]})
    assert reply.status_code == 200, reply.text
    sampled(api, name)


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("chat/completions", {"n": 2}, 400, "fork it first"),
        ("chat/completions", {"tools": [], "max_tokens": 2}, 400, "tools must be the session's"),
        ("chat/completions", {"chat_template_kwargs": {"a": 1}}, 400, "must be the session's"),
        ("chat/completions", {"max_tokens": 0}, 400, "max_tokens"),
        ("chat/completions", {"documents": [{"text": "x"}]}, 400, "documents"),
        ("messages", {"messages": []}, 400, "messages"),
        ("messages", {"messages": [{"role": "wizard", "content": "x"}]}, 200, ""),
        ("messages", {"messages": [{"role": "user", "content": "x " * 9000}]}, 400, "longer"),
        ("fork", {"n": 0}, 400, "n"),
        ("fork", {"n": 10**6}, 400, "n"),
    ],
)
def test_session_rejects_bad_input(
    api: httpx.Client, path: str, body: Any, status: int, text: str
) -> None:
    name = opened(api)
    before = api.get(f"/sessions/{name}/tokens").json()
    reply = api.post(f"/sessions/{name}/{path}", json=body)
    assert reply.status_code == status, reply.text
    assert text in reply.text
    if status != 200:
        assert api.get(f"/sessions/{name}/tokens").json() == before


def test_session_that_is_gone_is_told_apart(api: httpx.Client) -> None:
    name = opened(api)
    assert api.delete(f"/sessions/{name}").json()["deleted"] is True
    for method, path in (
        *(("GET", ""), ("DELETE", ""), ("GET", "/tokens"), ("POST", "/prefetch")),
        *(("POST", "/fork"), ("POST", "/messages"), ("POST", "/chat/completions")),
    ):
        gone = api.request(method, f"/sessions/{name}{path}", json={"messages": [HI]})
        assert (gone.status_code, gone.json()["error"]["code"]) == (410, "session_gone"), path
        other = name[:-1] + ("0" if name[-1] != "0" else "1")
        never = api.request(method, f"/sessions/{other}{path}", json={"messages": [HI]})
        assert (never.status_code, never.json()["error"]["code"]) == (404, "session_not_found")


def chat_of(tokenizer: Tokenizer) -> Conversation:
    return Conversation(tokenizer, (HI,))


def test_store_limits_each_key(tokenizer: Tokenizer) -> None:
    now, chat = 0.0, chat_of(tokenizer)
    store = SessionStore(ServerConfig(max_sessions=2, session_timeout=10), lambda: now)
    first = store.add("a", SessionOptions(), chat)
    now = 6.0
    second = store.add("a", SessionOptions(), chat)
    store.add("b", SessionOptions(), chat)
    for too_many in (
        lambda: store.add("a", SessionOptions(), chat),
        lambda: store.fork(second, 1),
    ):
        with pytest.raises(ApiError, match="max_sessions") as caught:
            too_many()
        assert caught.value.status == 429
    with pytest.raises(ApiError) as caught:  # another key's session
        store.get(first.name, "b")
    assert caught.value.status == 404
    now = 11.0
    with pytest.raises(ApiError) as caught:
        store.get(first.name, "a")
    assert caught.value.status == 410
    assert store.fork(second, 1)[0].parent == second.name


def test_store_limits_bytes(tokenizer: Tokenizer) -> None:
    chat = chat_of(tokenizer)
    store = SessionStore(ServerConfig(max_session_bytes=5000))
    session = store.add("", SessionOptions(), chat)
    longer = chat.with_messages([{"role": "user", "content": "word " * 500}])
    with pytest.raises(ApiError, match="max_session_bytes"):
        store.extend(session, chat, longer)
    assert session.chat is chat


def test_concurrent_changes_of_a_session_are_rejected(tokenizer: Tokenizer) -> None:
    chat, store = chat_of(tokenizer), SessionStore(ServerConfig())
    session, turn = store.add("", SessionOptions(), chat), object()
    session.begin(turn)
    for act in (lambda: session.begin(object()), lambda: store.extend(session, chat, chat)):
        with pytest.raises(ApiError) as caught:
            act()
        assert caught.value.code == "session_busy"
    session.end(object())  # not the current turn
    assert session.turn is turn
    session.end(turn)
    store.extend(session, chat, chat.with_messages([MORE]))
    with pytest.raises(ApiError) as caught:
        store.extend(session, chat, chat.with_messages([MORE]))
    assert caught.value.code == "session_changed"


def test_busy_session_does_not_expire(tokenizer: Tokenizer) -> None:
    now = 0.0
    store = SessionStore(ServerConfig(session_timeout=10), lambda: now)
    session = store.add("", SessionOptions(), chat_of(tokenizer))
    session.begin(object())
    now = 60.0
    assert store.get(session.name, "") is session


KEYS = ServerConfig(port=0, in_process=True, api_keys=("one", "two"), admin_key="admin")


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.usefixtures("slow_steps")
def test_requests_are_seen_by_their_key(model: Path) -> None:
    engine = EngineConfig(
        str(model), num_threads=1, kv_cache_memory=2**20, block_size=4, max_batch_size=1
    )
    with running_server(engine, KEYS) as url, httpx.Client(base_url=url, timeout=60) as client:

        def ask(key: str, name: str) -> None:
            client.post(
                "/v1/completions",
                json={"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True},
                headers=headers(key) | {"x-request-id": name, "x-session-id": "s"},
            )

        threads = [
            threading.Thread(target=ask, args=pair)
            for pair in (("one", "first"), ("two", "second"), ("two", "third"))
        ]
        for thread in threads:
            thread.start()
        rows: list[dict[str, Any]] = []
        while len(rows) < 3 or not any(row["state"] == "running" for row in rows):
            rows = client.get("/requests", headers=headers("admin")).json()["data"]
        (running,) = (row for row in rows if row["state"] == "running")
        waiting = [row for row in rows if row["state"] == "waiting"]
        assert not running["reason"]
        assert running["blocks"] > 0
        reasons = {"max_batch_size is reached", "an earlier request goes first"}
        assert {row["reason"] for row in waiting} == reasons
        assert all(row["session"] == "s" and row["age"] >= 0 for row in rows)
        rows = client.get("/requests", headers=headers("one")).json()["data"]
        assert {row["id"] for row in rows} <= {"first"}
        assert client.get("/requests").status_code == 401
        name = client.post("/sessions", json={"messages": [HI]}, headers=headers("one"))
        assert name.status_code == 400  # this model has no tokenizer
        for thread in threads:
            thread.join()


def test_sessions_work_with_replicas() -> None:
    config = ServerConfig(port=0, in_process=True, replicas=2)
    engine = replace(SMOLLM2, kv_cache_memory=2**26)
    with running_server(engine, config) as url, httpx.Client(base_url=url, timeout=60) as api:
        name = opened(api, on_rewrite="keep", keep_cache_seconds=60)
        sampled(api, name, max_tokens=20)
        answer = sampled(api, name, messages=[MORE])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
        assert api.post(f"/sessions/{name}/prefetch").json()["cached_tokens"] >= 16
        assert api.delete(f"/sessions/{name}").status_code == 200
