"""Several models in one server: loads on demand, unloads by age and for room, errors of one model."""

import asyncio
import math
import os
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError, LacksMemory, ModelLoadError
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.hosted import ModelSource
from nano_inference.server.main import PROTOCOLS, ROUTES, build_app, running_server, sources_of
from nano_inference.server.model_pool import ModelPool, NoRoom, PooledModel, Seat, room_for
from nano_inference.server.server import Server
from tests.models.tiny import tiny_llama
from tests.server.engines import until
from tests.server.scripted import Script, ScriptedClient
from tests.server.virtual_time import run as run_virtually

GIB = 1 << 30
PATIENCE = 30.0


# -- the decision ----------------------------------------------------------------------------------

SEATS = st.lists(
    st.builds(Seat, st.text(), st.none() | st.integers(0, 8), st.booleans()), max_size=4
)


@given(
    needs=st.none() | st.integers(0, 20),
    seats=SEATS,
    limit=st.integers(1, 4),
    free=st.integers(0, 10),
)
def test_room_is_made_only_if_it_is_needed_and_helps(
    needs: int | None, seats: list[Seat], limit: int, free: int
) -> None:
    sizes = [math.inf if seat.size is None else seat.size for seat in seats]
    hopeless = needs is not None and needs > free + sum(sizes)
    if hopeless:
        with pytest.raises(NoRoom, match="the model m needs"):
            room_for("m", needs, seats, limit, free)
        return
    victim = room_for("m", needs, seats, limit, free)
    fits = len(seats) < limit and (needs is None or needs <= free)
    assert (victim is None) == fits
    if victim is not None:
        idle = [seat for seat in seats if not seat.is_busy]
        assert victim == (idle or seats)[0]  # the least recently used, requests protect it


# -- pools of scripted engines ---------------------------------------------------------------------


class Engine(ScriptedClient):
    """A scripted engine whose start can be held, or can fail."""

    def __init__(self, made: "Made", script: Script | None) -> None:
        super().__init__(script)
        self.made = made
        if script is None:  # it generates nothing: starting must be fast
            self.folder = None
        self.is_closed = False

    async def start(self) -> None:
        self.made.starting.set()
        await self.made.may_start.wait()
        if self.made.failures:
            raise self.made.failures.pop(0)
        await super().start()

    async def close(self) -> None:
        self.is_closed = True
        await super().close()


class Made:
    """A model of a pool, and its engines."""

    def __init__(self, name: str, script: Script | None, needs: int | None) -> None:
        self.engines: list[Engine] = []
        self.failures: list[Exception] = []
        self.may_start, self.starting = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.script = script
        self.source = ModelSource((name,), self._make, needs=needs)

    def _make(self) -> Engine:
        self.engines.append(Engine(self, self.script))
        return self.engines[-1]


class Pool:
    """A pool of scripted models a, b and c."""

    def __init__(
        self,
        script: Script | None = None,
        needs: int | None = None,
        free: Callable[[], int] = lambda: GIB,
        names: str = "abc",
        **config: Any,
    ) -> None:
        self.made = {name: Made(name, script, needs) for name in names}
        sources = [made.source for made in self.made.values()]
        self.pool = ModelPool(ServerConfig(**config), sources, free)

    def __getitem__(self, name: str) -> PooledModel:
        return self.pool.named(name)

    @property
    def loaded(self) -> str:
        return "".join(model.name for model in self.pool.models if model.status == "loaded")


