"""Restarts of dead engines wait longer each time until an engine lasts."""

import pytest

from nano_inference.fleet.replica import Backoff, Replica
from nano_inference.fleet.supervisor import Supervisor
from nano_inference.remote.time_limits import LASTING
from tests.fleet.fleets import fleet, play
from tests.server.engines import until

GROWING = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_backoff_doubles_to_its_maximum_and_resets() -> None:
    backoff = Backoff()
    for wait in GROWING:
        backoff.ready(100.0)
        assert backoff.died(100.0 + LASTING) == wait
    backoff.ready(100.0)
    assert backoff.died(100.1 + LASTING) == 0.5
    assert [backoff.died(1000.0), backoff.died(1000.0)] == [0.5, 1.0]  # these were never ready
    assert [backoff.died(0.0) for _ in range(3000)][-1] == 30.0


def test_replica_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    start_again = Supervisor._start_again

    async def noted(self: Supervisor, each: Replica, delay: float) -> None:
        waits.append(delay)
        await start_again(self, each, 0.0)

    monkeypatch.setattr(Supervisor, "_start_again", noted)

    async def test() -> None:
        async with fleet(2, restart=True) as made:
            supervisor = made.client.supervisor
            for turn in range(len(GROWING)):
                supervisor.replicas["0"].client.kill()
                await until(
                    lambda: len(made.engines) == 3 + turn and len(supervisor.living()) == 2  # noqa: B023
                )
            supervisor.replicas["1"].client.kill()
            await until(lambda: len(supervisor.living()) == 2)

    play(test())
    assert waits == [*GROWING, 0.5]
