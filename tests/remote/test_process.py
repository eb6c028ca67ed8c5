"""Life and death of the engine process: whichever side ends, nothing leaks and no caller hangs."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from nano_inference.config import EngineConfig
from nano_inference.errors import EngineDead
from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.ops.cpu.build import available_instruction_set
from nano_inference.ops.cuda import availability
from nano_inference.remote import engine_process, time_limits
from nano_inference.remote.client import EngineClient
from nano_inference.remote.engine_host import encoded
from nano_inference.remote.errors import EngineReplaced, EngineRestarting
from nano_inference.remote.messages import FromEngine, Outputs, Refused
from nano_inference.remote.process_client import ProcessClient
from nano_inference.server.errors import ApiError, api_error_of
from nano_inference.server.http.admission import Readiness
from nano_inference.types import Delta, SamplingParams
from tests.models.tiny import tiny_llama
from tests.server.engines import (
    LONG,
    PATIENCE,
    child_of,
    config_of,
    core_of,
    finished,
    idle,
    params_of,
    slow_config_of,
    until,
)

pytestmark = pytest.mark.usefixtures("slow_steps")


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model whose step over `LONG` tokens takes many seconds."""
    folder = tmp_path_factory.mktemp("slow")
    return tiny_llama(folder, max_position=2 * LONG, hidden=256, inner=256, num_heads=8)


@asynccontextmanager
async def running(config: EngineConfig, **options: Any) -> AsyncIterator[ProcessClient]:
    """Yield a client of a running engine, and check at the end that nothing leaked."""
    client = ProcessClient(config, 4096, **options)
    async with running_client(client):
        yield client


@asynccontextmanager
async def restarted(config: EngineConfig) -> AsyncIterator[FleetClient]:
    """Yield a client of an engine that is replaced when it dies."""
    client = FleetClient(lambda _: ProcessClient(config, 4096), 1, 4096, restart=True)
    async with running_client(client):
        yield client


@asynccontextmanager
async def running_client(client: EngineClient) -> AsyncIterator[None]:
    await asyncio.wait_for(client.start(), 2 * PATIENCE)
    first = child_of(client)
    try:
        yield
    finally:
        last = child_of(client)
        await asyncio.wait_for(client.close(), PATIENCE)
        for child in (first, last):
            assert not is_alive(child.pid)
            assert not child.folder.exists()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def play(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def busy_with_a_long_step(client: ProcessClient) -> Callable[[], bool]:
    return lambda: client.stats is not None and client._busy and client._num_steps >= 1


# -- the engine dies -------------------------------------------------------------------------------


@pytest.mark.thorough
def test_killed_engine_is_noticed_promptly_and_restarted(model: Path) -> None:
    async def test() -> None:
        async with restarted(config_of(model)) as client:
            before = core_of(await finished(client.submit([1, 2], params_of(3), 2, stream=True)))
            pid = child_of(client).pid
            streams = [
                client.submit([1, seed], params_of(seed, 480), stream=True) for seed in range(4)
            ]
            await streams[0].next()
            os.kill(pid, signal.SIGSTOP)  # keeps the call unanswered
            call = asyncio.create_task(client.call("stats"))
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            took = await until(lambda: client.why_dead is not None)
            assert took < time_limits.BUSY_SILENCE / 2, "it did not wait for heartbeats"
            assert "SIGKILL" in str(client.why_dead)
            for stream in streams:
                with pytest.raises(EngineReplaced, match="SIGKILL") as lost:
                    await finished(stream)
                told = api_error_of(lost.value)  # clients retry
                assert told.status == 503
                assert "retry-after" in told.headers
                assert "x-should-retry" not in told.headers
            with pytest.raises(EngineDead):
                await call
            assert client.num_samples == 0

            with pytest.raises(EngineRestarting) as restarting:
                client.submit([1], params_of(0), stream=True)
            refusal = api_error_of(restarting.value)
            assert refusal.status == 503
            assert int(refusal.headers["retry-after"]) > 0
            await until(lambda: client.why_dead is None)
            assert client.num_restarts == 1
            assert child_of(client).pid != pid
            after = core_of(await finished(client.submit([1, 2], params_of(3), 2, stream=True)))
            assert after == before
            await idle(client)

    play(test())


@pytest.mark.thorough
def test_dead_engine_stays_dead_without_restart(model: Path) -> None:
    async def test() -> None:
        async with running(config_of(model)) as client:
            child = child_of(client)
            os.kill(child.pid, signal.SIGKILL)
            await until(lambda: client.why_dead is not None)
            assert not child.folder.exists()
            with pytest.raises(EngineDead, match="SIGKILL"):
                client.submit([1], params_of(0), stream=True)
            with pytest.raises(EngineDead, match="SIGKILL") as lost:
                await client.call("stats")
            assert api_error_of(lost.value).headers["x-should-retry"] == "false"
            assert not client.restarting

    play(test())


@pytest.mark.parametrize("how", ["cancelled", "killed", "closed"])
def test_engine_may_die_before_it_is_ready(model: Path, how: str) -> None:
    async def test() -> None:
        client = ProcessClient(config_of(model), 4096)
        starting = asyncio.create_task(client.start())
        await until(lambda: client._process is not None)
        child = child_of(client)
        with pytest.raises(EngineDead, match="not ready"):
            client.submit([1], params_of(0), stream=True)
        if how == "cancelled":
            starting.cancel()
        elif how == "killed":
            os.kill(child.pid, signal.SIGKILL)
        else:
            await client.close()
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else EngineDead):
            await asyncio.wait_for(starting, PATIENCE)
        assert not is_alive(child.pid)
        assert not child.folder.exists()
        assert client._process is None

    play(test())


