"""`Control` and requests: pause, sleep and abort, in this process and in a separate one."""

import asyncio
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import APIRouter

from nano_inference.errors import InvalidRequest, VersionGone
from nano_inference.remote.client import EngineClient
from nano_inference.server import main
from nano_inference.server.api.shared.generation import Generation, answer
from nano_inference.server.api.shared.protocol import Ask
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.control import Control
from nano_inference.server.control.pauses import Loads
from nano_inference.server.errors import ApiError
from nano_inference.server.server import Server
from nano_inference.types import GROUP_COMPLETE, Delta, SamplingParams
from tests.server.engines import PATIENCE, Run, config_of, core_of, finished, idle, params_of

LONG = 450  # tokens: more than a request gets during a check


@pytest.fixture
def control(client: EngineClient) -> Control:
    return Control(client, ServerConfig(rl=True, rl_timeout=30.0))


@pytest.mark.thorough(cases=["process-False", "process-True"])
@pytest.mark.parametrize("stream", [False, True])
def test_aborted_requests_return_their_tokens(
    client: EngineClient, control: Control, run: Run, stream: bool
) -> None:
    async def test() -> None:
        whole = await finished(client.submit([1, 2], params_of(0, 40), stream=False))
        names = ["a", "b", "b", None]
        streams = [
            client.submit([1, 2], params_of(0, LONG), 2, stream=stream, name=name) for name in names
        ]
        watched = client.submit([1, 3], params_of(0, LONG), stream=True, name="c")
        seen: list[Delta] = []
        for _ in range(3):
            seen += await watched.next()
        assert await control.pauses.abort(["b", "nobody's"]) == 2
        assert await control.pauses.abort(["b"]) == 0
        for request in streams[1:3]:
            samples = await finished(request)
            assert [sample.finish_reason for sample in samples] == ["abort"] * 2
            for sample in samples:
                count = len(sample.completion_tokens)
                assert 0 < count == len(sample.logprobs) < LONG
            assert (
                samples[0].completion_tokens[:40]
                == whole[0].completion_tokens[: len(samples[0].completion_tokens)]
            )
        assert (await control.pauses.loads()).running > 0
        assert await control.pauses.abort() == 3
        assert await control.pauses.loads() == Loads(0, 0)
        for request in (streams[0], streams[3]):
            assert {sample.finish_reason for sample in await finished(request)} == {"abort"}
        assert {sample.finish_reason for sample in await finished(watched, seen)} == {"abort"}
        await idle(client)

    run(test())


@pytest.mark.thorough(cases=["process-paused"])
@pytest.mark.parametrize("state", ["paused", "asleep"])
def test_queued_requests_can_be_aborted(
    client: EngineClient, control: Control, run: Run, state: str
) -> None:
    async def test() -> None:
        await (control.pauses.pause("keep") if state == "paused" else control.memory.sleep())
        request = client.submit([1, 2], params_of(0), stream=True, name="x")
        assert await control.pauses.loads() == Loads(0, 1)
        assert await control.pauses.abort(["x"]) == 1
        (sample,) = await finished(request)
        assert (sample.finish_reason, sample.completion_tokens, sample.logprobs) == (
            "abort",
            (),
            (),
        )
        await (control.pauses.resume() if state == "paused" else control.memory.wake())
        assert not await control.pauses.is_paused()

    run(test())


