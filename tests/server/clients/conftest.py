"""A server of a small model, for clients in separate environments."""

from collections.abc import Iterator

import pytest

from nano_inference import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server


@pytest.fixture(scope="module")
def small_model() -> Iterator[str]:
    """Return the address of a server of SmolLM2."""
    served = ServerConfig(port=0, in_process=True, tool_format="hermes")
    config = EngineConfig("smollm2-135m", kv_cache_memory=256 << 20, seed=0)
    with running_server(config, served) as url:
        yield url