@pytest.mark.thorough
def test_restarts_wait_longer_each_time_and_end_with_the_client(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove the model's folder, so that no new engine can be built."""
    monkeypatch.setattr(time_limits, "FIRST_RESTART", 0.1)
    gone = shutil.copytree(model, tmp_path / "gone")

    async def test() -> None:
        async with restarted(config_of(gone)) as client:
            shutil.rmtree(gone)
            os.kill(child_of(client).pid, signal.SIGKILL)
            replica = client.supervisor.replicas["0"]
            await until(lambda: replica.num_starts == 3)
            assert client.restarting
            await until(lambda: "ModelLoadError" in replica.why)
        starts = replica.num_starts
        await asyncio.sleep(0.1)
        assert replica.num_starts == starts
        assert child_of(client)._process is None

    play(test())


def test_process_client_follows_the_engines_startup(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    receive = ProcessClient._receive_of_start

    def hear(client: ProcessClient, message: Any) -> None:
        receive(client, message)
        heard.append(client.loading)

    monkeypatch.setattr(ProcessClient, "_receive_of_start", hear)

    async def test() -> None:
        client = ProcessClient(config_of(model), 4096)
        await client.start()
        await client.close()

    asyncio.run(test())
    assert heard[0].startswith(f"loading {model.name}: 0 of")
    assert heard[-1] == "", "it is ready"


def test_lifecycle_reports_the_engines_startup(model: Path) -> None:
    client = ProcessClient(config_of(model), 4096)
    with pytest.raises(ApiError, match=r"^the engine is being built\.$"):
        Readiness(client).require_ready()
    client.loading = "compiling CPU kernels (once): 3 of 18 files"
    with pytest.raises(ApiError, match=r"is being built: compiling .*: 3 of 18 files\.$"):
        Readiness(client).require_ready()


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_engine_ignores_signals_to_the_process_group(model: Path, number: signal.Signals) -> None:
    """Signal the group, also while Python starts: the parent drains first."""

    async def test() -> None:
        client = ProcessClient(config_of(model), 4096)
        starting = asyncio.create_task(client.start())
        await until(lambda: client._process is not None)
        pid = child_of(client).pid
        for _ in range(20):
            os.kill(pid, number)
            await asyncio.sleep(0.02)
        await asyncio.wait_for(starting, PATIENCE)
        os.kill(pid, number)
        assert len(await finished(client.submit([1, 2], params_of(0), stream=True))) == 1
        assert client.why_dead is None
        await client.close()
        assert not is_alive(pid)

    play(test())


# -- the other side dies ---------------------------------------------------------------------------

PARENT = """
import asyncio, sys
from pathlib import Path
from nano_inference.remote.process_client import ProcessClient
from tests.server.engines import LONG, params_of, slow_config_of

async def main():
    client = ProcessClient(slow_config_of(Path(sys.argv[1])), 4096)
    starting = asyncio.create_task(client.start())
    while client._process is None:
        await asyncio.sleep(0.01)
    if int(sys.argv[2]):
        await starting
        client.submit([3] * int(sys.argv[2]), params_of(0, 100), stream=True)
        while client._num_steps < 1:  # a heartbeat says that the step has begun
            await asyncio.sleep(0.01)
    print(client.pid, client.folder, flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.thorough(but=["being built"])
@pytest.mark.parametrize(
    "length", [0, 4, LONG - 100], ids=["being built", "short steps", "amid a step of seconds"]
)
def test_engine_ends_with_a_killed_parent(slow_model: Path, length: int) -> None:
    command = [sys.executable, "-c", PARENT, str(slow_model), str(length)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        assert is_alive(int(pid))
        assert Path(folder).exists()
        parent.kill()
        began = time.monotonic()
        while is_alive(int(pid)) or Path(folder).exists():
            assert time.monotonic() - began < 15.0, "it waits for the step"
            time.sleep(0.01)


def test_engine_removes_a_socket_created_during_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill the parent abruptly: the input thread binds while the folder is being removed."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "api").touch()
    rmdir, codes = os.rmdir, list[int]()

    def bind_before(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(os, "rmdir", rmdir)
        (folder / "engine").touch()
        rmdir(*args, **kwargs)

    monkeypatch.setattr(os, "rmdir", bind_before)
    monkeypatch.setattr(os, "_exit", codes.append)
    engine_process._leave(folder)
    assert codes == [1]
    assert not folder.exists()


FORK = """
def fork():
    import os, time
    if os.fork() == 0:
        time.sleep(100)
        os._exit(0)
"""
FORKED = FORK + PARENT.replace("print(", "fork() or print(")


@pytest.mark.thorough
def test_engine_ends_although_a_fork_of_its_parent_lives_on(slow_model: Path) -> None:
    """Keep stdin's other end open in a fork: the engine sees the parent's end within a
    heartbeat.
    """
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(slow_model), "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        forks = [each for each in psutil.Process(parent.pid).children() if each.pid != int(pid)]
        parent.kill()
        began = time.monotonic()
        while is_alive(int(pid)) or Path(folder).exists():
            assert time.monotonic() - began < PATIENCE, "it waits for the fork"
            time.sleep(0.01)
        assert len(forks) == 1
        forks[0].kill()


# -- a step of seconds -----------------------------------------------------------------------------


@pytest.mark.thorough
def test_calls_are_answered_during_a_long_step(slow_model: Path) -> None:
    async def test() -> None:
        async with running(slow_config_of(slow_model)) as client:
            long = client.submit([3] * (LONG - 100), SamplingParams(max_tokens=1), stream=True)
            waiting = asyncio.ensure_future(long.next())
            await until(busy_with_a_long_step(client))  # a heartbeat
            stats = await client.call("stats")
            assert stats.num_running == 1
            assert client.why_dead is None
            assert not client.stalled(60.0)
            await until(lambda: client.stalled(0.5))
            assert not waiting.done(), "the answers came behind the step"
            waiting.cancel()

    play(test())


@pytest.mark.thorough
def test_closing_ends_a_running_step(slow_model: Path) -> None:
    async def test() -> None:
        async with running(slow_config_of(slow_model)) as client:
            stream = client.submit([3] * (LONG - 100), SamplingParams(max_tokens=1), stream=True)
            await until(busy_with_a_long_step(client))
            await client.close()
            with pytest.raises(EngineDead, match="stopping"):
                await stream.next()
            await client.close()  # a second close does nothing

    play(test())


@pytest.mark.thorough
def test_engine_that_hangs_is_seen_and_can_be_closed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with running(config_of(model)) as client:
            pid = child_of(client).pid
            assert not client.stalled(0.0)
            os.kill(pid, signal.SIGSTOP)
            stream = client.submit([1, 2], params_of(0), stream=True)
            await asyncio.sleep(0.3)
            assert client.stalled(0.2)
            assert not client.stalled(60.0)
            with pytest.raises(TimeoutError):
                await client.call("stats", timeout=0.1)
            os.kill(pid, signal.SIGCONT)
            assert len(await finished(stream)) == 1
            await until(lambda: not client.stalled(0.0))
            await client.call("pause")
            paused = client.submit([1, 2], params_of(0), stream=True)
            heard: list[float | None] = []
            for _ in range(2):  # the first heartbeat may report steps
                heard.append(client._heard)
                await until(lambda: client._heard != heard[-1])
            assert heard[-1] is not None
            assert client._progress > heard[-1]  # idle, and reports it
            paused.close()
            os.kill(pid, signal.SIGSTOP)  # so it does not receive the request to end
            monkeypatch.setattr(time_limits, "PROCESS_STOP", 0.5)
            monkeypatch.setattr(time_limits, "HANG_UP", 0.5)

    play(test())


@pytest.mark.thorough
def test_idle_engine_that_hangs_is_seen_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hang an idle engine: heartbeats are still due."""
    monkeypatch.setattr(time_limits, "SILENCE", 0.3)

    async def test() -> None:
        async with running(config_of(model)) as client:
            await finished(client.submit([1, 2], params_of(0), stream=True))
            await until(lambda: client._heard is not None)
            pid = child_of(client).pid
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: client.stalled(0.2))
            assert client.why_dead is None
            os.kill(pid, signal.SIGCONT)
            client._heard = None  # the next heartbeat may be seconds away

    play(test())


def test_several_engines_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "has_nvidia_device", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig("m")
    chosen = [engine_process._on_its_device(config, number).device for number in range(4)]
    assert chosen == ["auto", "cuda:1", "cuda:0", "cuda:1"]
    on_cpu = EngineConfig("m", device="cpu")
    assert engine_process._on_its_device(on_cpu, 1) is on_cpu


def test_several_engines_on_the_cpu_need_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    if available_instruction_set() is None:
        pytest.skip("there are no CPU kernels")
    monkeypatch.setattr(availability, "has_nvidia_device", lambda: False)
    monkeypatch.setitem(sys.modules, "torch", None)
    config = EngineConfig("m")
    assert engine_process._on_its_device(config, 1) is config


def test_unserializable_message_fails_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = (Delta(0, 0, (1,), (-0.5,), text) for text in ("fine", "\ud800"))
    data_of_each = encoded(msgspec.msgpack.Encoder(), Outputs([good, bad], [4, 7]))
    told = [msgspec.msgpack.decode(data, type=FromEngine) for data in data_of_each]
    assert told[0] == Outputs([good], [4])
    assert isinstance(told[1], Refused)
    assert told[1].request_id == 7


def test_second_engine_finds_no_card_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # any import of it fails
    config = EngineConfig("model")
    assert engine_process._on_its_device(config, 1) == config