@pytest.mark.thorough(but=["in process-wait", "process-wait"])
@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_pause(client: EngineClient, control: Control, run: Run, mode: Any) -> None:
    async def test() -> None:
        length = 30 if mode == "wait" else LONG
        alone = await finished(client.submit([1, 2], params_of(0, length), 2, stream=False))
        request = client.submit([1, 2], params_of(0, length), 2, stream=True)
        first = await request.next()
        await control.pauses.pause(mode, kv_policy="recompute")
        assert control.engine.known.pause_policy == "recompute"
        assert await control.pauses.is_paused()
        steps = (await client.call("stats")).num_steps
        late = client.submit([1, 3], params_of(1), stream=True)
        if mode == "keep":
            await asyncio.sleep(0.05)
            assert await control.pauses.loads() == Loads(2, 1)
        else:
            samples = await finished(request, first)
            assert {sample.finish_reason for sample in samples} == {
                "abort" if mode == "abort" else "length"
            }
            assert await control.pauses.loads() == Loads(0, 1)
        assert (await client.call("stats")).num_steps == steps, "nothing is computed"
        await control.pauses.resume()
        await control.pauses.resume()
        assert control.engine.known.pause_policy is None
        assert not await control.pauses.is_paused()
        if mode == "keep":
            assert core_of(await finished(request, first)) == core_of(alone)
        assert len(await finished(late)) == 1
        await idle(client)

    run(test())


@pytest.mark.thorough
def test_pause_that_waits_too_long_is_none(
    client: EngineClient, control: Control, run: Run
) -> None:
    async def test() -> None:
        requests = [
            client.submit([1, 2], params_of(seed, LONG), 2, stream=False) for seed in range(8)
        ]
        with pytest.raises(ApiError, match="the engine is not paused"):
            await control.pauses.pause("wait", timeout=0.01)
        requests.append(client.submit([1, 2], params_of(0), stream=False))
        for request in requests:
            await finished(request)
        assert not await control.pauses.is_paused(), "and not when they have ended either"
        await idle(client)

    run(test())


def test_memory_sleeps_part_by_part(client: EngineClient, control: Control, run: Run) -> None:
    async def test() -> None:
        alone = await finished(client.submit([1, 2], params_of(0, 60), 2, stream=False))
        checksums = await client.call("weights_checksum")
        for end_pause_first in (False, True):
            request = client.submit([1, 2], params_of(0, 60), 2, stream=True)
            first = await request.next()
            await control.pauses.pause("keep")
            await control.memory.sleep()
            await control.memory.sleep(["weights"])
            assert await control.engine.call("sleeping") == ("weights", "kv_cache")
            if end_pause_first:
                await control.pauses.resume()
            await control.memory.wake(["weights"])
            await control.memory.wake(["weights"])
            assert await control.engine.call("sleeping") == ("kv_cache",)
            assert await client.call("weights_checksum") == checksums
            steps = (await client.call("stats")).num_steps
            await asyncio.sleep(0.05)
            assert (await client.call("stats")).num_steps == steps, (
                "nothing is computed without a cache"
            )
            await control.memory.wake()
            assert await control.pauses.is_paused() is not end_pause_first
            await control.pauses.resume()
            assert core_of(await finished(request, first)) == core_of(alone)
        await idle(client)

    run(test())


def test_request_control_rejects_invalid_calls(
    client: EngineClient, control: Control, run: Run
) -> None:
    async def test() -> None:
        unknown: Any = ["everything"]
        with pytest.raises(ApiError, match="'everything' is not a part of the memory"):
            await control.memory.sleep(unknown)
        with pytest.raises(InvalidRequest, match="Invalid enum value 'stop'"):
            await control.pauses.pause("stop")  # pyright: ignore[reportArgumentType]
        assert not await control.pauses.is_paused()
        request = client.submit([1, 2], params_of(0, LONG), stream=True)
        await request.next()
        with pytest.raises(ApiError) as refused:
            await control.memory.flush_cache(only_idle=True)
        assert refused.value.status == 409
        await control.memory.flush_cache()
        assert await control.pauses.abort() == 1
        await control.memory.flush_cache(only_idle=True)
        await idle(client)

    run(test())


# -- groups and versions ---------------------------------------------------------------------------


