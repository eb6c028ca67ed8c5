"""A server of a tiny model with the trainers' routes, for each module, and the model's folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nano_inference.config import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RL = ServerConfig(port=0, in_process=True, served_model_name="tiny", rl=True, rl_timeout=20.0)


def engine_config(folder: Path) -> EngineConfig:
    return EngineConfig(
        str(folder), device="cpu", num_threads=1, kv_cache_memory=2**22, block_size=4, seed=0
    )


@pytest.fixture(scope="module", autouse=True)
def _long_requests_last(slow_steps: None) -> None: ...


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, 300 tokens and a context of 512, with a byte-level tokenizer
    and a template.
    """
    folder = tiny_llama(tmp_path_factory.mktemp("rl") / "model", seed=0)
    write_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def rl_server(tiny_folder: Path) -> Iterator[str]:
    """Run a server of the tiny model in this process, without keys, and yield its URL."""
    threads = torch.get_num_threads()
    with running_server(engine_config(tiny_folder), RL) as url:
        yield url
    torch.set_num_threads(threads)
