"""Real engines of a tiny model in one fleet: kill, move, update and add them without changing a
bit.
"""

import asyncio
import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nano_inference.config import EngineConfig
from nano_inference.engine.engine import InferenceEngine
from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.remote.client import EngineClient, RequestStream
from nano_inference.remote.in_process import InProcessClient
from nano_inference.remote.process_client import ProcessClient
from nano_inference.rl.comparison import differences
from nano_inference.rl.replayer import Replayer
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.control import Control
from nano_inference.server.main import engine_client, running_server
from nano_inference.structured.grammar import Grammar
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import Delta, SamplingParams, TrainingSample
from nano_inference.weights.transports.files import write_folder
from tests.fleet.fleets import plain
from tests.models.tiny import tiny_llama
from tests.server.engines import PATIENCE, config_of, finished, params_of, until
from tests.structured.vocabularies import byte_tokenizer

pytestmark = pytest.mark.usefixtures("slow_steps")


@asynccontextmanager
async def fleet_of(
    kind: Any, config: EngineConfig, count: int = 2, **options: Any
) -> AsyncIterator[FleetClient]:
    client = FleetClient(lambda _: kind(config, 4096), count, 4096, **options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def play(test: Any) -> None:
    threads = torch.get_num_threads()
    asyncio.run(asyncio.wait_for(test, 120))
    torch.set_num_threads(threads)


def kinds_of_requests(tokens: int) -> list[tuple[list[int], SamplingParams, int, bool]]:
    """Submit 32 requests: streamed and not, groups, penalties, filters, prompt logprobs, masks."""
    requests: list[tuple[list[int], SamplingParams, int, bool]] = []
    for each in range(32):
        params = params_of(each, tokens - each % 8)
        more: list[dict[str, Any]] = [
            {},
            {"top_logprobs": 2, "raw_logprobs": True},
            {"presence_penalty": 0.5, "min_p": 0.01},
            {"sampling_mask": True},
            {"prompt_logprobs": True},
            {"temperature": 0.0},
            {"logit_bias": {5: 2.0}, "repetition_penalty": 1.1, "top_k": 0},
            {"temperature": 0.7, "cache_salt": "s"},
        ]
        requests.append(
            (
                [1, 2, 3, each],
                replace(params, **more[each % 8]),
                2 if each % 5 == 0 else 1,
                each % 3 > 0,
            )
        )
    return requests


def asked(client: EngineClient, tokens: int) -> list[RequestStream]:
    return [
        client.submit(prompt, params, count, stream=stream)
        for prompt, params, count, stream in kinds_of_requests(tokens)
    ]


def bits(samples: list[TrainingSample]) -> str:
    return repr(list(map(plain, samples)))


async def answers(
    streams: list[RequestStream], heard: dict[int, list[Delta]] | None = None
) -> list[str]:
    heard = heard or {}
    return [
        bits(await finished(stream, heard.get(place, []))) for place, stream in enumerate(streams)
    ]


@pytest.mark.thorough
def test_streams_keep_their_bits_if_a_replica_is_killed(
    model: Path,
) -> None:
    """Kill the process with SIGKILL."""

    async def test() -> None:
        async with fleet_of(ProcessClient, config_of(model)) as client:
            quiet = await answers(asked(client, 200))
            streams = asked(client, 200)
            heard: dict[int, list[Delta]] = {}
            for index, stream in enumerate(streams):
                if kinds_of_requests(200)[index][3]:
                    heard[index] = await stream.next()
            victim = client.supervisor.replicas["0"].client
            on_it = sum(request.client is victim for request in client.requests.values())
            assert on_it > 4
            os.kill(victim.info.pid, signal.SIGKILL)
            assert await answers(streams, heard) == quiet
            assert client.failover.moved >= on_it - 4  # some may have ended already
            assert 0 < client.failover.longest < 20
            assert [each.state for each in client.supervisor.statuses()] == ["dead", "serving"]

    play(test())


@pytest.mark.thorough
def test_drafted_streams_keep_their_bits_if_a_replica_dies(
    model: Path,
) -> None:
    """Kill the process with SIGKILL while streams get several tokens a step."""

    def repetitive(client: EngineClient) -> list[RequestStream]:
        few = frozenset([5, 6, 7])
        params = SamplingParams(max_tokens=400, ignore_eos=True, allowed_token_ids=few)
        return [
            client.submit(
                [1, 2, each],
                replace(params, seed=each, temperature=0.3 * (each % 3), top_logprobs=each % 2),
                1 + (each == 5),
                stream=each != 4,
            )
            for each in range(6)
        ]

    async def test() -> None:
        config = config_of(model)
        async with fleet_of(ProcessClient, config) as client:
            quiet = await answers(repetitive(client))
        async with fleet_of(ProcessClient, replace(config, speculation="suffix")) as client:
            streams = repetitive(client)
            heard: dict[int, list[Delta]] = {0: []}
            victim = next(iter(client.requests.values())).client  # the engine of the first stream
            assert victim is not None
            before = await victim.call("stats")
            while before.speculation.num_accepted < 20:
                heard[0] += await asyncio.wait_for(streams[0].next(), PATIENCE)
                before = await victim.call("stats")
            assert any(len(delta.token_ids) > 1 for delta in heard[0])
            on_it = sum(request.client is victim for request in client.requests.values())
            os.kill(victim.info.pid, signal.SIGKILL)
            assert await answers(streams, heard) == quiet
            assert client.failover.moved == on_it > 0
            after = await client.call("stats")
            assert after.speculation.num_accepted > before.speculation.num_accepted

    play(test())


@pytest.mark.thorough
def test_constrained_sample_keeps_its_grammar_after_a_death(
    tmp_path: Path,
) -> None:
    """Resume the sample in another process by `Resume`; a failed compilation ends only its
    request.
    """
    folder = tiny_llama(tmp_path, seed=0)
    byte_tokenizer(folder)
    pattern = "([0-9]{3}-){30}[a-f]+!"
    params = SamplingParams(max_tokens=400, seed=3, grammar=Grammar.regex(pattern))
    never = SamplingParams(max_tokens=9, grammar=Grammar.json_schema({"uniqueItems": True}))

    def asked(client: EngineClient) -> list[RequestStream]:
        return [
            client.submit([1, 2, each], replace(params, seed=each), 2, stream=each % 2 > 0)
            for each in range(8)
        ]

    async def test() -> None:
        async with fleet_of(ProcessClient, config_of(folder)) as client:
            quiet = await answers(asked(client))
            streams = asked(client)
            heard = {each: await streams[each].next() for each in range(1, 8, 2)}
            victim = client.supervisor.replicas["0"].client
            os.kill(victim.info.pid, signal.SIGKILL)
            assert await answers(streams, heard) == quiet
            assert client.failover.moved > 0
            (failed,) = await finished(client.submit([1, 2], never, stream=False))
            assert failed.finish_reason == "abort"
            assert "uniqueItems" in str(failed.stop_reason)
            (sample,) = await finished(client.submit([1, 2], params, stream=False))
            text = load_tokenizer(folder).decode(sample.completion_tokens)
            assert sample.finish_reason == "length" or re.fullmatch(pattern, text)
            assert re.match("([0-9]{3}-){30}[a-f]", text)

    play(test())


def test_new_replica_gets_live_weights_and_pause_before_serving(
    model: Path,
) -> None:
    async def test() -> None:
        async with fleet_of(InProcessClient, config_of(model), 1) as client:
            old = await answers(asked(client, 10))
            control = Control(client, ServerConfig(rl=True))
            await control.updates.begin()
            await control.updates.receive_folder(str(new_weights(model)))
            assert await control.updates.finish(version="seven") == "seven"
            before = await control.checksums.get()
            new = await answers(asked(client, 10))
            assert new != old
            await control.pauses.pause("keep")
            name = await client.add()
            assert await client.supervisor.replicas[name].client.call("is_paused")
            await control.pauses.resume()
            assert await control.checksums.get() == before  # raises if the replicas differ
            await client.remove("0")
            assert await answers(asked(client, 10)) == new
            assert await control.engine.serving_version() == "seven"

            await client.add()  # updates reach both replicas
            await control.updates.begin()
            await control.updates.receive_folder(str(model))
            await control.updates.finish(kv_policy="wait")
            assert await answers(asked(client, 10)) != new
            assert await control.checksums.get() != before

    play(test())


def new_weights(model: Path) -> Path:
    torch.manual_seed(1)
    weights = {
        name: each + 0.05 * torch.randn_like(each)
        for name, each in load_file(model / "model.safetensors").items()
    }
    return write_folder(model / "new", weights, version=7)


@pytest.mark.thorough
def test_moves_between_replicas_change_no_bit(model: Path) -> None:
    """Move all kinds of requests repeatedly, in any state."""

    async def test() -> None:
        async with fleet_of(InProcessClient, config_of(model)) as client:
            quiet = await answers(asked(client, 150))
            streams = asked(client, 150)

            def num_steps() -> int:
                return sum(
                    each.client._core.engine.loop.num_steps  # pyright: ignore
                    for each in client.supervisor.replicas.values()
                )

            for turn in range(15):
                later = num_steps() + 5
                await until(lambda later=later: num_steps() >= later or not client.requests)
                name = str(turn % 2)
                client.drain(name, move=True)
                client.drain(name, draining=False)
            assert await answers(streams) == quiet
            assert client.failover.moved > 3  # the number depends on when others end
            for each in ("0", "1"):
                stats = await client.supervisor.replicas[each].client.call("stats")
                assert stats.num_free_blocks == stats.num_blocks

    play(test())


@pytest.mark.thorough
def test_wanted_count_and_pause_survive_a_move(model: Path) -> None:
    async def test() -> None:
        async with fleet_of(InProcessClient, config_of(model)) as client:
            stream = client.submit(
                [1, 2], params_of(0, 300), 4, stream=True, num_wanted=2, max_staleness=1
            )
            deltas = await stream.next()
            await client.call("pause", mode="keep", seconds=5.0)
            (request,) = client.requests.values()
            name = next(
                name for name, each in client.supervisor.living().items() if each is request.client
            )
            client.drain(name, move=True)
            await asyncio.sleep(0.2)
            assert stream.samples_left == 4
            await client.call("resume")
            reasons = sorted(sample.finish_reason for sample in await finished(stream, deltas))
            # all may end in one step
            assert reasons in (["abort", "abort", "length", "length"], ["length"] * 4)

    play(test())


@pytest.mark.thorough
def test_old_weights_requests_finish_on_any_replica(model: Path) -> None:
    """Finish requests on replicas that kept the old weights, others with the live weights."""

    async def test() -> None:
        async with fleet_of(InProcessClient, config_of(model)) as client:
            control = Control(client, ServerConfig(rl=True))
            quiet = [
                bits(await finished(client.submit([1, 2], params_of(each, 400), stream=True)))
                for each in (0, 1)
            ]
            for has_kept in (True, False):
                streams = [
                    client.submit([1, 2], params_of(each, 400), stream=True) for each in (0, 1)
                ]
                heard = [await stream.next() for stream in streams]
                requests = list(client.requests.values())
                assert requests[0].client is not requests[1].client
                if not has_kept:
                    streams[1].close()
                    await client.call("take_in")
                await control.updates.begin()
                await control.updates.receive_folder(str(new_weights(model) if has_kept else model))
                await control.updates.finish(kv_policy="finish_old")
                name = next(
                    name
                    for name, each in client.supervisor.living().items()
                    if each is requests[0].client
                )
                client.drain(name, move=True)
                client.drain(name, draining=False)
                (sample,) = await finished(streams[0], heard[0])
                versions = [span.version for span in sample.weight_versions]
                if has_kept:
                    assert [bits([sample]), bits(await finished(streams[1], heard[1]))] == quiet
                    assert versions == [0]
                else:
                    assert versions == [7, 8]
                    assert len(sample.completion_tokens) == 400

    play(test())


@pytest.mark.thorough
def test_sample_moved_amid_mixed_weights_replays_bit_for_bit(tmp_path: Path) -> None:
    """Check that `kv_versions` names the weights of each context, also after the replica died."""
    model = tiny_llama(tmp_path, max_position=2048)
    new = new_weights(model)

    async def test() -> list[TrainingSample]:
        async with fleet_of(InProcessClient, config_of(model)) as client:
            control = Control(client, ServerConfig(rl=True))
            streams = [
                client.submit([1, 2, 3, each], params_of(each, 800), 2, stream=each > 0)
                for each in range(3)
            ]

            async def more(tokens: int) -> None:  # of each sample
                requests = list(client.requests.values())
                wanted = [
                    len(known.token_ids) + tokens
                    for request in requests
                    for known in request.samples
                ]
                await until(
                    lambda: all(
                        len(known.token_ids) >= least
                        for known, least in zip(
                            (k for f in requests for k in f.samples), wanted, strict=True
                        )
                    )
                )

            for folder in (new, model):
                await more(20)
                await control.updates.begin()
                await control.updates.receive_folder(str(folder))
                await control.updates.finish(kv_policy="keep")
            await more(20)
            for name in ("0", "1"):
                client.drain(name, move=True)
                client.drain(name, draining=False)
                await more(5)
            assert client.failover.moved >= 3
            return [sample for stream in streams for sample in await finished(stream)]

    samples: list[TrainingSample] = []

    async def kept() -> None:
        samples.extend(await test())

    play(kept())
    with InferenceEngine(config_of(model)) as engine:
        replayer = Replayer(engine, {0: str(model), 7: str(new), 8: str(model)})
        for sample in samples:
            assert [span.version for span in sample.weight_versions] == [0, 7, 8]
            assert any(len(context.versions) == 3 for context in sample.kv_versions), (
                "weights were mixed"
            )
            assert len(sample.kv_versions[-1].versions) == 1, "it was computed again"
            assert not differences(sample, replayer.replay(sample))


def test_server_lists_replicas_and_an_administrator_edits_them(model: Path) -> None:
    config = ServerConfig(port=0, in_process=True, replicas=2, admin_key="boss")
    client = engine_client(config_of(model), config)
    assert isinstance(client, FleetClient)

    def ask(path: str, body: Any = None, key: str = "boss") -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {
            "authorization": f"Bearer {key}",
            "content-type": "application/json",
            "x-session-id": "me",
        }
        request = urllib.request.Request(url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read()

    with running_server(client, config) as url:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1, "model": str(model)}
        for _ in range(3):
            ask("/v1/completions", body)
        assert set(client.router._sessions) == {"me"}
        found = json.loads(ask("/fleet"))
        assert [each["state"] for each in found["replicas"]] == ["serving", "serving"]
        assert json.loads(ask("/fleet/add", {}))["replica"] == "2"
        assert json.loads(ask("/fleet/drain", {"replica": "0", "move": True}))["requests_left"] == 0
        assert json.loads(ask("/fleet/remove", {"replica": "1"}))["requests_moved"] == 0
        ask("/v1/completions", body)
        metrics = ask("/metrics").decode()
        assert 'replica_state{model_name="' in metrics
        assert 'replica="2",state="serving"} 1.0' in metrics
        assert "failover_pause_seconds_count" in metrics
        for path, wrong in (
            ("/fleet/drain", {"replica": "9"}),
            ("/fleet/drain", {"other": 1}),
            ("/fleet/remove", {}),
        ):
            with pytest.raises(urllib.error.HTTPError, match=r"40[04]"):
                ask(path, wrong)
        with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
            ask("/fleet", key="guest")


@pytest.mark.slow
def test_smollm2_streams_survive_their_replica() -> None:
    """Use the text and stop strings of a real tokenizer."""
    config = EngineConfig("smollm2-135m", num_threads=1, kv_cache_memory=2**28)
    params = [
        SamplingParams(max_tokens=60, seed=each, stop=(" the", "\n\n")[: each % 3])
        for each in range(16)
    ]

    async def test() -> None:
        async with fleet_of(ProcessClient, config) as client:

            def go() -> list[RequestStream]:
                return [
                    client.submit([504, 3575, each], params[each], stream=True)
                    for each in range(16)
                ]

            quiet = [await text_and_bits(stream) for stream in go()]
            streams = go()
            heard = [await stream.next() for stream in streams]
            os.kill(client.supervisor.replicas["1"].client.info.pid, signal.SIGKILL)
            assert [
                await text_and_bits(*each) for each in zip(streams, heard, strict=True)
            ] == quiet
            assert client.failover.moved

    play(test())


async def text_and_bits(stream: RequestStream, heard: list[Delta] | None = None) -> tuple[str, str]:
    deltas = heard or []
    while stream.samples_left:
        deltas += await stream.next()
    return "".join(delta.text or "" for delta in deltas), bits(await finished(stream, deltas))
