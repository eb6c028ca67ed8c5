"""Two hundred cancelled requests and a thousand nonsense bodies: nothing leaks, no other request
changes.
"""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nano_inference.config import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import PROTOCOLS, ROUTES, running_server
from tests.models.tiny import tiny_llama
from tests.server.http.test_edge import check_error
from tests.server.scripted import ScriptedClient, sources

BYSTANDERS = 4
CANCELLED = 200


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tiny_llama(tmp_path_factory.mktemp("model"))
    engine = EngineConfig(
        str(folder), device="cpu", num_threads=1, kv_cache_memory=2**22, max_batch_size=16
    )
    with running_server(
        engine, ServerConfig(port=0, in_process=True, served_model_name="tiny")
    ) as url:
        yield url


def asks(number: int) -> dict[str, Any]:
    """Return a request whose answer depends only on its seed, bit for bit."""
    prompt = [random.Random(number).randrange(3, 300) for _ in range(20)]
    more = {"return_token_ids": True, "ignore_eos": True, "stream": True}
    return {"prompt": prompt, "max_tokens": 400, "seed": number, **more}


async def listened(http: httpx.AsyncClient, number: int) -> list[int]:
    """Return the tokens of a bystander's stream. One changed bit would change the rest."""
    heard: list[int] = []
    async with http.stream("POST", "/v1/completions", json=asks(number)) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                heard += [
                    each
                    for choice in json.loads(line[6:])["choices"]
                    for each in choice["token_ids"] or ()
                ]
    return heard


async def cancelled(http: httpx.AsyncClient, number: int) -> None:
    """Cancel a request after some milliseconds."""
    chance = random.Random(1000 + number)
    body = asks(number % 7) | {
        "max_tokens": 300,
        "stream": bool(number % 2),
        "n": chance.choice([1, 1, 3]),
    }
    try:
        async with asyncio.timeout(chance.random() * 0.2):
            await http.post("/v1/completions", json=body)
    except TimeoutError:
        pass


def idle_stats(url: str) -> dict[str, Any]:
    stats: dict[str, Any] = {}
    for _ in range(400):
        stats = httpx.get(url + "/stats").json()
        if not (
            stats["queue"]["num_samples"]
            or stats["queue"]["num_exchanges"]
            or stats["engine"]["num_running"]
        ):
            return stats["engine"]
        threading.Event().wait(0.01)
    raise AssertionError(f"the server does not come to rest: {stats}")


@pytest.mark.thorough
def test_storm_of_cancelled_requests(tiny: str) -> None:
    async def play(storm: bool) -> list[list[int]]:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=tiny, timeout=60, limits=limits) as http:
            heard = [asyncio.create_task(listened(http, number)) for number in range(BYSTANDERS)]
            if storm:
                for begin in range(0, CANCELLED, 30):
                    await asyncio.gather(
                        *(cancelled(http, n) for n in range(begin, min(begin + 30, CANCELLED)))
                    )
            return await asyncio.gather(*heard)

    quiet = asyncio.run(play(False))
    before = idle_stats(tiny)
    assert [len(tokens) for tokens in quiet] == [400] * BYSTANDERS
    assert asyncio.run(play(True)) == quiet
    after = idle_stats(tiny)
    assert after["kv_leaked_blocks"] == 0
    assert after["num_free_blocks"] == before["num_free_blocks"]
    assert after["num_waiting"] == after["num_held"] == 0


# -- bodies ----------------------------------------------------------------------------------------

VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "Hi",
        "max_tokens": 2,
        "temperature": 0.5,
        "stop": ["x"],
        "n": 1,
        "logprobs": 1,
    },
    "/v1/chat/completions": {
        "model": "scripted",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_tokens": 2,
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "stream_options": {"include_usage": True},
        "stream": True,
    },
    "/v1/messages": {
        "model": "scripted",
        "max_tokens": 2,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
    "/v1/responses": {
        "model": "scripted",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "max_output_tokens": 2,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "text"}},
        "stream": True,
    },
    "/v1/embeddings": {"input": ["Hi", "you"], "encoding_format": "float"},
    "/v1/messages/count_tokens": {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Hi"}],
    },
    "/api/chat": {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Hi"}],
        "options": {"num_predict": 2, "temperature": 0.5, "stop": ["x"]},
        "format": {"type": "object"},
        "keep_alive": "5m",
    },
    "/api/generate": {"model": "scripted", "prompt": "Hi", "options": {"num_predict": 2}},
    "/api/embed": {"model": "scripted", "input": ["Hi", "you"]},
    "/api/embeddings": {"model": "scripted", "prompt": "Hi"},
    "/api/show": {"model": "scripted"},
    "/sessions": {"messages": [{"role": "user", "content": "Hi"}], "priority": 1},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
