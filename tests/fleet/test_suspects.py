"""A request that kills its engines kills at most three, and no other request ends with it."""

import asyncio

import pytest

from nano_inference.fleet.errors import EnginesDied
from nano_inference.fleet.requests import FleetRequest
from nano_inference.remote.client import RequestStream
from nano_inference.remote.messages import Generate, Refused
from nano_inference.server.errors import api_error_of
from nano_inference.types import Delta, SamplingParams
from tests.fleet.fleets import Engine, Made, fleet, play, told
from tests.server.engines import until
from tests.server.scripted import Script

PARAMS = SamplingParams(max_tokens=20, seed=1)
KILLER = [6, 6, 6]


async def all_of(stream: RequestStream) -> list[Delta]:
    deltas: list[Delta] = []
    while stream.samples_left:
        deltas += await stream.next()
    return deltas


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("is_masked", [False, True], ids=["resumed", "repeated"])
def test_poisonous_request_kills_at_most_three_engines(tokens: int, is_masked: bool) -> None:
    """Kill the engine in the request's prefill or later."""

    def says(request: Generate, index: int) -> Script:
        die_after = tokens if request.prompt == KILLER else None
        return Script(list(range(100, 130)), delay=0.005, die_after=die_after)

    async def test() -> None:
        async with fleet(5, says) as made:
            innocents = [
                made.client.submit([each], PARAMS, stream=each % 2 > 0) for each in range(15)
            ]
            params = SamplingParams(max_tokens=20, seed=1, top_k=5, sampling_mask=is_masked)
            killer = made.client.submit(KILLER, params, stream=True)
            with pytest.raises(
                EnginesDied, match="3 engines died while they had this request"
            ) as refused:
                await all_of(killer)
            answer = api_error_of(refused.value)
            assert (answer.status, answer.code) == (500, "engines_died")
            assert answer.headers["x-should-retry"] == "false"
            ends = [(await all_of(stream))[-1].finished for stream in innocents]
            assert [end and end.completion_tokens for end in ends] == [tuple(range(100, 120))] * 15
            assert made.client.supervisor.num_deaths == 3
            assert len(made.client.supervisor.living()) == 2
            assert not made.client.requests
            assert all(
                made.client.router.score(name) == 0 for name in made.client.supervisor.living()
            )

    play(test())


def requests_at(made: Made, engine: Engine) -> list[FleetRequest]:
    return [request for request in made.client.requests.values() if request.client is engine]


async def suspects(made: Made, count: int) -> list[RequestStream]:
    """Submit `count` held requests, with one suspect on replica 2."""
    for engine in made.engines:
        engine.go.clear()
    for name in ("1", "2"):
        made.client.drain(name)
    streams = [made.client.submit([each], PARAMS, stream=True) for each in range(count)]
    made.client.drain("1", draining=False)
    made.engines[0].die()
    made.client.drain("2", draining=False)
    made.engines[1].die()
    return streams


def test_replica_has_one_suspect_at_a_time() -> None:
    async def test() -> None:
        async with fleet(3) as made:
            made.on_made = lambda engine: engine.go.clear()
            streams = await suspects(made, 5)
            last = made.engines[2]
            assert len(requests_at(made, last)) == 1
            # a new request is not a suspect and does not wait
            other = made.client.submit([9], PARAMS, stream=True)
            assert len(requests_at(made, last)) == 2
            await made.client.add()
            await until(lambda: requests_at(made, made.engines[3]))
            assert [len(requests_at(made, engine)) for engine in made.engines] == [0, 0, 2, 1]
            streams[4].close()  # while it waits
            for engine in made.engines:
                engine.go.set()
            for stream in (*streams[:4], other):
                assert told(await all_of(stream))[0] == list(range(100, 120))
            assert not made.client.requests
            assert made.client.router.score("2") == made.client.router.score("3") == 0

    play(test())


def test_suspect_of_a_third_dead_engine_is_the_only_one_to_end() -> None:
    async def test() -> None:
        async with fleet(3) as made:
            await made.client.add()
            made.client.drain("3")
            streams = await suspects(made, 3)
            (suspect,) = requests_at(made, made.engines[2])
            made.client.drain("3", draining=False)
            made.engines[2].die()
            failed = streams[suspect.message.prompt[0]]
            with pytest.raises(EnginesDied, match="3 engines died"):
                await all_of(failed)
            made.engines[3].go.set()
            for stream in streams:
                if stream is not failed:
                    assert told(await all_of(stream))[0] == list(range(100, 120))

    play(test())


def test_planned_moves_raise_no_suspicion() -> None:
    async def test() -> None:
        async with fleet(2, Script(list(range(100, 130)), delay=0.005)) as made:
            stream = made.client.submit([1], PARAMS, stream=True)
            for turn in range(8):
                await asyncio.sleep(0)
                made.client.drain(str(turn % 2), move=True)
                made.client.drain(str(turn % 2), draining=False)
            (request,) = made.client.requests.values()
            assert request.moves >= 4
            # A dying engine rejects requests before it reports its death.
            for _ in range(5):
                assert isinstance(request.client, Engine)
                request.client._receive(Refused(request.inner, "EngineDead", "a step failed"))
            assert request.deaths == 0
            assert told(await all_of(stream))[0] == list(range(100, 120))

    play(test())
