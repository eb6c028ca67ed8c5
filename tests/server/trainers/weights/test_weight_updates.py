"""Successful weight updates by calls: over gloo in buckets of any kind, named, paused or not."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from nano_inference import InferenceEngine
from nano_inference.remote.client import EngineClient
from nano_inference.remote.in_process import InProcessClient
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.control import Control
from nano_inference.server.control.engine import VersionNames
from nano_inference.server.control.requests.field_types import TensorSpec
from nano_inference.server.errors import ApiError
from nano_inference.weights.transports import trainer_broadcasts
from nano_inference.weights.transports.wire import TensorInfo
from tests.depth import at_depth
from tests.server.engines import Run, config_of, finished, params_of
from tests.server.trainers.group_trainer import new_weights
from tests.server.trainers.weight_runs import (
    NORM,
    UP,
    TrainerProcess,
    checksums,
    refused,
    update,
)


@pytest.fixture(scope="module")
def client_kind() -> type[EngineClient]:
    return InProcessClient


@pytest.fixture(scope="module")
def control(served: tuple[InProcessClient, Run]) -> Control:
    return Control(served[0], ServerConfig(rl=True, rl_timeout=20.0))


@pytest.fixture(scope="module")
def trainer(
    folder: Path, served: tuple[InProcessClient, Run], control: Control
) -> Iterator[TrainerProcess]:
    """Yield a trainer in the default group, "group"."""
    trainer = TrainerProcess(folder)
    served[1](trainer.join(control, named=False))
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def other(folder: Path) -> Iterator[InferenceEngine]:
    """Build an engine that is updated without a transport."""
    with InferenceEngine(config_of(folder)) as engine:
        yield engine


@st.composite
def partitions(draw: st.DrawFn, num_tensors: int = 21) -> list[tuple[list[int], str, int | None]]:
    """Draw the tensors in some order, cut into buckets. Each bucket has a type and is packed or
    not.
    """
    order = draw(st.permutations(range(num_tensors)))
    cuts = sorted(draw(st.sets(st.integers(1, num_tensors - 1), max_size=5)))
    packings = st.none() | st.sampled_from([0, 100, 30_000, 2**30])
    kinds = st.tuples(st.sampled_from(["float32", "bfloat16", "float16"]), packings)
    return [
        (list(order[start:stop]), *draw(kinds))
        for start, stop in zip([0, *cuts], [*cuts, num_tensors], strict=True)
    ]


@pytest.mark.thorough
@given(buckets=partitions(), seed=st.integers(1, 1000))
@settings(
    max_examples=at_depth(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_buckets_of_any_split_match_a_local_update(
    control: Control,
    trainer: TrainerProcess,
    run: Run,
    other: InferenceEngine,
    buckets: list[tuple[list[int], str, int | None]],
    seed: int,
) -> None:
    same: dict[str, torch.Tensor] = {}

    async def test() -> None:
        await control.updates.begin(complete=True)
        for places, dtype, packed_bytes in buckets:
            weights = new_weights(trainer.folder, seed, dtype)
            names = [list(weights)[place] for place in places]
            tensors = [TensorSpec(name, dtype, tuple(weights[name].shape)) for name in names]
            trainer.say(
                "send",
                group="group",
                names=names,
                seed=seed,
                dtype=dtype,
                packed_bytes=packed_bytes,
            )
            await control.updates.receive_broadcast("group", tensors, packed_bytes=packed_bytes)
            assert await trainer.answer() == "done"
            same.update({name: weights[name] for name in names})
        await control.updates.finish()
        other.update_weights(same, blocking=True)
        assert await control.checksums.get() == other.weights_checksum()

    run(test())


@pytest.mark.thorough
def test_types_of_one_bucket_may_differ(
    control: Control, trainer: TrainerProcess, run: Run
) -> None:
    """Pack tensors of different types into one bucket."""
    names = [NORM, UP]

    async def test() -> None:
        weights = new_weights(trainer.folder, 5)
        told = [TensorSpec(NORM, "torch.bfloat16", (64,)), TensorSpec(UP, "float32", (96, 64))]
        await control.updates.begin()
        trainer.say(
            "send",
            group="group",
            names=names,
            seed=5,
            dtypes=["bfloat16", "float32"],
            packed_bytes=10**6,
        )
        await control.updates.receive_broadcast("group", told, packed_bytes=10**6)
        assert await trainer.answer() == "done"
        await control.updates.finish()
        now = await control.checksums.get()
        assert now[UP] == checksums(trainer.folder, 5)[UP]
        assert now[NORM] == checksums(trainer.folder, 5, "bfloat16")[NORM]
        assert weights[NORM].dtype == torch.float32

    run(test())


def test_packed_tensors_need_not_be_aligned() -> None:
    run = [
        TensorInfo("a", "bfloat16", (3,)),
        TensorInfo("b", "float32", (2, 1)),
        TensorInfo("c", "float64", (1,)),
    ]
    sent = {
        "a": torch.tensor([1.0, 2.0, 3.0]).bfloat16(),
        "b": torch.tensor([[4.0], [5.0]]),
        "c": torch.tensor([6.0]),
    }
    sent["c"] = sent["c"].double()
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in sent.values()])
    for name, tensor in trainer_broadcasts.unpacked(run, flat).items():
        assert torch.equal(tensor, sent[name])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 200))
def test_run_ends_with_the_tensor_that_makes_it_too_long(
    lengths: list[int], max_bytes: int
) -> None:
    pieces = [TensorInfo(str(place), "float32", (length,)) for place, length in enumerate(lengths)]
    runs = trainer_broadcasts.packed(pieces, max_bytes)
    assert [piece for run in runs for piece in run] == pieces
    sizes = [[4 * piece.shape[0] for piece in run] for run in runs]
    assert all(sum(run[:-1]) <= max_bytes for run in sizes)
    assert all(sum(run) > max_bytes for run in sizes[:-1])


@pytest.mark.thorough
def test_weight_sender_over_the_group(
    client: InProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    async def test() -> None:
        version = 10 + int(await client.call("get_weight_version"))
        trainer.say("stream", group="group", seed=3, version=version)
        await control.updates.begin()
        await control.updates.receive_stream("group")
        assert await control.updates.finish() == str(version)
        assert await trainer.answer() == "done"
        assert await control.checksums.get() == checksums(trainer.folder, 3)

    run(test())


@pytest.mark.thorough
def test_update_is_applied_during_a_pause(
    client: InProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    async def test() -> None:
        before = await update(control, trainer, 0, join=False)
        request = client.submit([1, 2], params_of(0, 300), stream=True)
        seen = await request.next()
        await control.pauses.pause("keep", kv_policy="recompute")
        version = await update(control, trainer, 1, join=False, version="while paused")
        assert (await control.pauses.is_paused(), version) == (True, "while paused")
        await control.pauses.resume()
        (sample,) = await finished(request, seen)
        names = [
            (control.engine.names.name(span.version), span.start) for span in sample.weight_versions
        ]
        assert [name for name, _ in names] == [before, "while paused"]
        assert 0 < names[1][1] < 300
        assert len(sample.kv_versions) == 2
        (_, _, computed_by) = sample.kv_versions[1]
        assert [control.engine.names.name(each.version) for each in computed_by] == [
            "while paused"
        ], "recomputed, as asked"

    run(test())


def test_names_of_versions(
    client: InProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    async def test() -> None:
        newest = int(await client.call("get_weight_version"))
        assert await update(control, trainer, 1, join=False, version="iter-3") == "iter-3"
        assert control.engine.names.name(newest + 1) == "iter-3"
        assert control.engine.names.number("iter-3") == newest + 1
        ahead = newest + 50
        assert await update(control, trainer, 2, join=False, version=str(ahead)) == str(ahead)
        assert await client.call("get_weight_version") == ahead
        # after all others
        assert await update(control, trainer, 3, join=False, version="7") == "7"
        assert (
            control.engine.names.number("7") == ahead + 1 == await client.call("get_weight_version")
        )
        assert control.engine.names.number("no such") is None
        await control.updates.name_version("eight")
        assert await control.engine.serving_version() == "eight"
        await control.updates.begin(version="nine")
        await control.updates.name_version("ten")
        assert await control.engine.serving_version() == "eight"
        await control.updates.receive_file(save({NORM: new_weights(trainer.folder, 0)[NORM]}))
        assert await control.updates.finish() == "ten"
        for bad in ("", "a" * 300, "a\nb"):
            with pytest.raises(ApiError, match="printable string"):
                await control.updates.name_version(bad)
        assert await control.engine.serving_version() == "ten"

    run(test())


def test_snapshots(control: Control, trainer: TrainerProcess, run: Run) -> None:
    async def test() -> None:
        await update(control, trainer, 0, join=False)
        await control.checksums.remember()
        assert await control.checksums.changed_tensors() == []
        baseline = await control.checksums.get()
        await control.updates.begin()
        await control.updates.receive_file(save({NORM: new_weights(trainer.folder, 9)[NORM]}))
        await control.updates.finish()
        assert await control.checksums.changed_tensors() == [NORM]
        assert await control.checksums.changed_tensors(baseline) == [NORM]
        assert await control.checksums.changed_tensors({}) == sorted(baseline)
        assert await control.checksums.changed_tensors(await control.checksums.get()) == []

    run(test())


@pytest.mark.thorough
def test_group_ends_promptly_even_if_the_error_is_still_held(
    control: Control, trainer: TrainerProcess, run: Run
) -> None:
    """Keep the error: its frames must not keep the sockets open until a collection."""

    async def test() -> None:
        await trainer.join(control, "short")
        await control.updates.begin()
        trainer.say("send", group="short", names=[NORM, UP], numbers=30_000)
        async with refused(control, 400, "sent more than"):
            await control.updates.receive_broadcast("short", [TensorSpec(NORM, "float32", (64,))])
        began = time.monotonic()
        assert (await trainer.answer()).startswith("failed")
        assert time.monotonic() - began < 15.0
        await trainer.leave("short")

    gc.collect()
    gc.disable()
    try:
        run(test())
    finally:
        gc.enable()


def test_describe_reports_the_kind_of_engine(control: Control, run: Run) -> None:
    told = run(control.engine.call("describe"))
    assert {name: told[name] for name in ("device", "dtype", "block_size", "num_tensors")} == {
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "num_tensors": 21,
    }


@given(
    st.lists(
        st.tuples(st.none() | st.text("0123456789ab", min_size=1, max_size=3), st.booleans()),
        max_size=12,
    )
)
def test_versions_rise_and_keep_their_names(
    asked: list[tuple[str | None, bool]],
) -> None:
    names, newest, serving = VersionNames(3), 3, dict[int, str]()
    for name, works in asked:
        before = names.newest
        version = names.choose(name)
        assert version > newest
        assert names.name(version) == (str(version) if name is None else name)
        if name is not None and name.isdigit() and int(name) > newest:
            assert version == int(name)
        if works:
            newest, serving[version] = version, names.name(version)
        else:
            names.give_back(version, before)
    assert all(names.name(version) == name for version, name in serving.items())
    assert names.newest == newest