# routes of the admin key and of sessions that are open, and those that answer 501
OTHERS = {"/flush_cache", "/models/load", "/models/unload"}
OTHERS |= {f"/api/{name}" for name in ("pull", "push", "create", "copy")}
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, -0.0, 1e308, 0.5, "", "x", "\x00", "\ud800",
    "\U0010ffff", "<|im_end|>", "../../etc/passwd", "{{7*7}}", [], {}, [[]], [None], [{}], {"": {}},
    {"type": "image_url"}, "NaN", [1e308],
)  # fmt: skip
NAMES = (
    "",
    "n",
    "stop",
    "seed",
    "logit_bias",
    "top_logprobs",
    "chat_template",
    "response_format",
    "role",
    "content",
    "\x00",
)


def mutated(value: Any, chance: random.Random) -> Any:
    """Return a body with a few changes at random places."""
    if chance.random() < 0.15:
        return chance.choice(ODD)
    if isinstance(value, dict):
        changed = {
            name: mutated(inner, chance) for name, inner in value.items() if chance.random() > 0.05
        }
        if chance.random() < 0.3:
            changed[chance.choice(NAMES)] = chance.choice(ODD)
        return changed
    if isinstance(value, list):
        return [
            mutated(inner, chance) for inner in value for _ in range(chance.choice([0, 1, 1, 1, 2]))
        ]
    return value


def fuzzed(number: int) -> tuple[str, bytes]:
    chance = random.Random(number)
    path = chance.choice(list(VALID))
    body = json.dumps(mutated(VALID[path], chance)).encode()
    if chance.random() < 0.2:  # damage the bytes
        damaged = bytearray(body)
        for _ in range(chance.randrange(1, 5)):
            position = chance.randrange(len(damaged) + 1)
            damaged[position : position + chance.randrange(3)] = chance.randbytes(
                chance.randrange(3)
            )
        body = bytes(damaged)
    if chance.random() < 0.05:
        body = body.replace(
            b"0.5",
            chance.choice([b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-0", b"00", b"1" * 500]),
        )
    return path, body


@pytest.mark.thorough
def test_storm_of_nonsense_bodies_is_rejected() -> None:
    with (
        running_server(ScriptedClient(), ServerConfig(port=0)) as url,
        httpx.Client(base_url=url) as http,
    ):
        statuses: dict[int, int] = {}
        for number in range(1000):
            path, body = fuzzed(number)
            reply = http.post(path, content=body, headers={"content-type": "application/json"})
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
            assert reply.status_code in (200, 201, 400, 404), (number, path, body, reply.text)
            if reply.is_error:
                message = check_error(reply, reply.status_code)
                assert len(message) < 2000
                assert "/site-packages" not in message
                assert "Traceback" not in message
        assert statuses[400] > 300
        assert statuses[200] > 50
        assert http.get("/stats").status_code in (200, 400)
        assert http.get("/health").json()["status"] == "ok"


def test_fuzzing_covers_all_routes_with_bodies() -> None:
    from nano_inference.server.app import build_routes
    from nano_inference.server.server import Server

    paths = build_routes(
        Server(ServerConfig(), sources(ScriptedClient())), PROTOCOLS, ROUTES
    ).openapi()["paths"]
    with_bodies = {path for path in paths if "post" in paths[path] and "{" not in path}
    assert with_bodies - OTHERS == set(VALID)


def test_model_folder_runs_no_code(tmp_path: Path) -> None:
    """Set `auto_map` to a module that transformers would import."""
    folder = tiny_llama(tmp_path / "model")
    trace = tmp_path / "it-ran"
    (folder / "evil.py").write_text(
        f"open({str(trace)!r}, 'w')\nclass Evil: pass\n", encoding="utf-8"
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hostile = {
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", None],
    }
    (folder / "config.json").write_text(
        json.dumps(config | {"auto_map": hostile}), encoding="utf-8"
    )
    tokenizer_config = json.dumps({"auto_map": hostile, "tokenizer_class": "Evil"})
    (folder / "tokenizer_config.json").write_text(tokenizer_config, encoding="utf-8")
    engine = EngineConfig(str(folder), device="cpu", num_threads=1, kv_cache_memory=2**20)
    with running_server(engine, ServerConfig(port=0, in_process=True)) as url:
        body = {"prompt": [5, 6, 7], "max_tokens": 2, "return_token_ids": True}
        assert httpx.post(url + "/v1/completions", json=body).status_code == 200
    assert not trace.exists()
