"""One server on SmolLM2 for all tests of a session; other servers: `running_server(ScriptedClient(...))`."""

from collections.abc import Iterator

import pytest
import torch

from nano_inference.config import EngineConfig
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.main import running_server

SMOLLM2 = EngineConfig("smollm2-135m", device="cpu", max_model_len=1024, kv_cache_memory=2**28, num_threads=1)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a server of SmolLM2, in this process, without keys."""
    threads = torch.get_num_threads()
    config = ServerConfig(port=0, in_process=True, served_model_name="smollm2")
    with running_server(SMOLLM2, config) as url:
        yield url
    torch.set_num_threads(threads)
