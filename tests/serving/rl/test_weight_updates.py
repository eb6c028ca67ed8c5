"""Weight updates by calls that work: over gloo in buckets of any kind, as files, under names, paused or not."""

import asyncio
import json
import pickle
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from nano_inference import InferenceEngine
from nano_inference.engine.transports import trainer_broadcasts
from nano_inference.engine.transports.files import write_folder
from nano_inference.engine.transports.sender import WeightSender
from nano_inference.engine.transports.wire import Piece
from nano_inference.serving import control as control_module
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.control import Control, TensorSpec
from nano_inference.serving.errors import ApiError
from nano_inference.serving.in_process import InProcessClient
from nano_inference.serving.versions import VersionNames
from tests.models.tiny import tiny_llama
from tests.serving.engines import config_of, finished, params_of
from tests.serving.rl.group_trainer import new_weights
from tests.serving.rl.weight_runs import TrainerProcess, checksums, refused, update

Run = Callable[[Coroutine[Any, Any, Any]], Any]
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[InProcessClient, Control, Run]]:
    threads = torch.get_num_threads()
    client = InProcessClient(config_of(folder), 4096)
    with asyncio.Runner() as runner:
        runner.run(client.start())
        yield client, Control(client, ServerConfig(rl=True, rl_timeout=20.0)), runner.run
        runner.run(client.close())
    torch.set_num_threads(threads)


@pytest.fixture
def client(served: tuple[InProcessClient, Control, Run]) -> InProcessClient:
    return served[0]


@pytest.fixture
def control(served: tuple[InProcessClient, Control, Run]) -> Control:
    return served[1]


@pytest.fixture
def run(served: tuple[InProcessClient, Control, Run]) -> Run:
    return lambda test: served[2](asyncio.wait_for(test, 60))


@pytest.fixture(scope="module")
def trainer(folder: Path, served: tuple[InProcessClient, Control, Run]) -> Iterator[TrainerProcess]:
    """In an ordinary group, "group"."""
    trainer = TrainerProcess(folder)
    served[2](trainer.join(served[1], named=False))
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def other(folder: Path) -> Iterator[InferenceEngine]:
    """An engine that is updated without any wire."""
    with InferenceEngine(config_of(folder)) as engine:
        yield engine


@st.composite
def partitions(draw: st.DrawFn, num_tensors: int = 21) -> list[tuple[list[int], str, int | None]]:
    """The tensors' places in some order, cut into buckets; each has a type, and is packed or not."""
    order = draw(st.permutations(range(num_tensors)))
    cuts = sorted(draw(st.sets(st.integers(1, num_tensors - 1), max_size=5)))
    packings = st.none() | st.sampled_from([0, 100, 30_000, 2**30])
    kinds = st.tuples(st.sampled_from(["float32", "bfloat16", "float16"]), packings)
    return [
        (list(order[start:stop]), *draw(kinds)) for start, stop in zip([0, *cuts], [*cuts, num_tensors], strict=True)
    ]


@given(buckets=partitions(), seed=st.integers(1, 1000))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_buckets_end_in_the_checksums_of_an_update_without_a_wire(
    control: Control,
    trainer: TrainerProcess,
    run: Run,
    other: InferenceEngine,
    buckets: list[tuple[list[int], str, int | None]],
    seed: int,
) -> None:
    same: dict[str, torch.Tensor] = {}

    async def test() -> None:
        await control.begin_update(complete=True)
        for places, dtype, packed_bytes in buckets:
            weights = new_weights(trainer.folder, seed, dtype)
            names = [list(weights)[place] for place in places]
            tensors = [TensorSpec(name, dtype, tuple(weights[name].shape)) for name in names]
            trainer.say("send", group="group", names=names, seed=seed, dtype=dtype, packed_bytes=packed_bytes)
            await control.receive_broadcast("group", tensors, packed_bytes=packed_bytes)
            assert await trainer.answer() == "done"
            same.update({name: weights[name] for name in names})
        await control.finish_update()
        other.update_weights(same, blocking=True)
        assert await control.checksums() == other.weights_checksum()

    run(test())


def test_types_of_one_bucket_may_differ(control: Control, trainer: TrainerProcess, run: Run) -> None:
    """Packed, one behind the other."""
    names = [NORM, UP]

    async def test() -> None:
        weights = new_weights(trainer.folder, 5)
        told = [TensorSpec(NORM, "torch.bfloat16", (64,)), TensorSpec(UP, "float32", (96, 64))]
        await control.begin_update()
        trainer.say("send", group="group", names=names, seed=5, dtypes=["bfloat16", "float32"], packed_bytes=10**6)
        await control.receive_broadcast("group", told, packed_bytes=10**6)
        assert await trainer.answer() == "done"
        await control.finish_update()
        now = await control.checksums()
        assert now[UP] == checksums(trainer.folder, 5)[UP]
        assert now[NORM] == checksums(trainer.folder, 5, "bfloat16")[NORM]
        assert weights[NORM].dtype == torch.float32

    run(test())