class Inline(ThreadPoolExecutor):
    """Executor that works at once, since the virtual clock does not wait for threads."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as problem:
            future.set_exception(problem)
        return future


def running(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        asyncio.get_running_loop().set_default_executor(Inline())
        await asyncio.wait_for(test(), 1e6)

    run_virtually(whole())


def test_request_loads_its_model_once() -> None:
    async def test() -> None:
        pools = Pool()
        await pools.pool.start()
        assert pools.loaded == "a"
        leases = await asyncio.gather(*(pools.pool.lease(pools["b"]) for _ in range(5)))
        assert pools.loaded == "ab"
        assert len(pools.made["b"].engines) == 1
        assert len({id(lease.hosted) for lease in leases}) == 1
        for lease in leases:
            lease.release()
        await pools.pool.close()
        assert all(made.engines[0].is_closed for made in list(pools.made.values())[:2])

    running(test)


def test_least_recently_used_idle_model_makes_room() -> None:
    async def test() -> None:
        pools = Pool(max_loaded=2)
        await pools.pool.start()
        assert pools.loaded == "ab"
        await pools.pool.load(pools["a"])
        await pools.pool.load(pools["c"])
        assert pools.loaded == "ac"
        held = await pools.pool.lease(pools["a"])  # used last, and busy
        await pools.pool.load(pools["b"])
        assert pools.loaded == "ab"
        await pools.pool.load(pools["c"])
        assert pools.loaded == "ac"  # b was used later, but a has a request
        assert not pools.made["a"].engines[0].is_closed
        held.release()
        await pools.pool.close()

    running(test)


def test_busy_model_leaves_after_its_last_request() -> None:
    async def test() -> None:
        pools = Pool(max_loaded=1)
        await pools.pool.start()
        held = await pools.pool.lease(pools["a"])
        other = asyncio.create_task(pools.pool.lease(pools["b"]))
        await asyncio.sleep(1)
        late = asyncio.create_task(pools.pool.lease(pools["a"]))  # must not starve b
        await asyncio.sleep(1)
        assert (pools.loaded, other.done(), late.done()) == ("a", False, False)
        held.release()
        lease = await other
        assert pools.loaded == "b"
        await asyncio.sleep(1)
        assert not late.done()
        lease.release()
        assert (await late).hosted is pools["a"].hosted
        assert len(pools.made["a"].engines) == 2
        await pools.pool.close()

    running(test)


def test_abandoned_load_gives_the_busy_model_back() -> None:
    async def test() -> None:
        pools = Pool(max_loaded=1)
        await pools.pool.start()
        held = await pools.pool.lease(pools["a"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pools.pool.lease(pools["b"]), 5)
        again = await pools.pool.lease(pools["a"])
        assert (len(pools.made["a"].engines), pools.made["b"].engines) == (1, [])
        held.release()
        again.release()
        await pools.pool.load(pools["b"])
        assert pools.loaded == "b"
        await pools.pool.close()

    running(test)


def test_idle_model_is_unloaded_by_its_age() -> None:
    async def test() -> None:
        pools = Pool(idle_unload=600.0)
        await pools.pool.start()
        lease = await pools.pool.lease(pools["b"])
        await asyncio.sleep(599)
        assert pools.loaded == "ab"
        await asyncio.sleep(2)
        assert pools.loaded == "b"  # a request protects it
        lease.release()
        await asyncio.sleep(400)
        await pools.pool.load(pools["b"])  # a new use
        await asyncio.sleep(400)
        assert pools.loaded == "b"
        assert pools["b"].expires_in == pytest.approx(200)
        await asyncio.sleep(201)
        assert pools.loaded == ""
        await pools.pool.load(pools["b"])
        assert pools.loaded == "b"
        await pools.pool.close()

    running(test)


@pytest.mark.parametrize(("keep_alive", "left"), [(0.0, ""), (5.0, "a"), (math.inf, "a")])
def test_keep_alive_of_a_request_changes_the_age(keep_alive: float, left: str) -> None:
    async def test() -> None:
        pools = Pool(names="a", idle_unload=60.0)
        await pools.pool.start()
        lease = await pools.pool.lease(pools["a"])
        lease.keep_alive = keep_alive
        lease.release()
        await asyncio.sleep(1)
        assert pools.loaded == left
        await asyncio.sleep(1000)
        assert pools.loaded == ("a" if keep_alive == math.inf else "")
        await pools.pool.close()

    running(test)


def test_failed_load_touches_no_other_model() -> None:
    async def test() -> None:
        pools = Pool()
        await pools.pool.start()
        lease = await pools.pool.lease(pools["a"])
        pools.made["b"].failures = [ModelLoadError("/secret/b is broken."), ValueError("bug")]
        for _ in range(2):
            with pytest.raises(ApiError, match="could not be loaded") as caught:
                await pools.pool.lease(pools["b"])
            assert (caught.value.status, caught.value.code) == (503, "model_load_failed")
            assert "secret" not in caught.value.message
            assert pools["b"].failure
        assert pools.made["b"].engines[0].is_closed
        await pools.pool.load(pools["b"])  # the next request tries again
        assert pools["b"].failure is None
        assert pools.loaded == "ab"
        lease.release()
        await pools.pool.close()

    running(test)


def test_model_that_does_not_fit_is_refused_with_figures() -> None:
    async def test() -> None:
        pools = Pool(needs=2 * GIB, free=lambda: GIB)
        with pytest.raises(ApiError, match=r"b needs 2.0 GiB of memory, of which 1.0 GiB are") as e:
            await pools.pool.lease(pools["b"])
        assert (e.value.status, e.value.code) == (503, "model_does_not_fit")
        assert not pools.made["b"].engines
        await pools.pool.close()

    running(test)


def test_engine_without_memory_makes_others_leave() -> None:
    async def test() -> None:
        pools = Pool()
        await pools.pool.start()
        await pools.pool.load(pools["b"])
        pools.made["c"].failures = [LacksMemory("no"), LacksMemory("no")]
        await pools.pool.load(pools["c"])
        assert (pools.loaded, len(pools.made["c"].engines)) == ("c", 3)
        pools.made["a"].failures = [LacksMemory("takes 2 GiB"), LacksMemory("takes 2 GiB")]
        with pytest.raises(ApiError, match="takes 2 GiB"):
            await pools.pool.lease(pools["a"])
        await pools.pool.close()

    running(test)


def test_dead_engine_is_replaced_by_the_next_request() -> None:
    async def test() -> None:
        pools = Pool()
        await pools.pool.start()
        await pools.pool.load(pools["b"])
        lease = await pools.pool.lease(pools["a"])
        pools.made["a"].engines[0].die()
        assert pools["a"].status == "unloaded"
        assert pools["a"].failure
        lease.release()
        await pools.pool.load(pools["a"])
        assert (pools.loaded, len(pools.made["a"].engines)) == ("ab", 2)
        assert len(pools.made["b"].engines) == 1
        await pools.pool.close()

    running(test)


def test_shutdown_ends_a_load() -> None:
    async def test() -> None:
        pools = Pool()
        pools.made["b"].may_start.clear()
        await pools.pool.start()
        waiting = [asyncio.create_task(pools.pool.lease(pools[name])) for name in "bcb"]
        await pools.made["b"].starting.wait()
        assert pools["b"].status == "loading"
        await pools.pool.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(each, ApiError) and each.code for each in results] == ["draining"] * 3
        assert pools.made["b"].engines[0].is_closed
        with pytest.raises(ApiError, match="shutting down"):
            await pools.pool.lease(pools["a"])

    running(test)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 9), st.floats(0, 9)), max_size=12))
def test_pool_gives_every_request_its_model(requests: list[tuple[str, float, float]]) -> None:
    async def test() -> None:
        pools = Pool(max_loaded=2, idle_unload=4.0, names="abcd")
        await pools.pool.start()

        async def request(name: str, begin: float, length: float) -> None:
            await asyncio.sleep(begin)
            lease = await pools.pool.lease(pools[name])
            for _ in range(4):
                assert lease.hosted is pools[name].hosted
                assert len(pools.loaded) <= 2
                await asyncio.sleep(length / 4)
            lease.release()

        await asyncio.gather(*(request(*each) for each in requests))
        await asyncio.sleep(10)
        assert pools.loaded == ""
        alive = [e for made in pools.made.values() for e in made.engines if not e.is_closed]
        assert not alive
        await pools.pool.close()

    running(test)


# -- over HTTP -------------------------------------------------------------------------------------


@asynccontextmanager
async def app_of(pools: Pool):
    """Yield a client of a server with these models, and the server."""
    config = pools.pool.config
    server = Server(config, [made.source for made in pools.made.values()])
    app = build_app(server, PROTOCOLS, ROUTES)
    async with server.running():
        await until(lambda: server.lifecycle.is_ready)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, server


def over_http(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE))


ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


def test_requests_of_several_models_run_together() -> None:
    async def test() -> None:
        async with app_of(Pool(Script(), max_loaded=2)) as (client, _):
            bodies = [ASK | {"model": name} for name in "abacbc"]
            sent = [client.post("/v1/chat/completions", json=body) for body in bodies]
            replies = await asyncio.gather(*sent)
            assert [reply.json()["model"] for reply in replies] == list("abacbc")
            text = (await client.get("/metrics")).text
            for name in "abc":
                counted = f'finished_reason="stop",model_name="{name}"}} 2.0'
                assert counted in text.replace(
                    'model_name="' + name + '",finished_reason="stop"',
                    f'finished_reason="stop",model_name="{name}"',
                )
            rows = (await client.get("/v1/models")).json()["data"]
            assert [row["id"] for row in rows] == list("abc")
            states = [row["status"]["value"] for row in rows]
            assert sorted(states) == ["loaded", "loaded", "unloaded"]
            assert (await client.get("/models")).json()["data"] == rows
            stats = (await client.get("/stats", params={"model": "a"})).json()
            assert stats["model"] == "a"
            assert stats["models"] == dict(zip("abc", states, strict=True))

    over_http(test)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ASK),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", ASK),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/api/chat", ASK),
        ("/api/show", {}),
    ],
)
def test_wrong_model_is_a_typed_error(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with app_of(Pool(Script())) as (client, _):
            reply = await client.post(path, json=body | {"model": "none"})
            assert reply.status_code == 404
            assert 'this server has \\"a\\", \\"b\\", \\"c\\"' in reply.text
            for wrong in ({}, {"model": 5}):
                reply = await client.post(path, json=body | wrong)
                assert reply.status_code in ((400, 404) if path == "/api/show" else (400,))

    over_http(test)


def test_single_model_answers_without_a_name() -> None:
    async def test() -> None:
        async with app_of(Pool(Script(), names="a", idle_unload=60.0)) as (client, _):
            assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
            wrong = await client.post("/v1/chat/completions", json=ASK | {"model": "x"})
            assert wrong.status_code == 404

    over_http(test)


@pytest.mark.parametrize("protocol", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("fails", [False, True])
def test_stream_is_kept_alive_during_a_load(
    protocol: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_inference.server.server.KEEP_ALIVE", 0.01)

    async def test() -> None:
        pools = Pool(Script())
        async with app_of(pools) as (client, _):
            made = pools.made["b"]
            made.may_start.clear()
            if fails:
                made.failures.append(ModelLoadError("it is broken."))
            body = ASK | {"model": "b", "stream": True}
            sent = asyncio.create_task(client.post(protocol, json=body))
            await made.starting.wait()
            await asyncio.sleep(0.1)
            made.may_start.set()
            reply = await sent
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert reply.text.startswith(": keep-alive\n\n")
            if fails:
                assert "could not be loaded" in reply.text
                assert reply.text.count("event: error") == (protocol == "/v1/messages")
            else:
                assert "Hello" in reply.text
                assert "could not" not in reply.text

    over_http(test)


def test_request_waits_for_a_load_until_its_deadline() -> None:
    async def test() -> None:
        pools = Pool(Script(), request_timeout=0.2)
        async with app_of(pools) as (client, server):
            pools.made["b"].may_start.clear()
            for stream in (False, True):
                body = ASK | {"model": "b", "stream": stream}
                reply = await client.post("/v1/chat/completions", json=body)
                assert reply.status_code == 504
                assert "could not be loaded within 0.2 seconds" in reply.text
            ok = await client.post("/v1/chat/completions", json=ASK | {"model": "a"})
            assert ok.status_code == 200
            assert not server.exchanges
            pools.made["b"].may_start.set()
            await until(lambda: server.pool.named("b").can_serve)  # the load goes on

    over_http(test)


def test_load_and_unload_routes_need_the_admin_key() -> None:
    async def test() -> None:
        pools = Pool(Script(), admin_key="admin")
        key = {"authorization": "Bearer admin"}
        async with app_of(pools) as (client, server):
            for path in ("/models/load", "/models/unload"):
                assert (await client.post(path, json={"model": "b"})).status_code == 401
            reply = await client.post("/models/load", json={"model": "b"}, headers=key)
            assert reply.json() == {"success": True}
            assert server.pool.named("b").status == "loaded"
            reply = await client.post("/models/unload", json={"model": "b"}, headers=key)
            assert reply.json() == {"success": True}
            assert server.pool.named("b").status == "unloaded"
            pools.made["b"].failures.append(ModelLoadError("broken"))
            reply = await client.post("/models/load", json={"model": "b"}, headers=key)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_load_failed")
            row = (await client.get("/v1/models/b")).json()
            assert row["status"] == {"value": "unloaded", "failed": True}
            reply = await client.post("/models/load", json={"model": "x"}, headers=key)
            assert reply.status_code == 404

    over_http(test)


def test_stored_responses_outlive_their_engine() -> None:
    async def test() -> None:
        async with app_of(Pool(Script(), max_loaded=1)) as (client, server):
            first = (await client.post("/v1/responses", json={"model": "a", "input": "Hi"})).json()
            await client.post("/v1/chat/completions", json=ASK | {"model": "b"})
            assert server.pool.named("a").status == "unloaded"
            assert (await client.get(f"/v1/responses/{first['id']}")).status_code == 200
            body = {"model": "a", "input": "More", "previous_response_id": first["id"]}
            assert (await client.post("/v1/responses", json=body)).status_code == 200

    over_http(test)


# -- configuration ---------------------------------------------------------------------------------

TWO = [EngineConfig("a", device="cpu"), EngineConfig("b", device="cpu")]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rl": True}, "rl=True"),
        ({"replicas": 2}, "replicas=2"),
        ({"restart_engine": True}, "restart_engine=True"),
        ({"in_process": True}, "in_process=True"),
        ({"tool_format": "hermes"}, "tool_format='hermes'"),
        ({"served_model_name": "one"}, "1 names for 2 models"),
        ({"served_model_name": ("one", "one")}, "two models are named 'one'"),
    ],
)
def test_options_of_one_model_are_rejected_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        sources_of(TWO, ServerConfig(**config))


def test_limits_of_a_single_model_are_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match="max_loaded=2 needs"):
        sources_of(TWO[:1], ServerConfig(max_loaded=2))
    with pytest.raises(ConfigError, match="idle_unload=5 is not possible with rl=True"):
        ServerConfig(idle_unload=5.0, rl=True)
    with pytest.raises(ConfigError, match="idle_unload=0"):
        ServerConfig(idle_unload=0.0)
    with pytest.raises(ConfigError, match="max_loaded=0"):
        ServerConfig(max_loaded=0)


# -- engines in processes --------------------------------------------------------------------------


@pytest.mark.thorough
def test_killed_engine_process_leaves_the_others_alone(tmp_path: Path) -> None:
    engines = []
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        folder = str(tiny_llama(tmp_path / name, seed=seed))
        engines.append(EngineConfig(folder, device="cpu", num_threads=1, kv_cache_memory=2**22))
    config = ServerConfig(port=0, served_model_name=("a", "b"), max_loaded=2, idle_unload=600.0)
    asked = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    extra = {"return_token_ids": True}

    def ids(url: str, name: str) -> list[int]:
        body = asked | extra | {"model": name}
        reply = httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE)
        while reply.headers.get("retry-after"):  # its death was not known yet
            reply = httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]

    with running_server(engines, config) as url:
        before = ids(url, "a"), ids(url, "b")
        assert before[0] != before[1]
        children = [int(each) for each in _children(os.getpid()) if _is_engine(each)]
        assert len(children) == 2
        stream = httpx.stream(
            "POST",
            url + "/v1/completions",
            json=asked | {"model": "a", "max_tokens": 400, "stream": True},
            timeout=PATIENCE,
        )
        with stream as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(children[0], signal.SIGKILL)
            rest = "".join(lines)
        assert "error" in rest or "[DONE]" in rest  # it may have been faster
        assert ids(url, "b") == before[1]
        assert ids(url, "a") == before[0]  # loaded again
        assert children[1] in map(int, _children(os.getpid()))


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split() + [
        child
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for child in (task / "children").read_text().split()
    ]


def _is_engine(pid: str) -> bool:
    return b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
