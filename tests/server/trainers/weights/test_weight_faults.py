"""Faults of weight updates by calls: a timely error, the old version stays live, and the next
update works.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.remote.process_client import ProcessClient
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.control import Control
from nano_inference.server.errors import ApiError
from tests.server.engines import Run, config_of, finished, params_of, until
from tests.server.trainers.group_trainer import new_weights
from tests.server.trainers.weight_runs import (
    UP,
    TrainerProcess,
    checksums,
    free_port,
    refused,
    requests_meanwhile,
    safetensors_of,
    specs,
    update,
)


@pytest.mark.thorough
def test_wrong_order_of_calls(
    client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    tensors = specs(new_weights(trainer.folder, 1))

    async def test() -> None:
        async with requests_meanwhile(client):
            async with refused(control, 409, "no weight update is open"):
                await control.updates.finish()
            async with refused(control, 409, "no weight update is open"):
                await control.updates.receive_file(b"\0" * 8 + b"{}")
            async with refused(control, 409, "group 'group' does not exist"):
                await control.updates.receive_broadcast("group", tensors)
            async with refused(control, 404, "group 'group' does not exist"):
                await control.groups.leave("group")
            async with refused(control, 409, "take a snapshot first"):
                await control.checksums.changed_tensors()
            assert not await control.updates.cancel("nothing is open")
            await trainer.join(control)
            # Without a session, the trainer's current tensors must not be taken for its next
            # update.
            trainer.say("send", group="group", seed=1)
            async with refused(control, 409, "no weight update is open"):
                await control.updates.receive_broadcast("group", tensors)
            assert (await trainer.answer()).startswith("failed")
            async with refused(control, 409, "group 'group' does not exist"):
                await control.updates.receive_broadcast("group", tensors)
            await trainer.leave()
            await control.updates.begin()
            async with refused(control, 409, "already open", still_open=True):
                await control.updates.begin()
            async with refused(control, 400, "non-empty state dict"):
                await control.updates.finish()
            await control.updates.begin()
            assert await control.updates.cancel("enough")
            async with refused(control, 409, "no weight update is open"):
                await control.updates.finish()
        await update(control, trainer, 1)
        await update(control, trainer, 0, join=False)

    run(test())


@pytest.mark.thorough
def test_second_trainer(
    client: ProcessClient,
    control: Control,
    run: Run,
    trainers: Callable[[], TrainerProcess],
    trainer: TrainerProcess,
) -> None:
    first, second = trainers(), trainer

    async def test() -> None:
        async with requests_meanwhile(client):
            await first.join(control)
            async with refused(control, 409, "its trainer is alive"):
                await control.groups.join("group", "127.0.0.1", free_port(), rank=1, world_size=2)
            await control.updates.begin()
            async with refused(control, 409, "a weight update is open", still_open=True):
                await control.groups.join("other", "127.0.0.1", free_port(), rank=1, world_size=2)
            first.say("send", group="group", seed=1, names=[UP])
            await control.updates.receive_broadcast(
                "group", specs(new_weights(first.folder, 1), [UP])
            )
            first.interrupt(signal.SIGKILL)
            await asyncio.to_thread(first.process.wait, 5)
            await second.join(control)  # under the dead trainer's name, whose update is discarded
            async with refused(control, 409, "the trainer of this weight update died"):
                await control.updates.finish()
        await update(control, second, 2, join=False)
        await update(control, second, 0, join=False)

    run(test())


@pytest.mark.thorough
@pytest.mark.parametrize("named", [False, True])
def test_group_that_never_forms(
    client: ProcessClient, control: Control, run: Run, trainer: TrainerProcess, named: bool
) -> None:
    async def test() -> None:
        options: dict[str, Any] = {"named": named, "timeout": 0.7}
        async with requests_meanwhile(client):
            async with refused(control, 504, "no trainer at tcp://127.0.0.1:.* within 0.7 s"):
                await control.groups.join(
                    "group", "127.0.0.1", free_port(), rank=1, world_size=2, **options
                )
            port = free_port()
            trainer.say("join", name="group", port=port, named=named, world_size=3, seconds=2.0)
            async with refused(control, 504, "within 0.7 s"):
                await control.groups.join(
                    "group", "127.0.0.1", port, rank=1, world_size=3, **options
                )
            assert (await trainer.answer()).startswith("failed")
            async with refused(control, 400, "rank=2 must be from 1 to"):
                await control.groups.join("group", "127.0.0.1", port, rank=2, world_size=2)
            async with refused(control, 400, "'gloo' or 'nccl'"):
                await control.groups.join(
                    "group", "127.0.0.1", port, rank=1, world_size=2, backend="mpi"
                )
            joining = asyncio.create_task(
                control.groups.join(
                    "group", "127.0.0.1", free_port(), rank=1, world_size=2, timeout=20.0
                )
            )
            await asyncio.sleep(0.3)
            # a trainer that has sent nothing yet
            with socket.create_server(("127.0.0.1", 0)) as listening:
                address = listening.getsockname()
                again = asyncio.create_task(
                    control.groups.join("group", *address, rank=1, world_size=2, timeout=5.0)
                )
                # its trainer never arrived
                with pytest.raises(ApiError, match="was left while it was being joined") as left:
                    await asyncio.wait_for(joining, 15)
                assert left.value.status == 409
                async with refused(control, 409, "group 'group' exists"):
                    await control.groups.join("group", "127.0.0.1", port, rank=1, world_size=2)
                await control.groups.leave("group")
            with pytest.raises(ApiError, match="was left while it was being joined"):
                await again
        await update(control, trainer, 1, name="other")
        await update(control, trainer, 0, name="other", join=False)

    run(test())


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["killed", "stopped", "silent"])
def test_trainer_that_fails_in_the_middle_of_a_bucket(
    client: ProcessClient,
    control: Control,
    run: Run,
    trainers: Callable[[], TrainerProcess],
    trainer: TrainerProcess,
    how: str,
) -> None:
    failing = trainers()
    tensors = specs(new_weights(failing.folder, 1))
    seconds = 20.0 if how == "killed" else 1.5
    told = "the other side is gone" if how == "killed" else "did not arrive within 1.5 s"

    async def test() -> None:
        async with requests_meanwhile(client):
            await failing.join(control)
            await control.updates.begin()
            if how != "silent":
                number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
                failing.say("send", group="group", seed=1, then_signal=[5, number])
            async with refused(control, 504, told):
                await control.updates.receive_broadcast("group", tensors, timeout=seconds)
            failing.interrupt(signal.SIGKILL)
        await update(control, trainer, 1)
        await update(control, trainer, 0, join=False)

    run(test())


@pytest.mark.thorough
def test_cancelled_call_ends_its_update(
    client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    tensors = specs(new_weights(trainer.folder, 1))

    async def test() -> None:
        async with requests_meanwhile(client):
            before = await control.checksums.get()
            await trainer.join(control)
            await control.updates.begin()
            trainer.say("send", group="group", seed=1, names=[each.name for each in tensors[:3]])
            receiving = asyncio.create_task(control.updates.receive_broadcast("group", tensors))
            await asyncio.sleep(0.3)
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            assert not control.updates.is_open
            assert await trainer.answer() == "done"
            began = time.monotonic()
            while await client.call("has_group", group="group"):  # no thread waits in it any longer
                assert time.monotonic() - began < 15.0
                await asyncio.sleep(0.02)
            await trainer.leave()
            assert await control.checksums.get() == before
        version = await update(control, trainer, 1)
        await control.pauses.pause("keep")
        await control.updates.begin()
        await control.updates.receive_file(safetensors_of(trainer.folder, None))
        finishing = asyncio.create_task(control.updates.finish())
        await asyncio.sleep(0)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        await control.pauses.resume()
        now = await control.engine.serving_version()  # complete or absent, never partial
        assert await control.checksums.get() == checksums(
            trainer.folder, 1 if now == version else 0
        )
        await update(control, trainer, 0, join=False)

    run(test())


@pytest.mark.thorough
def test_abandoned_session_ends(client: ProcessClient, trainer: TrainerProcess, run: Run) -> None:
    async def test() -> None:
        control = Control(client, ServerConfig(rl=True, rl_timeout=2.0))
        await control.updates.begin()
        await control.updates.receive_file(safetensors_of(trainer.folder, [UP]))
        assert control.updates.is_open
        await until(lambda: not control.updates.is_open)
        async with refused(control, 409, "no weight update is open"):
            await control.updates.finish()
        patient = Control(client, ServerConfig(rl=True))
        await update(patient, trainer, 0)
        await patient.groups.leave("group")

    run(test())


@pytest.mark.thorough
def test_new_engine_has_no_update_of_the_old_one(
    folder: Path, trainer: TrainerProcess, run: Run
) -> None:
    client = FleetClient(lambda _: ProcessClient(config_of(folder), 4096), 1, 4096, restart=True)

    async def test() -> None:
        await client.start()
        control = Control(client, ServerConfig(rl=True, rl_timeout=20.0))
        await update(control, trainer, 1, version="best")
        assert await control.engine.serving_version() == "best"
        await control.checksums.remember()
        await control.updates.begin(version="better")
        await control.updates.receive_file(safetensors_of(trainer.folder, [UP]))
        os.kill(client.info.pid, signal.SIGKILL)
        before = client.num_restarts
        await until(lambda: client.num_restarts > before and not client.restarting)
        assert not control.updates.is_open
        assert await control.engine.serving_version() == "0"
        async with refused(control, 409, "no weight update is open"):
            await control.updates.finish()
        async with refused(control, 409, "take a snapshot first"):
            await control.checksums.changed_tensors()
        await trainer.leave()
        assert await update(control, trainer, 1, version="7") == "7"
        await update(control, trainer, 0, join=False)
        assert await finished(client.submit([1, 2], params_of(0), stream=False))

    try:
        run(test())
    finally:
        run(client.close())
