"""Replicas that die at the worst moment: as the last one, during start, or during an abort."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from nano_inference.errors import EngineDead, NanoInferenceError, WeightUpdateError
from nano_inference.fleet.errors import ReplicaConflict
from nano_inference.remote.errors import EngineRestarting
from nano_inference.server.http.admission import Readiness
from nano_inference.types import EngineStats, SamplingParams, SpeculationStats
from tests.fleet.fleets import Engine, Made, fleet, play, told
from tests.server.engines import finished, until
from tests.server.engines import stats_with as stats
from tests.server.scripted import Script

PARAMS = SamplingParams(max_tokens=20, seed=1)
SLOW = Script(list(range(100, 130)), delay=0.01)


async def update(made: Made, version: int, session: int = 1) -> None:
    await made.client.call("begin_update", session=session, known=None)
    await made.client.call(
        "finish_update", session=session, version=version, kv_policy="keep", seconds=5.0
    )


def held(name: str) -> tuple[asyncio.Event, Callable[[Engine], None]]:
    """Return an event and a function that makes an engine wait for it in the named call."""
    event = asyncio.Event()
    return event, lambda engine: engine.holds.update({name: event})


@pytest.mark.thorough(but=["get_weight_version"])
@pytest.mark.parametrize("name", ["get_weight_version", "resume", "finish_update"])
def test_last_replica_dies_while_a_new_one_is_resynced(name: str) -> None:
    async def test() -> None:
        async with fleet(2, restart=True) as made:
            await update(made, 5)
            event, made.on_made = held(name)
            made.engines[0].die()
            await until(lambda: len(made.engines) > 2 and made.engines[2].said(name))
            made.engines[1].die()
            assert made.client.why_dead is not None
            made.on_made = lambda _: None
            event.set()
            await until(lambda: made.client.why_dead is None)
            await until(lambda: len(made.client.supervisor.living()) == 2)
            new = made.engines[2]
            assert (
                made.client.supervisor.version
                == new.version
                == await made.client.call("get_weight_version")
            )
            assert not new.paused
            assert len(told([delta async for delta in deltas(made)])[0]) == 20

    play(test())


async def deltas(made: Made):
    stream = made.client.submit([1, 2], PARAMS, stream=True)
    while stream.samples_left:
        for delta in await stream.next():
            yield delta


def test_stale_replica_becomes_primary_if_all_others_die() -> None:
    async def test() -> None:
        async with fleet(2, restart=True) as made:
            await update(made, 3)
            behind = made.engines[1]
            behind.fails["finish_update"] = WeightUpdateError("it is too late")
            behind.holds["get_weight_version"] = gate = asyncio.Event()
            await update(made, 4, session=2)
            assert made.client.supervisor.statuses()[1].state == "syncing"
            assert behind.paused
            made.engines[0].die()
            gate.set()
            await until(lambda: made.client.why_dead is None)
            assert (made.client.supervisor.version, behind.version, behind.paused) == (3, 3, False)
            await until(lambda: len(made.client.supervisor.living()) == 2)
            assert made.engines[2].version == 3

    play(test())


def test_fleet_is_dead_if_the_last_replacement_cannot_be_built() -> None:
    async def test() -> None:
        async with fleet(1) as made:
            gate = asyncio.Event()

            def fails(engine: Engine) -> None:
                engine.is_built = gate

                async def start() -> None:
                    await gate.wait()
                    raise NanoInferenceError("there is no memory")

                engine.start = start

            made.on_made = fails
            adding = asyncio.create_task(made.client.add())
            await asyncio.sleep(0)
            made.engines[0].die("by itself")
            lifecycle = Readiness(made.client, is_ready=True)
            assert made.client.restarting
            assert not lifecycle.is_lost
            gate.set()
            with pytest.raises(NanoInferenceError, match="no memory"):
                await adding
            assert not made.client.restarting
            assert lifecycle.is_lost
            with pytest.raises(EngineDead, match="by itself"):
                made.client.submit([1], PARAMS, stream=True)

    play(test())


@pytest.mark.thorough
def test_replica_that_dies_while_queued_is_replaced_once() -> None:
    async def test() -> None:
        async with fleet(2, restart=True) as made:
            supervisor = made.client.supervisor
            async with supervisor.lock:  # an update holds the lock too
                made.engines[0].die()
                await until(lambda: supervisor.replicas["0"].state == "syncing")
                made.engines[2].die()
                await until(
                    lambda: len(made.engines) == 4 and supervisor.replicas["0"].state == "syncing"
                )
            await until(lambda: len(supervisor.living()) == 2)
            await asyncio.sleep(0.05)
            assert len(made.engines) == 4
            assert [each.state for each in made.client.supervisor.statuses()] == [
                "serving",
                "serving",
            ]

    play(test())


def test_replica_removed_during_its_start_serves_no_request() -> None:
    async def test() -> None:
        async with fleet(1) as made:
            supervisor = made.client.supervisor
            async with supervisor.lock:
                adding = asyncio.create_task(made.client.add())
                await until(
                    lambda: (
                        "1" in supervisor.replicas and supervisor.replicas["1"].state == "syncing"
                    )
                )
                await made.client.remove("1")
            with pytest.raises(ReplicaConflict, match="'1' was removed before it served"):
                await adding
            assert made.client.router.replicas == ("0",)
            assert [each.name for each in made.client.supervisor.statuses()] == ["0"]

    play(test())


@pytest.mark.thorough
def test_replacement_waits_until_the_weights_wake() -> None:
    async def test() -> None:
        async with fleet(2, restart=True) as made:
            for engine in made.engines:
                engine.returns |= {"sleep": None, "wake": None, "sleeping": ["weights"]}
            await made.client.call("sleep", memory=["weights"])
            made.engines[0].die()
            await asyncio.sleep(1.2)
            assert len(made.engines) == 2  # another process uses its memory now
            for engine in made.engines:
                engine.returns["sleeping"] = []
            await made.client.call("wake", memory=["weights"])
            await until(lambda: len(made.client.supervisor.living()) == 2)

    play(test())


@pytest.mark.thorough
def test_server_shutdown_does_not_wait_for_a_replica_build() -> None:
    async def test() -> None:
        async with fleet(1, restart=True) as made:
            made.on_made = lambda engine: engine.is_built.clear()
            adding = asyncio.create_task(made.client.add())
            await asyncio.sleep(0)
            made.client.end_calls(EngineDead("the server is shutting down."))
            with pytest.raises(EngineDead, match="stopping"):
                await asyncio.wait_for(adding, 5)
            await asyncio.sleep(0.8)
            assert len(made.engines) == 2  # and no other engine starts

    play(test())


@pytest.mark.parametrize("is_repeated", [False, True])
def test_request_to_be_ended_ends_after_a_move(is_repeated: bool) -> None:
    async def test() -> None:
        async with fleet(2, SLOW) as made:
            params = replace(PARAMS, top_k=5, sampling_mask=is_repeated)
            stream = made.client.submit([1, 2], params, stream=True, name="mine")
            seen = await stream.next()
            await asyncio.sleep(0.05)
            first = next(iter(made.client.requests.values())).client
            assert isinstance(first, Engine)
            first.go.clear()  # the engine stops answering
            made.client.end_soon([next(iter(made.client.requests))])
            first.die()
            (sample,) = await finished(stream, seen)
            assert sample.finish_reason == "abort"
            assert len(sample.completion_tokens) < 20

    play(test())


def test_counters_never_fall_and_gauges_cover_live_replicas() -> None:
    async def test() -> None:
        async with fleet(3, restart=True) as made:
            for engine in made.engines:
                engine.stats = stats(
                    completion_tokens=100, num_steps=10, num_blocks=50, num_running=2
                )
            made.engines[0].die()
            await until(lambda: len(made.client.supervisor.living()) == 3)
            made.engines[3].stats = stats(
                completion_tokens=7, num_steps=1, num_blocks=50, num_running=1
            )
            made.client.replicas_changed()
            found = made.client.stats
            assert found is not None
            assert (
                found.completion_tokens,
                found.num_steps,
                found.num_blocks,
                found.num_running,
            ) == (307, 31, 150, 5)
            await made.client.remove("1")
            # a stale replica still counts
            made.client.supervisor.replicas["2"].state = "syncing"
            made.client.replicas_changed()
            found = made.client.stats
            assert found is not None
            assert (found.completion_tokens, found.num_blocks) == (307, 100)

    play(test())


@pytest.mark.thorough
def test_draft_counters_cover_dead_engines() -> None:
    def drafts(*drafted: int, accepted: tuple[int, ...], source: str = "suffix") -> EngineStats:
        return stats(
            speculation=SpeculationStats(
                (source, "mine"), {source: drafted}, {source: accepted}, (1, 2), (0.5, 0.7)
            )
        )

    async def test() -> None:
        async with fleet(2, restart=True) as made:
            made.engines[0].stats = drafts(9, 4, accepted=(8, 1))
            made.engines[1].stats = drafts(3, accepted=(2,))
            for number in (0, 2):
                made.engines[number].die()
                await until(lambda count=number + 2: len(made.client.supervisor.living()) == 2)
                made.engines[-1].stats = drafts(5, accepted=(4,), source="history")
            await until(lambda: len(made.engines) == 4)
            made.client.replicas_changed()
            assert made.client.stats is not None
            found = made.client.stats.speculation
            assert found is not None
            assert found.drafted == {"suffix": (12, 4), "history": (10,)}
            assert found.accepted == {"suffix": (10, 1), "history": (8,)}
            assert (found.num_drafted, found.num_accepted) == (26, 19)
            assert found.sources == ("history", "mine", "suffix")
            assert (found.step_rows, found.step_seconds) == ((1, 2), (0.5, 0.7))

    play(test())


@pytest.mark.thorough
def test_lockstep_engines_restart_together_after_the_last_death() -> None:
    async def test() -> None:
        async with fleet(3, restart=True, in_lockstep=True) as made:
            made.engines[1].die("it was killed")
            made.engines[0].die("it lost the others")
            await asyncio.sleep(0.7)
            assert len(made.engines) == 3, "one still lives"
            made.on_made = lambda engine: engine.is_built.clear()
            made.engines[2].die("it lost the others, too")
            with pytest.raises(EngineRestarting, match="the engine is restarting"):
                made.client.submit([1], PARAMS, stream=True)
            await until(lambda: len(made.engines) == 6)
            made.on_made = lambda _: None
            made.engines[3].is_built.set()
            made.engines[5].fail_to_start = NanoInferenceError("no memory")
            made.engines[5].is_built.set()
            await until(lambda: made.client.supervisor.statuses()[0].why == "no memory")
            assert made.client.why_dead is not None
            await until(lambda: len(made.engines) == 9)
            assert [each.is_closed for each in made.engines[3:6]] == [True] * 3
            await until(lambda: made.client.why_dead is None)
            assert len(made.client.supervisor.living()) == 3
            assert [each.num_starts for each in made.client.supervisor.statuses()] == [3, 3, 3]
            assert made.client.num_restarts == 1
            assert told([delta async for delta in deltas(made)])[0] == list(range(100, 120))

    play(test())


@pytest.mark.thorough
def test_late_failed_start_does_not_affect_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Close a client before its start raises; the failure arrives late."""

    async def test() -> None:
        async with fleet(2, restart=True, in_lockstep=True) as made:
            is_closed = asyncio.Event()

            async def start() -> None:
                await is_closed.wait()
                raise NanoInferenceError("no memory")

            made.on_made = lambda engine: monkeypatch.setattr(engine, "start", start)
            for engine in made.engines[:2]:
                engine.die()
            await until(lambda: len(made.engines) == 4)
            made.on_made = lambda engine: engine.is_built.clear()
            for engine in made.engines[2:4]:
                engine.die()
            await until(lambda: len(made.engines) == 6)
            is_closed.set()
            await asyncio.sleep(0.1)
            assert [each.state for each in made.client.supervisor.statuses()] == [
                "starting",
                "starting",
            ]
            for engine in made.engines[4:]:
                engine.is_built.set()
            await until(lambda: made.client.why_dead is None)
            assert [each.num_starts for each in made.client.supervisor.statuses()] == [3, 3]

    play(test())
