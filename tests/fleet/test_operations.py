"""Operations on all replicas when one fails: it is resynced, or no replica changes."""

import asyncio
from typing import get_args

import pytest

from nano_inference.errors import InvalidRequest
from nano_inference.remote.operations import OPERATIONS, FleetPolicy, Operation
from nano_inference.types import Memory, SamplingParams
from tests.fleet.fleets import Made, fleet, play
from tests.server.engines import until
from tests.server.scripted import Script

PARAMS = SamplingParams(max_tokens=20, seed=1)
GROUP = {"group": "g", "kind": "named", "host": "h", "port": 1, "seconds": 5.0}


async def all_serve(made: Made, count: int) -> None:
    await until(lambda: len(made.client.supervisor.living()) == count)


def test_replacement_engine_is_in_no_session() -> None:
    async def test() -> None:
        async with fleet(2, restart=True) as made:
            await made.client.call("begin_update", session=1, known=None)
            made.engines[0].die()
            await all_serve(made, 2)
            new = made.engines[2]
            refused = InvalidRequest("no weight update is open")
            new.fails |= {"receive_file": refused, "prepare_update": refused}
            await made.client.call("receive_file", session=1, size=1, content=b"", seconds=5.0)
            assert (
                await made.client.call(
                    "finish_update", session=1, version=4, kv_policy="keep", seconds=5.0
                )
                == 4
            )
            await all_serve(made, 2)
            assert [made.engines[1].version, new.version] == [4, 4]

    play(test())


def test_replacement_engine_is_in_no_group() -> None:
    async def test() -> None:
        async with fleet(2, restart=True) as made:
            await made.client.call("join_group", rank=1, world_size=3, **GROUP)
            made.engines[0].die()
            await all_serve(made, 2)
            made.engines[2].returns["has_group"] = False
            assert await made.client.call("has_group", group="g") is True
            await made.client.call("begin_update", session=1, known=None)
            await made.client.call(
                "receive_broadcast", session=1, group="g", tensors=[], seconds=5.0
            )
            assert [len(engine.said("receive_broadcast")) for engine in made.engines] == [0, 1, 0]
            await made.client.call("leave_group", group="g")
            assert not made.client._operations._groups

    play(test())


def test_replica_that_fails_to_resume_is_resynced() -> None:
    async def test() -> None:
        async with fleet() as made:
            await made.client.call("pause", mode="keep", seconds=1.0)
            made.engines[1].fails["resume"] = InvalidRequest(
                "32 calls are running; wait for one of them."
            )
            await made.client.call("resume")
            assert not made.client.supervisor.paused
            assert [made.engines[0].paused, made.engines[1].paused] == [False, True]
            assert list(made.client.supervisor.living()) == ["0"]
            made.engines[1].fails.clear()
            await all_serve(made, 2)
            assert not made.engines[1].paused

    play(test())


def test_resume_raises_if_every_replica_fails() -> None:
    async def test() -> None:
        async with fleet() as made:
            await made.client.call("pause", mode="keep", seconds=1.0)
            for engine in made.engines:
                engine.fails["resume"] = InvalidRequest("no")
            with pytest.raises(InvalidRequest):
                await made.client.call("resume")
            assert made.client.supervisor.paused
            assert len(made.client.supervisor.living()) == 2

    play(test())


def test_replica_stuck_after_an_update_is_resynced() -> None:
    async def test() -> None:
        async with fleet(script=Script(list(range(100, 130)), delay=0.01)) as made:
            stuck = made.engines[1]
            stuck.fails["resume"] = InvalidRequest("32 calls are running; wait for one of them.")
            await made.client.call("begin_update", session=1, known=None)
            await made.client.call(
                "finish_update", session=1, version=1, kv_policy="keep", seconds=5.0
            )
            assert list(made.client.supervisor.living()) == ["0"]
            stuck.fails.clear()
            await all_serve(made, 2)
            assert (stuck.version, stuck.paused) == (1, False)

    play(test())