def test_packed_tensors_need_not_be_aligned() -> None:
    run = [Piece("a", torch.bfloat16, (3,)), Piece("b", torch.float32, (2, 1)), Piece("c", torch.float64, (1,))]
    sent = {"a": torch.tensor([1.0, 2.0, 3.0]).bfloat16(), "b": torch.tensor([[4.0], [5.0]]), "c": torch.tensor([6.0])}
    sent["c"] = sent["c"].double()
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in sent.values()])
    for name, tensor in trainer_broadcasts._unpacked(run, flat).items():
        assert torch.equal(tensor, sent[name])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 200))
def test_a_run_ends_with_the_tensor_that_makes_it_too_long(lengths: list[int], max_bytes: int) -> None:
    pieces = [Piece(str(place), torch.float32, (length,)) for place, length in enumerate(lengths)]
    runs = trainer_broadcasts.packed(pieces, max_bytes)
    assert [piece for run in runs for piece in run] == pieces
    sizes = [[4 * piece.shape[0] for piece in run] for run in runs]
    assert all(sum(run[:-1]) <= max_bytes for run in sizes)
    assert all(sum(run) > max_bytes for run in sizes[:-1])


@pytest.mark.parametrize("over", [False, True], ids=["own", "over"])
def test_a_weight_sender(
    client: InProcessClient, control: Control, trainer: TrainerProcess, run: Run, over: bool
) -> None:
    async def receive(group: str) -> str:
        await control.begin_update()
        await control.receive_stream(group)
        return await control.finish_update()

    async def test() -> None:
        version = 10 + int(await client.call("get_weight_version"))
        if over:
            trainer.say("stream", group="group", seed=3, version=version)
            assert await receive("group") == str(version)
            assert await trainer.answer() == "done"
        else:
            with WeightSender(timeout=20) as sender:
                port = int(sender.address.rsplit(":", 1)[1])
                await control.join_group("own", "127.0.0.1", port, rank=1, world_size=2, sender=True)
                for seed, number in ((2, version), (3, None)):
                    thread = threading.Thread(
                        target=sender.send, args=(new_weights(trainer.folder, seed),), kwargs={"version": number}
                    )
                    thread.start()
                    assert await receive("own") == str(version if number else version + 1)
                    await asyncio.to_thread(thread.join, 5)
                await control.begin_update()
                async with refused(control, 409, "its updates come as streams"):
                    await control.receive_broadcast("own", [TensorSpec(UP, "float32", (96, 64))])
                await control.leave_group("own")
        assert await control.checksums() == checksums(trainer.folder, 3)

    run(test())


def test_a_file_comes_in_parts(control: Control, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        for part, seed in ((7, 1), (1000, 2), (2**24, 3)):
            if part == 7:
                content = save({NORM: new_weights(folder, seed)[NORM]}, metadata={"format": "pt"})
            else:
                content = save(new_weights(folder, seed, "bfloat16"))
            monkeypatch.setattr(control_module, "PART", part)
            await control.begin_update(complete=part != 7)
            await control.receive_file(content)
            await control.finish_update()
            if part != 7:
                assert await control.checksums() == checksums(folder, seed, "bfloat16")

    run(test())


def header(told: Any, size: int) -> bytes:
    text = json.dumps(told).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def one(**changes: Any) -> dict[str, Any]:
    return {NORM: {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]} | changes}


FILES: dict[str, tuple[bytes, str]] = {
    "pickle": (pickle.dumps({"a": 1}), "a pickle, which is never read here; send the bytes of a safetensors file"),
    "zip": (b"PK\3\4" + bytes(100), "a zip archive, as torch.save makes it; send"),
    "empty": (b"", "not a safetensors file"),
    "text": (b'{"names": []}', "not a safetensors file"),
    "long header": ((2**62).to_bytes(8, "little") + b"{}" + bytes(9), "its header would have"),
    "cut header": (header(one(), 0)[:30], "end in the middle of a safetensors header"),
    "cut": (header(one(), 100), "tells of 256 bytes of tensors, and 100 came"),
    "more": (header(one(), 300), "tells of 256 bytes of tensors, and 300 came"),
    "no json": (header("x", 0).replace(b'"x"', b"{x}"), "header cannot be read"),
    "deep": (header({}, 0)[:0] + (4000).to_bytes(8, "little") + b'{"a":' + b"[" * 3995, "header cannot be read"),
    "offsets": (header(one(data_offsets=[8, 264]), 264), "bytes 8 to 264, not its size"),
    "negative": (header(one(data_offsets=[-256, 0]), 256), "bytes -256 to 0"),
    "words": (header(one(data_offsets=["a", "b"]), 256), "bytes 'a' to 'b'"),
    "dtype": (header(one(dtype="I64"), 256), "has dtype 'I64'"),
    "shape": (header(one(shape=[8, 8]), 256), "has shape"),
    "name": (header({"x": one()[NORM]}, 256), "'x' is not a tensor of this model"),
    "nothing": (header({}, 0), "tells of 0 bytes"),
}


@pytest.mark.parametrize("case", FILES)
def test_bytes_that_are_no_such_file(control: Control, run: Run, case: str) -> None:
    content, told = FILES[case]

    async def test() -> None:
        await control.begin_update()
        async with refused(control, 400, told):
            await control.receive_file(content)

    run(test())


