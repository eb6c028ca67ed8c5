"""One tiny checkpoint, served by us and by vLLM."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.peers.install import CACHE, vllm_python
from benchmarks.peers.llama_cpp import clean_environment, free_port
from benchmarks.peers.vllm_cpu import VllmSetting, environment
from benchmarks.servers import started
from nano_inference.checkpoints.loading import resolve_model
from nano_inference.config import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.models.tiny import tiny_llama
from tests.vllm_gate.cases import NAME, Case

LENGTH = 256  # max_model_len
VLLM = vllm_python(CACHE)


def checkpoint(folder: Path) -> Path:
    """Write a tiny Llama with SmolLM2's tokenizer. Its heads have size 64, as vLLM's CPU kernels
    require.
    """
    tiny_llama(
        folder,
        vocab_size=49152,
        num_heads=2,
        num_kv_heads=1,
        hidden=128,
        tie=True,
        max_position=LENGTH,
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (file := resolve_model("smollm2-135m") / name).exists():
            shutil.copy(file, folder / name)
    return folder


@contextmanager
def ours(model: Path) -> Iterator[str]:
    """Start our server and yield its address."""
    engine = EngineConfig(
        str(model), device="cpu", num_threads=1, kv_cache_memory=2**26, dtype="float32"
    )
    with running_server(
        engine, ServerConfig(port=0, in_process=True, rl=True, served_model_name=NAME)
    ) as url:
        yield url


@contextmanager
def vllm(model: Path, log: Path) -> Iterator[str]:
    """Start vLLM's server and yield its address."""
    port = free_port()
    options = {
        "model": model,
        "served-model-name": NAME,
        "port": port,
        "host": "127.0.0.1",
        "dtype": "float32",
        "max-model-len": LENGTH,
        "max-num-seqs": 16,
        "generation-config": "vllm",  # ignore defaults of the checkpoint
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [
        str(VLLM),
        "-m",
        "vllm.entrypoints.openai.api_server",
        *words,
        "--enforce-eager",
        "--enable-scale-out",
    ]
    variables = clean_environment() | environment(VllmSetting(eager=True), 1, CACHE)
    with started(command, variables | {"VLLM_CPU_KVCACHE_SPACE": "1"}, port, log) as running:
        yield running.target.url


def ask(url: str, case: Case) -> httpx.Response:
    """Send one request and return its reply."""
    content = case.body if isinstance(case.body, bytes) else None
    body = (
        {"json": case.body} if case.body is not None and content is None else {"content": content}
    )
    headers = {"content-type": "application/json"}
    return httpx.request(case.method, url + case.path, **body, headers=headers, timeout=120)
