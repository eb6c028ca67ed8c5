"""An engine, its control and trainers for tests of weight updates by calls."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from nano_inference.remote.client import EngineClient
from nano_inference.remote.in_process import InProcessClient
from nano_inference.remote.process_client import ProcessClient
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.control import Control
from nano_inference.server.errors import ApiError
from tests.models.tiny import tiny_llama
from tests.server.engines import Run, config_of
from tests.server.trainers.weight_runs import TrainerProcess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny model."""
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=0, max_position=8192)


@pytest.fixture(scope="module")
def client_kind() -> type[EngineClient]:
    """Return the engine's place: a separate process, since a fault may kill it."""
    return ProcessClient


@pytest.fixture(scope="module")
def served(folder: Path, client_kind: type[EngineClient]) -> Iterator[tuple[EngineClient, Run]]:
    """Yield a client and a function that runs coroutines on its loop."""
    threads = torch.get_num_threads()
    in_process = client_kind is InProcessClient
    client: EngineClient = InProcessClient(config_of(folder), 4096)
    if not in_process:
        client = ProcessClient(config_of(folder), 4096)
    with asyncio.Runner() as runner:
        runner.run(client.start())
        yield client, runner.run
        runner.run(client.close())
    torch.set_num_threads(threads)


@pytest.fixture
def control(client: EngineClient, run: Run) -> Iterator[Control]:
    """Yield a control and clear its state for the next test."""
    control = Control(client, ServerConfig(rl=True, rl_timeout=20.0))
    yield control

    async def tidy() -> None:
        assert not control.updates.is_open
        for group in ("group", "other"):
            with suppress(ApiError):  # no session is open
                await control.groups.leave(group)

    run(tidy())


@pytest.fixture
def trainers(folder: Path) -> Iterator[Callable[[], TrainerProcess]]:
    """Yield a factory of trainer processes."""
    started: list[TrainerProcess] = []

    def start() -> TrainerProcess:
        started.append(TrainerProcess(folder))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture(scope="module")
def shared_trainer(folder: Path) -> Iterator[TrainerProcess]:
    """Yield a trainer that no test kills."""
    trainer = TrainerProcess(folder)
    yield trainer
    trainer.close()


@pytest.fixture
def trainer(shared_trainer: TrainerProcess, run: Run) -> Iterator[TrainerProcess]:
    """Yield a trainer that is in no group."""
    yield shared_trainer
    shared_trainer.say("leave_all")
    assert run(shared_trainer.answer()) == "done"