def test_rest_of_a_group_returns_its_tokens(client: EngineClient, run: Run) -> None:
    async def test() -> None:
        alone = await finished(client.submit([1, 2], short, 4, stream=False))
        for stream in (False, True):
            samples = await finished(client.submit([1, 2], short, 4, stream=stream, num_wanted=1))
            ended = [sample for sample in samples if sample.finish_reason != "abort"]
            assert 0 < len(ended) < 4
            assert core_of(ended) == core_of([alone[sample.sample_index] for sample in ended])
            rest = [sample for sample in samples if sample.finish_reason == "abort"]
            assert {sample.stop_reason for sample in rest} == {GROUP_COMPLETE}
        with pytest.raises(InvalidRequest, match="num_wanted=5"):
            await client.submit([1, 2], short, 4, stream=False, num_wanted=5).next()
        await idle(client)

    short = SamplingParams(
        max_tokens=60, seed=1, ignore_eos=True, stop_token_ids=frozenset(range(0, 300, 16))
    )
    run(test())


def test_requests_for_versions(
    client: EngineClient, control: Control, run: Run, model: Path
) -> None:
    async def test() -> None:
        serving = await client.call("get_weight_version")
        now = client.submit([1, 2], params_of(0), stream=False, exact_version=serving)
        assert len(await finished(now)) == 1
        later = client.submit([1, 2], params_of(0), stream=False, min_version=serving + 1)
        fresh = client.submit(
            [1, 2], params_of(0), stream=False, exact_version=serving + 1, max_staleness=0
        )
        await control.pauses.pause("keep")
        late = Generation(
            builder_of(Ask([1, 2], params_of(0), limits={"exact_version": serving})),
            served_of(client),
        )
        late.submit(client, "late")
        assert await control.pauses.loads() == Loads(0, 3)
        await control.updates.begin(version=str(serving + 1))
        await control.updates.receive_folder(str(model))
        await control.updates.finish()
        with pytest.raises(ApiError, match="the weight version is gone") as refused:
            await answer(late)
        assert refused.value.status == 409
        await control.pauses.resume()
        for request in (later, fresh):
            (sample,) = await finished(request)
            assert sample.weight_versions[0].version == serving + 1
        with pytest.raises(VersionGone, match="this engine serves"):
            await client.submit([1, 2], params_of(0), stream=False, exact_version=serving).next()
        await idle(client)

    run(test())


def builder_of(ask: Ask) -> Any:
    return SimpleNamespace(asks=[ask], stream=False, make_parser=None)


def served_of(client: EngineClient) -> Any:
    return SimpleNamespace(engine=client.info, tokenizer=None)


# -- over HTTP -------------------------------------------------------------------------------------


def test_abort_over_http(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Abort requests: streams end properly, and whole answers have status 200."""

    def routes(router: APIRouter, server: Server) -> None:
        @router.post("/test/abort")
        async def abort(name: str | None = None) -> int:  # pyright: ignore[reportUnusedFunction]
            return await server.control.pauses.abort(None if name is None else [name])

    monkeypatch.setattr(main, "ROUTES", (*main.ROUTES, routes))
    threads = torch.get_num_threads()
    body = {
        "prompt": [1, 2],
        "max_tokens": LONG,
        "seed": 0,
        "n": 2,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    replies: list[httpx.Response] = []

    def whole() -> None:
        headers = {"x-request-id": "one"}
        replies.append(
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
        )

    config = ServerConfig(port=0, in_process=True)
    with (
        main.running_server(config_of(model), config) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
    ):
        http.post("/v1/completions", json=body | {"max_tokens": 2})
        thread = threading.Thread(target=whole)
        thread.start()
        deadline = time.monotonic() + PATIENCE
        while not http.post("/test/abort?name=one").json():
            assert time.monotonic() < deadline
        thread.join(PATIENCE)
        assert replies[0].status_code == 200
        for choice in replies[0].json()["choices"]:
            assert choice["finish_reason"] == "abort"
            assert len(choice["token_ids"]) < LONG
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert httpx.post(f"{url}/test/abort", timeout=PATIENCE).json() == 1
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert [each for each in reasons if each] == ["abort", "abort"]
    torch.set_num_threads(threads)