def test_replica_that_joins_during_a_pending_pause_is_paused() -> None:
    async def test() -> None:
        async with fleet() as made:
            gate = asyncio.Event()
            for engine in made.engines:
                engine.holds["pause"] = gate
            pausing = asyncio.create_task(made.client.call("pause", mode="wait", timeout=5.0))
            await until(lambda: all(engine.said("pause") for engine in made.engines))
            await made.client.add()
            gate.set()
            await pausing
            assert made.client.supervisor.paused
            assert made.engines[2].paused

    play(test())


def test_stale_sleeping_replica_wakes_with_the_others() -> None:
    async def test() -> None:
        async with fleet() as made:
            behind = made.engines[1]
            behind.holds["get_weight_version"] = gate = asyncio.Event()
            made.client.supervisor.left_behind("1", "for the test")
            await asyncio.sleep(0.01)
            gate.set()
            await all_serve(made, 2)
            assert behind.said("wake")[0].arguments == {"memory": ["weights", "kv_cache"]}

    play(test())


@pytest.mark.parametrize("before", [(), ("kv_cache",)])
def test_sleep_rejected_by_one_replica_is_undone_on_all(before: tuple[Memory, ...]) -> None:
    async def test() -> None:
        async with fleet(3) as made:
            made.client.supervisor.asleep = before
            made.engines[1].fails["sleep"] = InvalidRequest("no memory to keep them in")
            with pytest.raises(InvalidRequest, match="no memory to keep"):
                await made.client.call("sleep", memory=["kv_cache", "weights"])
            woken = [part for part in ("kv_cache", "weights") if part not in before]
            for engine in made.engines:
                assert [call.arguments for call in engine.said("wake")] == [{"memory": woken}]
            assert made.client.supervisor.asleep == before

    play(test())


def test_wake_rejected_by_one_replica_is_undone_on_all() -> None:
    async def test() -> None:
        async with fleet(3) as made:
            made.client.supervisor.asleep = ("kv_cache", "weights")
            made.engines[2].fails["wake"] = InvalidRequest("the memory is taken")
            with pytest.raises(InvalidRequest, match="memory is taken"):
                await made.client.call("wake", memory=["weights"])
            for engine in made.engines:
                assert [call.arguments for call in engine.said("sleep")] == [
                    {"memory": ["kv_cache", "weights"]}
                ]
            assert made.client.supervisor.asleep == ("kv_cache", "weights")

    play(test())


def test_update_begins_on_all_or_on_none() -> None:
    async def test() -> None:
        async with fleet(2) as made:
            made.engines[0].fails["begin_update"] = InvalidRequest("the weights are asleep")
            with pytest.raises(InvalidRequest, match="asleep"):
                await made.client.call("begin_update", session=6, known=None)
            assert made.engines[1].said("cancel_update")[0].arguments["session"] == 6

    play(test())


def test_policy_table_matches_branches_and_methods() -> None:
    async def test() -> None:
        async with fleet() as made:
            operations = made.client._operations  # pyright: ignore
            assert set(operations._policies) == set(get_args(FleetPolicy))  # pyright: ignore
            for operation in OPERATIONS.values():
                assert (operation.fleet != "undone") or operation.undo in OPERATIONS
                assert (operation.fleet == "joined") == (operation.join is not None)

    play(test())


def test_undoable_new_row_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    undo = Operation("unmark", "", "first", {"name": str})
    mark = Operation("mark", "", "undone", {"name": str, "size": int}, undo="unmark")
    monkeypatch.setattr(
        "nano_inference.remote.operations.OPERATIONS",
        {**OPERATIONS, "mark": mark, "unmark": undo},
    )

    async def test() -> None:
        async with fleet(3) as made:
            for engine in made.engines:
                engine.returns |= {"mark": 7, "unmark": None}
            assert await made.client.call("mark", name="a", size=3) == 7
            made.engines[1].fails["mark"] = InvalidRequest("no room")
            with pytest.raises(InvalidRequest, match="no room"):
                await made.client.call("mark", name="b", size=3)
            undone = [engine.said("unmark") for engine in made.engines]
            assert [len(each) for each in undone] == [1, 0, 1]
            assert undone[0][0].arguments == {"name": "b"}

    play(test())
