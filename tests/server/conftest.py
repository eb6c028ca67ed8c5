"""Shared servers: SmolLM2 for all tests of a session, and per module a tiny model and a client of
its engine. Start others with `running_server(ScriptedClient(...))`.
"""

import asyncio
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nano_inference.config import EngineConfig
from nano_inference.core.loop import EngineLoop
from nano_inference.remote import process_client
from nano_inference.remote.client import EngineClient
from nano_inference.remote.in_process import InProcessClient
from nano_inference.remote.process_client import ProcessClient
from nano_inference.server import hosted
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.models.tiny import tiny_llama
from tests.server.engines import Run, config_of
from tests.standing import slowed

SMOLLM2 = EngineConfig(
    "smollm2-135m", device="cpu", max_model_len=1024, kv_cache_memory=2**28, num_threads=1
)


@pytest.fixture(scope="session", autouse=True)
def _load_equal_tokenizers_once() -> Iterator[None]:
    """Share tokenizers in this process: 49,152 tokens cost half a second to load."""
    folders: dict[tuple[tuple[str, bytes], ...], Path] = {}
    load_once = functools.cache(load_tokenizer)

    def load(folder: Path) -> Tokenizer:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        content = tuple(
            (path.name, path.read_bytes()) for path in files if path.suffix != ".safetensors"
        )
        return load_once(folders.setdefault(content, folder))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted, "load_tokenizer", load)
        yield


@pytest.fixture(scope="module")
def slow_steps() -> Iterator[None]:
    """Slow down the steps of this module's engines, so that long requests last: see
    `standing.slowed`.
    """
    start, root = process_client.start_child, str(Path(__file__).parents[2])
    paths = filter(None, (root, os.environ.get("PYTHONPATH")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineLoop, "step", slowed(EngineLoop.step))
        patch.setattr(
            process_client,
            "start_child",
            lambda _, begin: start("tests.server.slow_engine", begin),
        )
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Run a server of SmolLM2 in this process, without keys, and yield its URL."""
    threads = torch.get_num_threads()
    config = ServerConfig(port=0, in_process=True, served_model_name="smollm2")
    with running_server(SMOLLM2, config) as url:
        yield url
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(
    scope="module", params=[InProcessClient, ProcessClient], ids=["in process", "process"]
)
def served(
    request: pytest.FixtureRequest, model: Path, slow_steps: None
) -> Iterator[tuple[EngineClient, Run]]:
    """Yield a client and a function that runs coroutines on its loop."""
    threads = torch.get_num_threads()
    client: EngineClient = request.param(config_of(model), 4096)
    with asyncio.Runner() as runner:
        runner.run(client.start())
        yield client, runner.run
        runner.run(client.close())
        assert client.why_dead == "the server is stopping."
    torch.set_num_threads(threads)


@pytest.fixture
def client(served: tuple[EngineClient, Run]) -> EngineClient:
    return served[0]


@pytest.fixture
def run(served: tuple[EngineClient, Run]) -> Run:
    return lambda test: served[1](asyncio.wait_for(test, 60))