def test_folders_and_files_on_disk(
    client: InProcessClient, control: Control, folder: Path, run: Run, tmp_path: Path
) -> None:
    async def take(path: Path) -> str:
        await control.begin_update()
        await control.receive_folder(str(path))
        return await control.finish_update()

    async def test() -> None:
        newest = int(await client.call("get_weight_version"))
        plain, marked = tmp_path / "plain", tmp_path / "marked"
        plain.mkdir()
        weights = new_weights(folder, 4)
        save_file({name: weights[name] for name in list(weights)[:9]}, plain / "a.safetensors")
        save_file({name: weights[name] for name in list(weights)[9:]}, plain / "b.safetensors")
        assert await take(plain) == str(newest + 1)
        assert await control.checksums() == checksums(folder, 4)
        write_folder(marked, new_weights(folder, 6), version=newest + 7, max_file_bytes=100_000)
        assert await take(marked) == str(newest + 7)
        assert await control.checksums() == checksums(folder, 6)
        save_file(weights, plain / "c.safetensors")
        assert await take(plain / "c.safetensors") == str(newest + 8)
        (marked / "weights-00002.safetensors").write_bytes(b"x")
        (tmp_path / "empty").mkdir()
        torch.save(weights, tmp_path / "model.bin")
        for path, told in (
            (tmp_path / "nowhere", "no such file or folder on the engine's machine"),
            (tmp_path / "empty", "the folder has no .safetensors file"),
            (tmp_path / "model.bin", "model.bin cannot be read as safetensors"),
            (marked, "weights-00002.safetensors has 1 bytes"),
            (plain, "came twice"),
        ):
            await control.begin_update()
            async with refused(control, 400, told):
                await control.receive_folder(str(path))

    run(test())


def test_an_update_is_applied_during_a_pause(
    client: InProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    async def test() -> None:
        before = await update(control, trainer, 0, join=False)
        request = client.submit([1, 2], params_of(0, 300), stream=True)
        seen = await request.next()
        await control.pause("keep", kv_policy="recompute")
        version = await update(control, trainer, 1, join=False, version="while paused")
        assert (await control.is_paused(), version) == (True, "while paused")
        await control.resume()
        (sample,) = await finished(request, seen)
        names = [(control.version_name(span.version), span.start) for span in sample.weight_versions]
        assert [name for name, _ in names] == [before, "while paused"]
        assert 0 < names[1][1] < 300
        assert len(sample.kv_versions) == 2
        (_, _, computed_by) = sample.kv_versions[1]
        assert [control.version_name(each.version) for each in computed_by] == ["while paused"], "recomputed, as asked"

    run(test())


def test_names_of_versions(client: InProcessClient, control: Control, trainer: TrainerProcess, run: Run) -> None:
    async def test() -> None:
        newest = int(await client.call("get_weight_version"))
        assert await update(control, trainer, 1, join=False, version="iter-3") == "iter-3"
        assert control.version_name(newest + 1) == "iter-3"
        assert control.version_number("iter-3") == newest + 1
        ahead = newest + 50
        assert await update(control, trainer, 2, join=False, version=str(ahead)) == str(ahead)
        assert await client.call("get_weight_version") == ahead
        assert await update(control, trainer, 3, join=False, version="7") == "7"  # behind all that there were
        assert control.version_number("7") == ahead + 1 == await client.call("get_weight_version")
        assert control.version_number("no such") is None
        await control.name_version("eight")
        assert await control.serving_version() == "eight"
        await control.begin_update(version="nine")
        await control.name_version("ten")
        assert await control.serving_version() == "eight"
        await control.receive_file(save({NORM: new_weights(trainer.folder, 0)[NORM]}))
        assert await control.finish_update() == "ten"
        for bad in ("", "a" * 300, "a\nb"):
            with pytest.raises(ApiError, match="printable string"):
                await control.name_version(bad)
        assert await control.serving_version() == "ten"

    run(test())


def test_snapshots(control: Control, trainer: TrainerProcess, run: Run) -> None:
    async def test() -> None:
        await update(control, trainer, 0, join=False)
        await control.remember_checksums()
        assert await control.changed_tensors() == []
        baseline = await control.checksums()
        await control.begin_update()
        await control.receive_file(save({NORM: new_weights(trainer.folder, 9)[NORM]}))
        await control.finish_update()
        assert await control.changed_tensors() == [NORM]
        assert await control.changed_tensors(baseline) == [NORM]
        assert await control.changed_tensors({}) == sorted(baseline)
        assert await control.changed_tensors(await control.checksums()) == []

    run(test())


def test_what_kind_of_engine_it_is(control: Control, run: Run) -> None:
    told = run(control.info())
    assert {name: told[name] for name in ("device", "dtype", "block_size", "num_tensors")} == {
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "num_tensors": 21,
    }


@given(st.lists(st.tuples(st.none() | st.text("0123456789ab", min_size=1, max_size=3), st.booleans()), max_size=12))
def test_versions_rise_and_are_called_what_they_were_called(asked: list[tuple[str | None, bool]]) -> None:
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
