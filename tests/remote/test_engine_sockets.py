"""The engine's sockets: strangers, unsupported messages and the cost of two idle processes."""

import asyncio
import gc
import json
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from nano_inference.errors import InvalidRequest
from nano_inference.remote.process_client import ProcessClient
from nano_inference.types import SamplingParams
from tests.remote.test_process import play, running
from tests.server.engines import child_of, config_of, finished, idle, params_of


@pytest.fixture(scope="module")
def quiet(model: Path) -> Iterator[tuple[ProcessClient, asyncio.Runner]]:
    """Yield one shared engine for tests that change nothing."""
    with asyncio.Runner() as runner:
        client = ProcessClient(config_of(model), 4096)
        runner.run(client.start())
        yield client, runner
        runner.run(client.close())


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (str(self._path), "w")


@pytest.mark.thorough
def test_strange_bytes_change_nothing(
    quiet: tuple[ProcessClient, asyncio.Runner], tmp_path: Path
) -> None:
    client, runner = quiet

    async def test() -> None:
        rng = random.Random(0)
        bomb = pickle.dumps(_Bomb(tmp_path / "bomb"))
        strange = [
            b"",
            b"\xc1",
            bomb,
            b"\x91" * 5000,
            rng.randbytes(1 << 20),
            b"\xdf\xff\xff\xff\xff",
        ]
        strange += [rng.randbytes(rng.randrange(1, 100)) for _ in range(200)]
        folder = child_of(client).folder
        context, robbers = zmq.Context(), []
        for name in ("engine", "api"):
            stranger = context.socket(zmq.PUSH)
            stranger.connect(f"ipc://{folder}/{name}")
            for data in strange:
                stranger.send(data)
            stranger.send_multipart([b"\x80", bomb, b"{}"])
            stranger.close(linger=2000)
            robber = context.socket(zmq.PULL)  # receives no messages
            robber.connect(f"ipc://{folder}/{name}")
            robbers.append(robber)
        for seed in range(5):
            assert len(await finished(client.submit([1, 2], params_of(seed), 2, stream=True))) == 2
        await idle(client)
        for robber in robbers:
            robber.close(linger=0)
        context.term()
        assert list(tmp_path.iterdir()) == []

    runner.run(asyncio.wait_for(test(), 60))


@pytest.mark.thorough
def test_lines_of_the_engine_are_like_the_servers_and_few(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with running(config_of(model), log_format="json") as client:
            context = zmq.Context()
            stranger = context.socket(zmq.PUSH)
            stranger.connect(f"ipc://{child_of(client).folder}/engine")
            for _ in range(50):
                stranger.send(b"\xc1\n")
            stranger.close(linger=2000)
            await finished(client.submit([1, 2], params_of(0), stream=True))
            await client.call("stats")
            context.term()

    play(test())
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["process"] for line in lines] == ["engine"] * len(lines)
    assert sum("cannot decode a message" in line["message"] for line in lines) == 1


@pytest.mark.thorough
def test_sockets_are_two_in_a_private_folder(
    quiet: tuple[ProcessClient, asyncio.Runner],
) -> None:
    client, runner = quiet

    async def test() -> None:
        child = child_of(client)
        assert child.folder.stat().st_mode & 0o777 == 0o700
        assert child.folder.stat().st_uid == os.getuid()
        # Servers of other tests may listen in this process.
        listening = psutil.Process(child.pid).net_connections("inet")
        assert not [each for each in listening if each.status == psutil.CONN_LISTEN]
        assert sorted(path.name for path in child.folder.iterdir()) == ["api", "engine"]

    runner.run(asyncio.wait_for(test(), 60))


@pytest.mark.thorough
def test_message_that_cannot_be_encoded_is_rejected(
    quiet: tuple[ProcessClient, asyncio.Runner],
) -> None:
    client, runner = quiet

    async def test() -> None:
        with pytest.raises(InvalidRequest):
            client.submit([1], SamplingParams(cache_salt="\ud800"), stream=True)
        assert client.num_samples == 0
        with pytest.raises(InvalidRequest):
            await client.call("pause", mode=object())

    runner.run(asyncio.wait_for(test(), 60))


@pytest.mark.thorough
def test_idle_processes_take_no_time(quiet: tuple[ProcessClient, asyncio.Runner]) -> None:
    client, runner = quiet

    async def test() -> None:
        await finished(client.submit([1, 2], params_of(0), stream=True))
        await asyncio.sleep(0.2)
        gc.collect()  # avoid a collection during the measurement
        processes = [psutil.Process(), psutil.Process(child_of(client).pid)]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        await asyncio.sleep(3.0)
        after = [sum(process.cpu_times()[:2]) for process in processes]
        for begin, end in zip(before, after, strict=True):
            assert (end - begin) / 3.0 < 0.1

    runner.run(asyncio.wait_for(test(), 60))
