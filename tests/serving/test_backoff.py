"""New engines in the place of dead ones come after a wait that grows until one lasts."""

import asyncio
from typing import Any

import pytest

from nano_inference.config import EngineConfig
from nano_inference.serving.backoff import LASTING, Backoff
from nano_inference.serving.fleet.replica import Replica
from nano_inference.serving.fleet.roster import Roster
from nano_inference.serving.process_client import ProcessClient
from tests.serving.engines import until
from tests.serving.fleet.fleets import fleet, play

GROWING = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_it_doubles_up_to_the_longest_and_begins_anew_after_one_that_lasted() -> None:
    backoff = Backoff()
    for wait in GROWING:
        backoff.ready(100.0)
        assert backoff.died(100.0 + LASTING) == wait
    backoff.ready(100.0)
    assert backoff.died(100.1 + LASTING) == 0.5
    assert [backoff.died(1000.0), backoff.died(1000.0)] == [0.5, 1.0]  # those were never ready
    assert [backoff.died(0.0) for _ in range(3000)][-1] == 30.0


def test_a_replica_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    start_again = Roster._start_again

    async def noted(self: Roster, each: Replica, delay: float) -> None:
        waits.append(delay)
        await start_again(self, each, 0.0)

    monkeypatch.setattr(Roster, "_start_again", noted)

    async def test() -> None:
        async with fleet(2, restart=True) as made:
            for turn in range(len(GROWING)):
                made.client.roster.replicas["0"].client.kill()
                await until(
                    lambda: len(made.engines) == 3 + turn and len(made.client.roster.living()) == 2  # noqa: B023
                )
            made.client.roster.replicas["1"].client.kill()
            await until(lambda: len(made.client.roster.living()) == 2)

    play(test())
    assert waits == [*GROWING, 0.5]


def test_an_engine_process_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()

    async def test() -> None:
        loop = asyncio.get_running_loop()
        client = ProcessClient(EngineConfig("nothing"), 10, restart=True)
        monkeypatch.setattr(client, "_launch", lambda: client._bury("it does not start"))

        def soon(delay: float, callback: Any) -> asyncio.Handle | None:
            waits.append(delay)
            return loop.call_soon(callback) if len(waits) < len(GROWING) else None

        monkeypatch.setattr(loop, "call_later", soon)
        client._bury("it has died")
        for _ in GROWING:
            await asyncio.sleep(0)
        assert client.restarting

    asyncio.run(test())
    assert waits == GROWING
