"""A fleet of scripted engines: requests of a lost replica continue on another one unchanged."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from nano_inference.errors import EngineDead, InvalidRequest, NanoInferenceError, WeightUpdateError
from nano_inference.fleet.errors import (
    Draining,
    ReplicaConflict,
    ReplicaNotFound,
    WeightsChanged,
)
from nano_inference.remote.client import RequestStream
from nano_inference.remote.errors import EngineRestarting
from nano_inference.remote.messages import Generate
from nano_inference.types import Delta, SamplingParams, TrainingSample
from tests.fleet.fleets import Engine, Made, fleet, plain, play, told
from tests.server import scripted
from tests.server.engines import finished, until
from tests.server.scripted import Script, logprob

PARAMS = SamplingParams(max_tokens=20, seed=1)


async def whole(made: Made, params: SamplingParams = PARAMS, **options: object) -> list[Delta]:
    return await all_of(made.client.submit([1, 2], params, stream=True, **options))  # type: ignore[arg-type]


async def all_of(stream: RequestStream, deltas: list[Delta] | None = None) -> list[Delta]:
    deltas = [] if deltas is None else deltas
    while stream.samples_left:
        deltas += await stream.next()
    return deltas


def at(made: Made, stream_number: int = 0) -> Engine:
    """Return the engine that runs the request of a stream."""
    request = list(made.client.requests.values())[stream_number]
    assert isinstance(request.client, Engine)
    return request.client


@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        replace(PARAMS, stop=("nothing like it",)),
        replace(PARAMS, top_logprobs=2, raw_logprobs=True),
        replace(PARAMS, top_k=5, sampling_mask=True),
    ],
    ids=["plain", "text", "logprobs", "repeated"],
)
def test_stream_continues_at_its_position(params: SamplingParams) -> None:
    async def test() -> None:
        async with fleet() as made:
            quiet = await whole(made, params)
            stream = made.client.submit([1, 2], params, stream=True)
            deltas = await stream.next()
            while len(told(deltas)[0]) < 7:
                deltas += await stream.next()
            first = at(made)
            first.die()
            deltas = await all_of(stream, deltas)
            assert told(deltas) == told(quiet)
            assert [each for delta in deltas for each in delta.logprobs] == [
                logprob(i) for i in range(20)
            ]
            last, expected = deltas[-1].finished, quiet[-1].finished
            assert last is not None
            assert expected is not None
            assert plain(last) == plain(expected)
            other = next(engine for engine in made.engines if engine is not first)
            if params.sampling_mask:
                assert not other.resumed
            else:
                assert 7 <= len(other.resumed[0].samples[0].completion_tokens) < 20
            report = made.client.replica_report()
            moves = report.moves
            assert (report.deaths, moves.moved, sum(moves.counts)) == (1, 1, 1)
            assert made.client.num_samples == 0
            assert not made.client.requests

    play(test())


def test_request_that_cannot_continue_is_repeated() -> None:
    async def test() -> None:
        async with fleet() as made:
            for engine in made.engines:
                engine.refuses = True
            quiet = await whole(made)
            stream = made.client.submit([1, 2], PARAMS, stream=True)
            deltas = await stream.next()
            at(made).die()
            assert told(await all_of(stream, deltas)) == told(quiet)

    play(test())


def test_repetition_that_differs_ends_with_an_error() -> None:
    async def test() -> None:
        async with fleet() as made:
            stream = made.client.submit(
                [1, 2], replace(PARAMS, top_k=2, sampling_mask=True), stream=True
            )
            deltas = await stream.next()
            first = at(made)
            for engine in made.engines:
                engine.script = Script([7] * 20)
            first.die()
            with pytest.raises(WeightsChanged, match="weights have changed"):
                await all_of(stream, deltas)
            assert not made.client.requests

    play(test())


def test_repeated_text_is_skipped_with_its_tokens() -> None:
    """Repeat the text in other portions: one delta holds the last old token and the first new
    one.
    """

    async def test() -> None:
        async with fleet(
            script=Script("One two three four five six seven eight nine ten.", delay=0.001)
        ) as made:
            params = replace(PARAMS, top_k=5, sampling_mask=True, stop=("nothing like it",))
            quiet = await whole(made, params)
            assert len(told(quiet)[1]) > 20
            stream = made.client.submit([1, 2], params, stream=True)
            deltas = await stream.next()
            while len(told(deltas)[0]) < 4:
                deltas += await stream.next()
            for engine in made.engines:
                assert isinstance(engine.script, Script)
                engine.script = replace(engine.script, portion=3)
            at(made).die()
            assert told(await all_of(stream, deltas)) == told(quiet)

    play(test())


@pytest.mark.parametrize("is_masked", [False, True], ids=["resumed", "repeated"])
def test_moved_sample_with_other_logprobs_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, is_masked: bool
) -> None:
    """Repeat the same tokens under different weights."""

    async def test() -> None:
        async with fleet() as made:
            stream = made.client.submit(
                [1, 2], replace(PARAMS, top_k=2, sampling_mask=is_masked), stream=True
            )
            deltas = await stream.next()
            monkeypatch.setattr(scripted, "logprob", lambda place: logprob(place) - 1e-7)
            at(made).die()
            with pytest.raises(WeightsChanged, match="weights have changed"):
                await all_of(stream, deltas)
            assert not made.client.requests

    play(test())


def test_unstreamed_repetition_may_differ() -> None:
    """Resume an unstreamed request after a weight update: the second engine draws a whole new
    sample.
    """

    async def test() -> None:
        async with fleet(script=Script(list(range(100, 130)), delay=0.02)) as made:
            stream = made.client.submit(
                [1, 2], replace(PARAMS, top_k=2, sampling_mask=True), stream=False
            )
            await asyncio.sleep(0)
            engine = at(made)
            request = engine.requests[0]
            assert isinstance(request, Generate)
            told_of = Delta(request.request_id, 0, (100,), (logprob(0),), None, weight_version=0)
            engine.tell(request.request_id, [told_of])
            for each in made.engines:
                each.script = Script([7] * 20, ends=False)
            engine.die()
            (sample,) = await finished(stream)
            assert sample.completion_tokens == (7,) * 20

    play(test())


def test_group_continues_together_without_its_ended_samples() -> None:
    async def test() -> None:
        async with fleet() as made:
            for engine in made.engines:
                engine.script = lambda _, index: Script(
                    list(range(100, 140)), ends=False, portion=2, delay=0.002 * (index + 1)
                )
            stream = made.client.submit([1, 2], PARAMS, 3, stream=True)
            deltas = await stream.next()
            while not any(delta.finished for delta in deltas):
                deltas += await stream.next()
            first = at(made)
            for engine in made.engines:
                engine.script = Script(list(range(100, 140)), ends=False)
            first.die()
            samples = await finished(stream, deltas)
            other = next(engine for engine in made.engines if engine is not first)
            assert [each.sample_index for each in other.resumed[0].samples] == [1, 2]
            assert [sample.sample_index for sample in samples] == [0, 1, 2]
            assert {sample.completion_tokens for sample in samples} == {tuple(range(100, 120))}

    play(test())


def test_unstreamed_request_continues_from_reported_tokens() -> None:
    async def test() -> None:
        async with fleet(script=Script(list(range(100, 130)), delay=0.02)) as made:
            stream = made.client.submit([1, 2], PARAMS, 2, stream=False)
            await asyncio.sleep(0)
            engine = at(made)
            request = engine.requests[0]
            assert isinstance(request, Generate)
            assert request.tell
            for index, ids in ((0, (100, 101)), (1, (100,))):
                logprobs = tuple(map(logprob, range(len(ids))))
                engine.tell(
                    request.request_id,
                    [Delta(request.request_id, index, ids, logprobs, None, weight_version=0)],
                )
            engine.die()
            other = next(each for each in made.engines if each is not engine)
            assert [each.completion_tokens for each in other.resumed[0].samples] == [
                (100, 101),
                (100,),
            ]
            samples = await finished(stream)
            assert [len(sample.completion_tokens) for sample in samples] == [20, 20]

    play(test())


def test_request_without_tokens_restarts_unchanged() -> None:
    async def test() -> None:
        async with fleet() as made:
            for engine in made.engines:
                engine.go.clear()
            stream = made.client.submit([1, 2], PARAMS, stream=True, exact_version=0)
            first = at(made)
            first.die()
            other = at(made)
            assert other.requests[-1] == msgspec.structs.replace(
                first.requests[-1], request_id=other.requests[-1].request_id
            )
            other.go.set()
            assert len(told(await all_of(stream))[0]) == 20

    play(test())


def test_fleet_chooses_seeds_and_reports_the_requested_ones() -> None:
    async def test() -> None:
        async with fleet(seed=3) as made:
            asked = SamplingParams(max_tokens=4)
            last = (await whole(made, asked))[-1].finished
            assert isinstance(last, TrainingSample)
            sent = [each for engine in made.engines for each in engine.requests][-1]
            assert sent.params.seed == last.seed is not None
            assert last.sampling_params == asked

    play(test())


def test_fleet_is_dead_if_all_replicas_are() -> None:
    async def test() -> None:
        async with fleet() as made:
            streams = [made.client.submit([each], PARAMS, stream=True) for each in range(4)]
            made.engines[0].die("one")
            assert made.client.why_dead is None
            made.engines[1].die("two")
            for stream in streams:
                with pytest.raises(EngineDead, match="two"):
                    await all_of(stream)
            with pytest.raises(EngineDead):
                made.client.submit([1], PARAMS, stream=True)
            assert made.client.num_samples == 0

    play(test())


@pytest.mark.parametrize(
    "about",
    [{"numerics": "other"}, {"model_path": "other"}, {"vocab_size": 7}, {"eos_token_ids": (5,)}],
)
def test_fleet_rejects_unlike_engines(about: dict[str, object]) -> None:
    """Reject them at start, as an added replica and as a replacement: they could not resume
    requests.
    """
    (name,) = about
    differ = f"the replicas differ in {name}"

    async def test() -> None:
        async with fleet(2, restart=True) as made:
            made.on_made = lambda engine: engine.about.update(about)
            with pytest.raises(NanoInferenceError, match=differ):
                await made.client.add()
            made.engines[0].die()
            await until(lambda: differ in made.client.supervisor.statuses()[0].why)
            assert list(made.client.supervisor.living()) == ["1"]
            assert made.client.router.replicas == ("1",)
        other = Made(2, Script())
        other.on_made = lambda engine: engine.about.update(about if engine.number else {})
        with pytest.raises(NanoInferenceError, match=differ):
            await other.client.start()
        assert all(engine.is_closed for engine in other.engines)

    play(test())


def test_dead_replica_is_replaced_at_the_live_version() -> None:
    async def test() -> None:
        async with fleet(restart=True) as made:
            made.client.supervisor.paused = True
            made.client.supervisor.version = 0
            await made.client.call("begin_update", session=1, known=None)
            await made.client.call(
                "finish_update", session=1, version=5, kv_policy="keep", seconds=5.0
            )
            assert [engine.version for engine in made.engines] == [5, 5]
            made.engines[0].die()
            await until(lambda: len(made.client.supervisor.living()) == 2)
            new = made.engines[2]
            assert (new.version, new.paused) == (5, True)
            assert [call.name for call in made.engines[1].calls][-1] == "save_weights"
            order = [call.name for call in new.calls]
            assert (
                order.index("receive_folder") < order.index("finish_update") < order.index("pause")
            )
            statuses = made.client.supervisor.statuses()
            assert [(each.name, each.state, each.num_starts) for each in statuses] == [
                ("0", "serving", 2),
                ("1", "serving", 1),
            ]
            assert made.client.num_restarts == 0  # to the trainer it is the same engine

    play(test())


def test_replacement_of_the_last_replica_is_a_new_engine() -> None:
    async def test() -> None:
        async with fleet(restart=True) as made:
            await made.client.call("begin_update", session=1, known=None)
            await made.client.call(
                "finish_update", session=1, version=5, kv_policy="keep", seconds=5.0
            )
            for engine in made.engines[:2]:
                engine.die()
            with pytest.raises(EngineRestarting, match="the engine is restarting"):
                made.client.submit([1], PARAMS, stream=True)
            await until(lambda: len(made.client.supervisor.living()) == 2)
            assert (made.client.num_restarts, made.client.supervisor.version) == (1, 0)
            assert len(told(await whole(made))[0]) == 20

    play(test())


@pytest.mark.thorough
def test_hung_replica_is_killed_and_its_requests_continue() -> None:
    async def test() -> None:
        async with fleet(stall_timeout=1.0) as made:
            made.engines[0].go.clear()
            streams = [made.client.submit([each], PARAMS, stream=True) for each in range(4)]
            assert [len(told(await all_of(stream))[0]) for stream in streams] == [20] * 4
            assert made.client.failover.longest >= 1.0
            assert [status.state for status in made.client.supervisor.statuses()] == [
                "dead",
                "serving",
            ]

    play(test())


def test_draining_moving_removing_and_adding_change_no_token() -> None:
    async def test() -> None:
        async with fleet(script=Script(list(range(100, 130)), delay=0.01)) as made:
            quiet = told(await whole(made))
            streams = [made.client.submit([1, 2], PARAMS, stream=True) for _ in range(6)]
            await asyncio.sleep(0.05)
            assert made.client.drain("0") == 3
            assert {
                made.client.submit([9], PARAMS, stream=True) and at(made, -1) for _ in range(3)
            } == {made.engines[1]}
            assert made.client.drain("0", move=True) == 0
            assert made.client.drain("0", draining=False) == 0
            name = await made.client.add()
            assert name == "2"
            assert await made.client.remove("1") > 0
            for stream in streams:
                assert told(await all_of(stream)) == quiet
            assert [status.name for status in made.client.supervisor.statuses()] == ["0", "2"]
            for bad in (lambda: made.client.drain("7"), lambda: made.client.drain("1")):
                with pytest.raises(ReplicaNotFound):
                    bad()
            await made.client.remove("2")
            with pytest.raises(ReplicaConflict, match="last replica"):
                await made.client.remove("0")
            made.client.drain("0")
            with pytest.raises(Draining, match="no replica accepts requests"):
                made.client.submit([1], PARAMS, stream=True)

    play(test())


def test_requests_are_aborted_and_closed_on_any_replica() -> None:
    async def test() -> None:
        async with fleet(script=Script(list(range(100, 130)), delay=0.02)) as made:
            named = [
                made.client.submit([each], PARAMS, stream=True, name=f"n{each}")
                for each in range(4)
            ]
            closed = made.client.submit([1], PARAMS, stream=True)
            await asyncio.sleep(0.05)
            closed.close()
            assert await made.client.abort(["n0", "n3"]) == 2
            reasons = [(await all_of(stream))[-1].finished for stream in named]
            assert [each and each.finish_reason for each in reasons] == [
                "abort",
                "length",
                "length",
                "abort",
            ]
            assert made.client.num_samples == 0
            assert all(made.client.router.score(name) == 0 for name in ("0", "1"))

    play(test())


def test_fleet_reports_the_engines_rejection() -> None:
    async def test() -> None:
        async with fleet(script=Script(refuse=InvalidRequest("too odd"))) as made:
            with pytest.raises(InvalidRequest, match="too odd"):
                await whole(made)
            assert not made.client.requests
            assert made.client.router.score("0") == made.client.router.score("1") == 0

    play(test())


# -- one control plane -----------------------------------------------------------------------------


def test_update_is_checked_by_all_replicas_before_it_starts() -> None:
    async def test() -> None:
        async with fleet() as made:
            made.engines[1].fails["prepare_update"] = WeightUpdateError("a tensor is missing")
            await made.client.call("begin_update", session=1, known=None)
            with pytest.raises(WeightUpdateError, match="missing"):
                await made.client.call(
                    "finish_update", session=1, version=1, kv_policy="keep", seconds=5.0
                )
            assert [engine.version for engine in made.engines] == [0, 0]
            assert not any(
                engine.said("finish_update") or engine.said("pause") for engine in made.engines
            )

    play(test())


def test_replicas_pause_and_resume_together_for_an_update() -> None:
    async def test() -> None:
        async with fleet() as made:
            seen: list[list[bool]] = []
            for engine in made.engines:
                engine.fails["finish_update"] = lambda: seen.append(
                    [each.paused for each in made.engines]
                )
            await made.client.call("begin_update", session=1, known=None)
            assert (
                await made.client.call(
                    "finish_update", session=1, version=1, kv_policy="keep", seconds=5.0
                )
                == 1
            )
            assert seen == [[True, True]] * 2
            assert [(engine.version, engine.paused) for engine in made.engines] == [(1, False)] * 2
            made.client.supervisor.paused = True  # it stays paused
            await made.client.call("begin_update", session=2, known=None)
            await made.client.call(
                "finish_update", session=2, version=2, kv_policy="keep", seconds=5.0
            )
            assert len(made.engines[0].said("resume")) == 1

    play(test())


def test_replica_that_cannot_commit_is_resynced_before_serving() -> None:
    async def test() -> None:
        async with fleet(script=Script(list(range(100, 130)), delay=0.01)) as made:
            streams = [made.client.submit([each], PARAMS, stream=True) for each in range(4)]
            await asyncio.sleep(0.03)
            await made.client.call("begin_update", session=1, known=None)
            failing = made.engines[1]

            failing.fails["finish_update"] = WeightUpdateError("it is too late")
            await made.client.call(
                "finish_update", session=1, version=3, kv_policy="keep", seconds=5.0
            )
            assert list(made.client.supervisor.living()) == ["0"]
            failing.fails.clear()
            await until(lambda: len(made.client.supervisor.living()) == 2)
            assert failing.version == 3
            assert [len(told(await all_of(stream))[0]) for stream in streams] == [20] * 4

    play(test())


def test_replica_that_dies_in_an_update_does_not_stop_others() -> None:
    async def test() -> None:
        for name in ("begin_update", "receive_broadcast", "prepare_update", "finish_update"):
            async with fleet(3) as made:
                made.engines[1].fails[name] = made.engines[1].die
                await made.client.call("begin_update", session=1, known=None)
                await made.client.call(
                    "receive_broadcast", session=1, group="g", tensors=[], seconds=5.0
                )
                await made.client.call(
                    "finish_update", session=1, version=1, kv_policy="keep", seconds=5.0
                )
                assert [engine.version for engine in (made.engines[0], made.engines[2])] == [1, 1]
                assert list(made.client.supervisor.living()) == ["0", "2"]

    play(test())


def test_update_failure_on_one_replica_is_cancelled_on_all() -> None:
    async def test() -> None:
        for name in ("begin_update", "receive_broadcast"):
            async with fleet(3) as made:
                made.engines[2].fails[name] = WeightUpdateError("it has no room")
                if name != "begin_update":
                    await made.client.call("begin_update", session=1, known=None)
                arguments = (
                    {"tensors": [], "group": "g", "seconds": 5.0} if name != "begin_update" else {}
                )
                with pytest.raises(WeightUpdateError, match="no room"):
                    await made.client.call(name, session=1, **arguments)
                assert all(engine.said("cancel_update") for engine in made.engines[:2])

    play(test())


def test_replicas_join_a_group_with_rising_ranks_or_not_at_all() -> None:
    async def test() -> None:
        async with fleet(3) as made:
            group = {"group": "g", "named": True, "host": "h", "port": 1, "seconds": 5.0}
            await made.client.call("join_group", rank=2, world_size=5, **group)
            assert [engine.said("join_group")[0].arguments["rank"] for engine in made.engines] == [
                2,
                3,
                4,
            ]
            with pytest.raises(InvalidRequest, match="at least 4"):
                await made.client.call("join_group", rank=1, world_size=2, **group)
            made.engines[0].fails["join_group"] = WeightUpdateError("nobody is there")
            with pytest.raises(WeightUpdateError):
                await made.client.call("join_group", rank=1, world_size=4, **group)
            assert [len(engine.said("leave_group")) for engine in made.engines] == [0, 1, 1]
            assert made.client.num_engines == 3

    play(test())


def test_replica_outside_the_trainers_group_is_resynced() -> None:
    async def test() -> None:
        async with fleet() as made:
            group = {"group": "g", "named": True, "host": "h", "port": 1, "seconds": 5.0}
            await made.client.call("join_group", rank=1, world_size=3, **group)
            await made.client.add()
            new = made.engines[2]
            new.returns["has_group"] = False
            assert await made.client.call("has_group", group="g") is True
            await made.client.call("begin_update", session=1, known=None)
            await made.client.call(
                "receive_broadcast", session=1, group="g", tensors=[], seconds=5.0
            )
            await made.client.call(
                "finish_update", session=1, version=4, kv_policy="keep", seconds=5.0
            )
            assert not new.said("receive_broadcast")
            assert list(made.client.supervisor.living()) == ["0", "1"]
            await until(lambda: len(made.client.supervisor.living()) == 3)
            assert (new.version, new.paused) == (4, False)
            assert new.said("receive_folder")

    play(test())


def test_replicas_whose_weights_differ_are_an_error() -> None:
    async def test() -> None:
        async with fleet() as made:
            made.engines[0].returns["weights_checksum"] = {"a": "1", "b": "2"}
            made.engines[1].returns["weights_checksum"] = {"a": "1", "b": "2"}
            assert await made.client.call("weights_checksum") == {"a": "1", "b": "2"}
            made.engines[1].returns["weights_checksum"] = {"a": "1", "b": "3"}
            with pytest.raises(
                NanoInferenceError, match="replicas 0 and 1 have different weights: 1 tensor"
            ):
                await made.client.call("weights_checksum")
            made.engines[1].version = 1
            with pytest.raises(NanoInferenceError, match="do not agree"):
                await made.client.call("get_weight_version")

    play(test())


def test_pause_is_all_or_nothing() -> None:
    async def test() -> None:
        async with fleet() as made:
            assert await made.client.call("pause", mode="keep", seconds=1.0) is True
            assert made.client.supervisor.paused
            await made.client.call("resume")
            made.engines[1].fails["pause"] = InvalidRequest("no")
            with pytest.raises(InvalidRequest):
                await made.client.call("pause", mode="keep", seconds=1.0)
            assert [engine.paused for engine in made.engines] == [False, False]
            assert not made.client.supervisor.paused
            with pytest.raises(InvalidRequest, match="cannot run on a fleet"):
                await made.client.call("save_weights", path="p", version=0)
            with pytest.raises(InvalidRequest, match="not an engine operation"):
                await made.client.call("shutdown")

    play(test())
