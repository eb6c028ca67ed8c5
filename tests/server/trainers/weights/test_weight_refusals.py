"""Invalid or untimely tensors: a timely error, the old version stays live, and the next update
works.
"""

import asyncio
import time

import pytest

from nano_inference.remote.process_client import ProcessClient
from nano_inference.server.control.control import Control
from nano_inference.server.control.requests.field_types import TensorSpec
from nano_inference.server.errors import ApiError
from tests.server.engines import Run, params_of
from tests.server.trainers.group_trainer import new_weights
from tests.server.trainers.weight_runs import (
    NORM,
    UP,
    TrainerProcess,
    refused,
    requests_meanwhile,
    safetensors_of,
    specs,
    update,
)

WRONG: dict[str, tuple[list[TensorSpec], str]] = {
    "name": (
        [TensorSpec(UP, "float32", (96, 64)), TensorSpec("model.w", "float32", (3,))],
        "'model.w' is not a tensor",
    ),
    "shape": ([TensorSpec(UP, "float32", (64, 96))], r"has shape \[64, 96\], expected \(96, 64\)"),
    "huge": ([TensorSpec(UP, "float32", (2**40, 2**20))], "has shape"),
    "dtype": ([TensorSpec(UP, "int64", (96, 64))], "has dtype 'int64'"),
    "twice": ([TensorSpec(UP, "float32", (96, 64))] * 2, "occurs twice"),
    "none": ([], "the list of tensors is empty"),
}


@pytest.mark.thorough(but=["dtype", "twice"])
@pytest.mark.parametrize("case", WRONG)
def test_foreign_tensors_are_rejected(
    client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run, case: str
) -> None:
    tensors, told = WRONG[case]

    async def test() -> None:
        async with requests_meanwhile(client):
            await trainer.join(control)
            await control.updates.begin()
            trainer.say("send", group="group", seed=1)  # concurrently, like trainers
            async with refused(control, 400, told):
                await control.updates.receive_broadcast("group", tensors)
            assert (await trainer.answer()).startswith("failed"), (
                "it does not wait for somebody who has gone"
            )
            await trainer.leave()
        await update(control, trainer, 0)

    run(test())


@pytest.mark.parametrize("packed_bytes", [None, 10_000])
@pytest.mark.parametrize(("numbers", "told"), [(10, "sent less than"), (30_000, "sent more than")])
def test_trainer_whose_tensors_differ_from_its_announcement(
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
            await control.updates.begin()
            trainer.say(
                "send",
                group="group",
                names=[NORM, UP],
                numbers=numbers if packed_bytes is None else numbers // 2,
            )
            async with refused(control, 400, told):
                await control.updates.receive_broadcast(
                    "group", tensors, packed_bytes=packed_bytes, timeout=15.0
                )
            began = time.monotonic()
            await trainer.answer()
            assert time.monotonic() - began < 10.0, "it does not wait for somebody who has gone"
            await trainer.leave()
        assert client.num_restarts == 0, "gloo ends a process that gets more than it has room for"
        await update(control, trainer, 0)

    run(test())


def test_nan_is_accepted_on_request(
    client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    tensors = specs(new_weights(trainer.folder, 1), [UP, NORM])

    async def test() -> None:
        async with requests_meanwhile(client):
            await trainer.join(control)
            await control.updates.begin(check_finite=True)
            trainer.say("send", group="group", names=[UP, NORM], nan=True)
            async with refused(control, 400, "'model.norm.weight' holds NaN"):
                await control.updates.receive_broadcast("group", tensors)
            await trainer.answer()
            await trainer.leave()
            await control.updates.begin(complete=True)
            await control.updates.receive_file(safetensors_of(trainer.folder, [UP]))
            async with refused(control, 400, "is missing"):
                await control.updates.finish()
        await update(control, trainer, 0)

    run(test())


def test_update_while_the_weights_sleep(
    client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    async def test() -> None:
        await trainer.join(control)
        before = await control.checksums.get()
        await control.memory.sleep(["weights"])
        with pytest.raises(ApiError, match="asleep") as caught:
            await control.updates.begin()
        assert caught.value.status == 409
        with pytest.raises(ApiError, match="asleep") as caught:
            await control.checksums.get()
        assert caught.value.status == 409
        await control.memory.wake()
        await control.updates.begin()
        await control.updates.receive_file(safetensors_of(trainer.folder, [UP]))
        # bypasses the control, which would reject it
        await client.call("sleep", memory=["weights"])
        with pytest.raises(ApiError, match="asleep") as caught:
            await control.updates.finish()
        assert caught.value.status == 409
        await control.memory.wake()
        assert await control.checksums.get() == before
        await control.memory.sleep(["kv_cache"])
        await update(control, trainer, 1, join=False)
        await control.memory.wake()
        await update(control, trainer, 0, join=False)

    run(test())


def test_update_that_would_wait(
    client: ProcessClient, control: Control, trainer: TrainerProcess, run: Run
) -> None:
    async def test() -> None:
        before = int(await control.engine.serving_version())
        request = client.submit([1, 2], params_of(0, 2000), stream=True)
        await request.next()
        await control.pauses.pause("keep")
        await control.updates.begin()
        await control.updates.receive_file(safetensors_of(trainer.folder, None))
        async with refused(control, 409, "would wait for paused requests"):
            await control.updates.finish(kv_policy="wait")
        await control.pauses.resume()
        await control.updates.begin()
        await control.updates.receive_file(safetensors_of(trainer.folder, None))
        async with refused(control, 504, "was not applied within 0.01 s"):
            await control.updates.finish(kv_policy="wait", timeout=0.01)
        await control.updates.begin()
        await control.updates.receive_file(safetensors_of(trainer.folder, None))
        finishing = asyncio.create_task(control.updates.finish(kv_policy="wait"))
        await asyncio.sleep(0.1)
        await client.call("sleep", memory=["weights"])
        with pytest.raises(ApiError, match="asleep"):
            await asyncio.wait_for(finishing, 15.0)
        await control.memory.wake()
        request.close()
        version = await update(control, trainer, 1, kv_policy="wait")
        assert int(version) == before + 1, "versions that never served are free again"
        await update(control, trainer, 0, join=False)

    run(test())
