"""Calls of an update that are lost, reordered, concurrent or slightly late."""

import asyncio
import hashlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import save

from nano_inference import InferenceEngine
from nano_inference.errors import InvalidRequest, WeightUpdateError
from nano_inference.remote.client import EngineClient
from nano_inference.remote.engine_weights import EngineWeights
from nano_inference.remote.in_process import InProcessClient
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.control import Control
from nano_inference.server.errors import ApiError
from nano_inference.server.server import Server
from nano_inference.weights.transports import Deadline
from nano_inference.weights.transports.trainer_broadcasts import watch_trainer
from tests.server.engines import Run, config_of
from tests.server.scripted import sources
from tests.server.trainers.group_trainer import new_weights

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def client_kind() -> type[EngineClient]:
    return InProcessClient


@pytest.fixture(scope="module")
def part(folder: Path) -> bytes:
    """Send an update of one tensor as a file."""
    return save({NORM: new_weights(folder, 1)[NORM]})


@pytest.fixture
def control(client: InProcessClient) -> Control:
    return Control(client, ServerConfig(rl=True, rl_timeout=20.0))


async def update(control: Control, content: bytes) -> str:
    await control.updates.begin()
    await control.updates.receive_file(content)
    return await control.updates.finish()


def test_update_waits_for_none_and_takes_none_over(
    control: Control, run: Run, folder: Path
) -> None:
    """Begin twice before either runs: the first succeeds, the second fails immediately."""
    own, other = (save({NORM: new_weights(folder, seed)[NORM]}) for seed in (1, 2))

    async def test() -> None:
        await update(control, own)
        expected = await control.checksums.get()
        before = await update(control, other)

        async def send(content: bytes) -> str:
            async with control.updates.updating():
                await control.updates.receive_file(content)
                return await control.updates.finish()

        await control.updates._turn.acquire()
        both = [asyncio.create_task(send(content)) for content in (own, other)]
        await asyncio.sleep(0.05)
        control.updates._turn.release()
        first, second = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(second, ApiError)
        assert second.status == 409
        assert first == await control.engine.serving_version() != before
        assert await control.checksums.get() == expected

    run(test())


def test_update_can_be_cancelled_while_its_first_part_comes(
    client: InProcessClient,
    control: Control,
    run: Run,
    part: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = client.call

    async def cancelled(name: str, **arguments: Any) -> Any:
        answer = await call(name, **arguments)
        if name == "receive_file":
            assert await control.updates.cancel("the trainer has changed its mind.")
        return answer

    async def test() -> None:
        before = await control.engine.serving_version()

        async def send() -> str:
            async with control.updates.updating():
                await control.updates.receive_file(part)
                return await control.updates.finish()

        with monkeypatch.context() as patch:
            patch.setattr(client, "call", cancelled)
            with pytest.raises(ApiError):
                await send()
        assert not control.updates.is_open
        assert await control.engine.serving_version() == before
        assert await send() != before  # does not block the next update

    run(test())


def test_lost_cancellation_does_not_block_the_next_update(
    client: InProcessClient,
    control: Control,
    run: Run,
    part: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = client.call

    async def loses(name: str, **arguments: Any) -> Any:
        if name == "cancel_update":
            raise InvalidRequest("32 calls are running; wait for one of them.")
        return await call(name, **arguments)

    async def test() -> None:
        before = int(await control.engine.serving_version())
        monkeypatch.setattr(client, "call", loses)
        await control.updates.begin()
        await control.updates.receive_file(part)
        await control.updates.cancel("its trainer changed its mind")
        assert await update(control, part) == str(before + 1)

    run(test())


def test_concurrent_updates_start_only_once(control: Control, run: Run) -> None:
    async def test() -> None:
        begun = await asyncio.gather(
            *(control.updates.begin() for _ in range(5)), return_exceptions=True
        )
        refusals = [each for each in begun if isinstance(each, ApiError)]
        assert [each.status for each in refusals] == [409] * 4
        assert await control.updates.cancel("enough")

    run(test())


def test_update_that_is_applied_as_its_deadline_passes(folder: Path, part: bytes) -> None:
    with InferenceEngine(config_of(folder)) as engine:
        link = EngineWeights(engine)
        link.begin_update(1)
        link.receive_file(1, len(part), part, 5.0)
        assert link._session is not None
        update = link._session.update

        def wait(timeout: float | None = None) -> bool:
            was_done = update.done()
            engine.step()
            return was_done  # as if that step had arrived right after the wait

        cast(Any, update).wait = wait
        assert link.finish_update(1, 7, "keep", 1e-9) == 7 == engine.get_weight_version()
        link.begin_update(2)
        link.receive_file(2, len(part), part, 5.0)
        with pytest.raises(WeightUpdateError, match="was not applied within"):
            link.finish_update(2, 8, "keep", 1e-9)
        engine.step()
        assert engine.get_weight_version() == 7


def test_file_that_is_written_over_before_the_update_is_applied(
    folder: Path, tmp_path: Path
) -> None:
    first, second = ({NORM: new_weights(folder, seed)[NORM]} for seed in (1, 2))
    file = tmp_path / "model.safetensors"
    file.write_bytes(save(first))
    with InferenceEngine(config_of(folder)) as engine:
        link = EngineWeights(engine)
        link.begin_update(1)
        link.receive_folder(1, str(tmp_path), 5.0)
        with file.open("r+b") as same:
            same.write(save(second))
        with ThreadPoolExecutor(1) as pool:
            finishing = pool.submit(link.finish_update, 1, 1, "keep", 5.0)
            while not finishing.done():
                engine.step()
                time.sleep(0.01)
        served = engine.weights_checksum()[NORM]
    assert served == hashlib.sha256(first[NORM].numpy().data).hexdigest()


def test_invalid_version_name_is_rejected(control: Control, run: Run, part: bytes) -> None:
    async def test() -> None:
        await control.updates.begin()
        with pytest.raises(ApiError, match="printable") as caught:
            await control.updates.name_version("a\nb")
        assert caught.value.status == 400
        await control.updates.receive_file(part)
        assert (await control.updates.finish()).isdigit()

    run(test())


def test_trainer_is_notified_of_the_server_shutdown(client: InProcessClient, run: Run) -> None:
    async def test() -> None:
        server = Server(ServerConfig(rl=True, rl_timeout=5.0), sources(client))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            joining = asyncio.create_task(
                server.control.groups.join("g", "127.0.0.1", port, rank=1, world_size=2)
            )
            await asyncio.sleep(0.2)
            server.end_all()
            with pytest.raises(ApiError, match="shutting down") as caught:
                await asyncio.wait_for(joining, 15)
        assert caught.value.status == 503

    run(test())


class Restarted:
    """Client that is paused and then gets a new engine."""

    num_restarts = 0

    async def call(self, *_: Any, **__: Any) -> bool:
        return True


def test_new_engine_is_not_paused() -> None:
    client = Restarted()
    control = Control(cast(EngineClient, client), ServerConfig(rl=True))
    asyncio.run(control.pauses.pause("keep", kv_policy="recompute"))
    assert control.engine.known.pause_policy == "recompute"
    client.num_restarts += 1
    assert control.engine.known.pause_policy is None


def test_machine_that_is_cut_off_is_noticed() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        watch_trainer(("127.0.0.1", server.getsockname()[1]), Deadline(5.0)) as watch,
    ):
        assert watch.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert watch.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
