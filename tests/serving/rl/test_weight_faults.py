"""Faults of weight updates by calls: each is an error in time, with the old version serving, and the next one works."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

from nano_inference.serving.config import ServerConfig
from nano_inference.serving.control import Control, TensorSpec
from nano_inference.serving.errors import ApiError
from nano_inference.serving.process_client import ProcessClient
from tests.models.tiny import tiny_llama
from tests.serving.engines import config_of, finished, params_of, until
from tests.serving.rl.group_trainer import new_weights
from tests.serving.rl.weight_runs import (
    TrainerProcess,
    checksums,
    free_port,
    refused,
    requests_meanwhile,
    specs,
    update,
)

Run = Callable[[Coroutine[Any, Any, Any]], Any]
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[ProcessClient, Run]]:
    """An engine in a process of its own, which a fault may take with it."""
    client = ProcessClient(config_of(folder), 4096, restart=True)
    with asyncio.Runner() as runner:
        runner.run(client.start())
        yield client, runner.run
        runner.run(client.close())


@pytest.fixture
def client(served: tuple[ProcessClient, Run]) -> ProcessClient:
    return served[0]


@pytest.fixture
def run(served: tuple[ProcessClient, Run]) -> Run:
    return lambda test: served[1](asyncio.wait_for(test, 60))


@pytest.fixture
def control(client: ProcessClient, run: Run) -> Iterator[Control]:
    control = Control(client, ServerConfig(rl=True, rl_timeout=20.0))
    yield control

    async def tidy() -> None:
        assert not control.session_open
        for group in ("group", "other"):
            with suppress(ApiError):  # there is none
                await control.leave_group(group)

    run(tidy())


@pytest.fixture
def trainers(folder: Path) -> Iterator[Callable[[], TrainerProcess]]:
    """Starts processes."""
    started: list[TrainerProcess] = []

    def start() -> TrainerProcess:
        started.append(TrainerProcess(folder))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def shared_trainer(folder: Path) -> Iterator[TrainerProcess]:
    """One that no test kills."""
    trainer = TrainerProcess(folder)
    yield trainer
    trainer.close()


@pytest.fixture
def trainer(shared_trainer: TrainerProcess, run: Run) -> Iterator[TrainerProcess]:
    yield shared_trainer
    shared_trainer.say("leave_all")
    assert run(shared_trainer.answer()) == "done"


def test_a_wrong_order_of_calls(client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run) -> None:
    tensors = specs(new_weights(trainer.folder, 1))

    async def test() -> None:
        async with requests_meanwhile(client):
            async with refused(control, 409, "no weight update is open"):
                await control.finish_update()
            async with refused(control, 409, "no weight update is open"):
                await control.receive_file(b"\0" * 8 + b"{}")
            async with refused(control, 409, "there is no group 'group'"):
                await control.receive_broadcast("group", tensors)
            async with refused(control, 404, "there is no group 'group'"):
                await control.leave_group("group")
            async with refused(control, 409, "take a snapshot first"):
                await control.changed_tensors()
            assert not await control.cancel_update("nothing is open")
            await trainer.join(control)
            # Without a session: what the trainer sends meanwhile must not be taken for what it sends next.
            trainer.say("send", group="group", seed=1)
            async with refused(control, 409, "no weight update is open"):
                await control.receive_broadcast("group", tensors)
            assert (await trainer.answer()).startswith("failed")
            async with refused(control, 409, "there is no group 'group'"):
                await control.receive_broadcast("group", tensors)
            await trainer.leave()
            await control.begin_update()
            async with refused(control, 409, "open already", still_open=True):
                await control.begin_update()
            async with refused(control, 400, "non-empty state dict"):
                await control.finish_update()
            await control.begin_update()
            assert await control.cancel_update("enough")
            async with refused(control, 409, "no weight update is open"):
                await control.finish_update()
        await update(control, trainer, 1)
        await update(control, trainer, 0, join=False)

    run(test())


def test_a_second_trainer(
    client: ProcessClient, control: Control, run: Run, trainers: Callable[[], TrainerProcess], trainer: TrainerProcess
) -> None:
    first, second = trainers(), trainer

    async def test() -> None:
        async with requests_meanwhile(client):
            await first.join(control)
            async with refused(control, 409, "its trainer lives"):
                await control.join_group("group", "127.0.0.1", free_port(), rank=1, world_size=2)
            await control.begin_update()
            async with refused(control, 409, "a weight update is open", still_open=True):
                await control.join_group("other", "127.0.0.1", free_port(), rank=1, world_size=2)
            first.say("send", group="group", seed=1, names=[UP])
            await control.receive_broadcast("group", specs(new_weights(first.folder, 1), [UP]))
            first.interrupt(signal.SIGKILL)
            await asyncio.to_thread(first.child.wait, 5)
            await second.join(control)  # under the name of the dead one, whose update is forgotten
            async with refused(control, 409, "the trainer of the weight update is gone"):
                await control.finish_update()
        await update(control, second, 2, join=False)
        await update(control, second, 0, join=False)

    run(test())


@pytest.mark.parametrize("named", [False, True])
def test_a_group_that_never_forms(
    client: ProcessClient, control: Control, run: Run, trainer: TrainerProcess, named: bool
) -> None:
    async def test() -> None:
        options: dict[str, Any] = {"named": named, "timeout": 0.7}
        async with requests_meanwhile(client):
            async with refused(control, 504, "no trainer at tcp://127.0.0.1:.* within 0.7 s", within=3.0):
                await control.join_group("group", "127.0.0.1", free_port(), rank=1, world_size=2, **options)
            port = free_port()
            trainer.say("join", name="group", port=port, named=named, world_size=3, seconds=2.0)
            async with refused(control, 504, "within 0.7 s", within=3.0):
                await control.join_group("group", "127.0.0.1", port, rank=1, world_size=3, **options)
            assert (await trainer.answer()).startswith("failed")
            async with refused(control, 400, "rank=2 must be from 1 to"):
                await control.join_group("group", "127.0.0.1", port, rank=2, world_size=2)
            async with refused(control, 400, "'gloo' or 'nccl'"):
                await control.join_group("group", "127.0.0.1", port, rank=1, world_size=2, backend="mpi")
            joining = asyncio.create_task(
                control.join_group("group", "127.0.0.1", free_port(), rank=1, world_size=2, timeout=20.0)
            )
            await asyncio.sleep(0.3)
            with socket.create_server(("127.0.0.1", 0)) as listening:  # a trainer that says nothing yet
                address = listening.getsockname()
                again = asyncio.create_task(control.join_group("group", *address, rank=1, world_size=2, timeout=2.0))
                with pytest.raises(ApiError, match="was left while it was joined") as left:  # its trainer never came
                    await asyncio.wait_for(joining, 5)
                assert left.value.status == 409
                async with refused(control, 409, "there is a group 'group'"):
                    await control.join_group("group", "127.0.0.1", port, rank=1, world_size=2)
                await control.leave_group("group")
            with pytest.raises(ApiError, match="was left while it was joined"):
                await again
        await update(control, trainer, 1, name="other")
        await update(control, trainer, 0, name="other", join=False)

    run(test())


@pytest.mark.parametrize("how", ["killed", "stopped", "silent"])
def test_a_trainer_that_fails_in_the_middle_of_a_bucket(
    client: ProcessClient,
    control: Control,
    run: Run,
    trainers: Callable[[], TrainerProcess],
    trainer: TrainerProcess,
    how: str,
) -> None:
    failing = trainers()
    tensors = specs(new_weights(failing.folder, 1))
    told = "the other side is gone" if how == "killed" else "did not travel within 1.5 s"

    async def test() -> None:
        async with requests_meanwhile(client):
            await failing.join(control)
            await control.begin_update()
            if how != "silent":
                number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
                failing.say("send", group="group", seed=1, then_signal=[5, number])
            async with refused(control, 504, told, within=4.0):
                await control.receive_broadcast("group", tensors, timeout=1.5)
            failing.interrupt(signal.SIGKILL)
        await update(control, trainer, 1)
        await update(control, trainer, 0, join=False)

    run(test())


WRONG: dict[str, tuple[list[TensorSpec], str]] = {
    "name": (
        [TensorSpec(UP, "float32", (96, 64)), TensorSpec("model.w", "float32", (3,))],
        "'model.w' is not a tensor",
    ),
    "shape": ([TensorSpec(UP, "float32", (64, 96))], r"has shape \[64, 96\], expected \(96, 64\)"),
    "huge": ([TensorSpec(UP, "float32", (2**40, 2**20))], "has shape"),
    "dtype": ([TensorSpec(UP, "int64", (96, 64))], "has dtype 'int64'"),
    "twice": ([TensorSpec(UP, "float32", (96, 64))] * 2, "came twice"),
    "none": ([], "no tensor is named"),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_are_not_the_models(
    client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run, case: str
) -> None:
    tensors, told = WRONG[case]

    async def test() -> None:
        async with requests_meanwhile(client):
            await trainer.join(control)
            await control.begin_update()
            trainer.say("send", group="group", seed=1)  # at the same time, as trainers do
            async with refused(control, 400, told):
                await control.receive_broadcast("group", tensors)
            assert (await trainer.answer()).startswith("failed"), "it does not wait for somebody who has gone"
            await trainer.leave()
        await update(control, trainer, 0)

    run(test())


@pytest.mark.parametrize("packed_bytes", [None, 10_000])
@pytest.mark.parametrize(("numbers", "told"), [(10, "sent less than"), (30_000, "sent more than")])
def test_a_trainer_that_sends_something_else_than_it_told(
    client: ProcessClient,
    control: Control,
    trainer: TrainerProcess,
    run: Run,
    numbers: int,
    told: str,
    packed_bytes: int | None,
) -> None:
    tensors = specs(new_weights(trainer.folder, 1), [NORM, UP])

    async def test() -> None:
        async with requests_meanwhile(client):
            await trainer.join(control)
            await control.begin_update()
            trainer.say(
                "send", group="group", names=[NORM, UP], numbers=numbers if packed_bytes is None else numbers // 2
            )
            async with refused(control, 400, told):
                await control.receive_broadcast("group", tensors, packed_bytes=packed_bytes, timeout=3.0)
            await trainer.answer()
            await trainer.leave()
        assert client.num_restarts == 0, "gloo ends a process that gets more than it has room for"
        await update(control, trainer, 0)

    run(test())


def test_nan_where_that_is_asked_for(
    client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    tensors = specs(new_weights(trainer.folder, 1), [UP, NORM])

    async def test() -> None:
        async with requests_meanwhile(client):
            await trainer.join(control)
            await control.begin_update(check_finite=True)
            trainer.say("send", group="group", names=[UP, NORM], nan=True)
            async with refused(control, 400, "'model.norm.weight' holds NaN"):
                await control.receive_broadcast("group", tensors)
            await trainer.answer()
            await trainer.leave()
            await control.begin_update(complete=True)
            await control.receive_file(safetensors_of(trainer.folder, [UP]))
            async with refused(control, 400, "is missing"):
                await control.finish_update()
        await update(control, trainer, 0)

    run(test())


def test_an_update_while_the_weights_sleep(
    client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    async def test() -> None:
        await trainer.join(control)
        before = await control.checksums()
        await control.sleep(["weights"])
        with pytest.raises(ApiError, match="asleep") as caught:
            await control.begin_update()
        assert caught.value.status == 409
        with pytest.raises(ApiError, match="asleep") as caught:
            await control.checksums()
        assert caught.value.status == 409
        await control.wake()
        await control.begin_update()
        await control.receive_file(safetensors_of(trainer.folder, [UP]))
        await client.call("sleep", memory=["weights"])  # behind the back of the control, which would refuse it
        with pytest.raises(ApiError, match="asleep") as caught:
            await control.finish_update()
        assert caught.value.status == 409
        await control.wake()
        assert await control.checksums() == before
        await control.sleep(["kv_cache"])
        await update(control, trainer, 1, join=False)
        await control.wake()
        await update(control, trainer, 0, join=False)

    run(test())


def test_a_call_that_is_given_up(client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run) -> None:
    tensors = specs(new_weights(trainer.folder, 1))

    async def test() -> None:
        async with requests_meanwhile(client):
            before = await control.checksums()
            await trainer.join(control)
            await control.begin_update()
            trainer.say("send", group="group", seed=1, names=[each.name for each in tensors[:3]])
            receiving = asyncio.create_task(control.receive_broadcast("group", tensors))
            await asyncio.sleep(0.3)
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            assert not control.session_open
            assert await trainer.answer() == "done"
            began = time.monotonic()
            while await client.call("has_group", group="group"):  # nobody goes on to wait in it
                assert time.monotonic() - began < 5.0
                await asyncio.sleep(0.02)
            await trainer.leave()
            assert await control.checksums() == before
        version = await update(control, trainer, 1)
        await control.pause("keep")
        await control.begin_update()
        await control.receive_file(safetensors_of(trainer.folder, None))
        finishing = asyncio.create_task(control.finish_update())
        await asyncio.sleep(0)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        await control.resume()
        now = await control.serving_version()  # it came in time, or not; never half of it
        assert await control.checksums() == checksums(trainer.folder, 1 if now == version else 0)
        await update(control, trainer, 0, join=False)

    run(test())


def test_an_update_that_would_wait(client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run) -> None:
    async def test() -> None:
        before = int(await control.serving_version())
        request = client.submit([1, 2], params_of(0, 450), stream=True)
        await request.next()
        await control.pause("keep")
        await control.begin_update()
        await control.receive_file(safetensors_of(trainer.folder, None))
        async with refused(control, 409, "would wait for requests that are paused"):
            await control.finish_update(kv_policy="wait")
        await control.resume()
        await control.begin_update()
        await control.receive_file(safetensors_of(trainer.folder, None))
        async with refused(control, 504, "was not applied within 0.01 s"):
            await control.finish_update(kv_policy="wait", timeout=0.01)
        request.close()
        version = await update(control, trainer, 1, kv_policy="wait")
        assert int(version) == before + 1, "versions that never served are free again"
        await update(control, trainer, 0, join=False)

    run(test())


def test_a_session_that_nobody_goes_on_with(client: ProcessClient, trainer: TrainerProcess, run: Run) -> None:
    async def test() -> None:
        control = Control(client, ServerConfig(rl=True, rl_timeout=0.5))
        await control.begin_update()
        await control.receive_file(safetensors_of(trainer.folder, [UP]))
        assert control.session_open
        await until(lambda: not control.session_open, 5.0)
        async with refused(control, 409, "no weight update is open"):
            await control.finish_update()
        patient = Control(client, ServerConfig(rl=True))
        await update(patient, trainer, 0)
        await patient.leave_group("group")

    run(test())


def test_a_new_engine_knows_nothing_of_the_old_ones_update(
    client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    async def test() -> None:
        await update(control, trainer, 1, version="best")
        assert await control.serving_version() == "best"
        await control.remember_checksums()
        await control.begin_update(version="better")
        await control.receive_file(safetensors_of(trainer.folder, [UP]))
        os.kill(client.info.pid, signal.SIGKILL)
        before = client.num_restarts
        await until(lambda: client.num_restarts > before and not client.restarting)
        assert not control.session_open
        assert await control.serving_version() == "0"
        async with refused(control, 409, "no weight update is open"):
            await control.finish_update()
        async with refused(control, 409, "take a snapshot first"):
            await control.changed_tensors()
        await trainer.leave()
        assert await update(control, trainer, 1, version="7") == "7"
        await update(control, trainer, 0, join=False)
        assert await finished(client.submit([1, 2], params_of(0), stream=False))

    run(test())


def safetensors_of(folder: Path, names: list[str] | None, seed: int = 0) -> bytes:
    weights = new_weights(folder, seed)
    return save({name: weights[name] for name in (weights if names is None else names)})
