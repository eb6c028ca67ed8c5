"""Servers under test as child processes: start them, wait until they are healthy, and always stop
them.
"""

import os
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.models import model_path
from benchmarks.ours import KV_MEMORY, MAX_MODEL_LEN, Options
from benchmarks.peers.install import vllm_python
from benchmarks.peers.llama_cpp import clean_environment, free_port
from benchmarks.peers.process import LOAD_LIMIT, PeerFailed, Processes
from benchmarks.peers.vllm_cpu import SETTINGS, environment
from benchmarks.peers.vllm_worker import MAX_SEQUENCES
from nano_bench.load import Target

NAME = "the-model"  # model name on all servers
ENTRY = "from nano_inference.cli import app; app()"


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    target: Target
    pid: int
    # its command line without this machine's interpreter, port and model path
    config: str
    memory: int  # bytes right after the start


@contextmanager
def started(
    command: Sequence[str],
    variables: Mapping[str, str],
    port: int,
    log: Path,
    limit: float = LOAD_LIMIT,
    config: str | None = None,
) -> Iterator[Running]:
    """Start a server on a port. Raises `PeerFailed` if it ends or is not healthy in time."""
    log.unlink(missing_ok=True)
    processes = Processes(command, variables, log)
    target = Target(f"http://127.0.0.1:{port}", NAME)
    try:
        wait_until_healthy(processes, target, limit)
        yield Running(
            target, processes.process.pid, config or shlex.join(command), processes.memory()
        )
    finally:
        processes.stop()


def wait_until_healthy(processes: Processes, target: Target, limit: float) -> None:
    deadline = time.perf_counter() + limit
    while time.perf_counter() < deadline:
        processes.require_alive()
        try:
            with urllib.request.urlopen(f"{target.url}/health", timeout=5.0) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise PeerFailed(
        f"the server on {target.url} was not healthy within {limit:g} s; its log is {processes.log}."
    )


def ours(
    options: Options,
    log: Path,
    *more: str,
    in_process: bool = False,
    path: Path | None = None,
    max_model_len: int = MAX_MODEL_LEN,
) -> AbstractContextManager[Running]:
    """Start `nano-inference serve` with the settings of `ours.engine_config`, on a file at `path`
    instead of the model's plain weights.
    """
    port = free_port()
    settings = {
        "served-model-name": NAME,
        "dtype": options.dtype,
        "backend": options.backend,
        "max-model-len": max_model_len,
        "kv-cache-memory": KV_MEMORY,
        "device": "cpu",
        "log-level": "warning",
    } | ({"threads": options.threads} if options.threads else {})
    flags = [*flags_of(settings), *more, *(["--in-process"] if in_process else [])]
    command = [
        sys.executable,
        "-c",
        ENTRY,
        "serve",
        str(path or model_path(options.model)),
        "--port",
        str(port),
        *flags,
    ]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    config = shlex.join(["nano-inference", "serve", options.model, *flags])
    return started(command, os.environ | paths, port, log, config=config)


def vllm(
    options: Options, cache: Path, log: Path, setting: str = "compiled"
) -> AbstractContextManager[Running]:
    """Start vLLM's own server with the settings of `peers.vllm_worker`."""
    port, chosen = free_port(), SETTINGS[setting]
    settings = {
        "served-model-name": NAME,
        "host": "127.0.0.1",
        "dtype": options.dtype,
        "max-model-len": MAX_MODEL_LEN,
        "max-num-batched-tokens": chosen.batched_tokens,
        "max-num-seqs": MAX_SEQUENCES,
        "seed": 0,
        "uvicorn-log-level": "warning",
    }
    flags = flags_of(settings)
    flags += ["--enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    flags += ["--enforce-eager"] if chosen.eager else []
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    own = ["--model", str(model_path(options.model)), "--port", str(port)]
    command = [str(vllm_python(cache)), *module, *own, *flags]
    variables = clean_environment() | environment(chosen, options.threads or 1, cache)
    config = shlex.join(["python", *module, "--model", options.model, *flags])
    return started(command, variables, port, log, config=config)


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Return `--name value` for each option."""
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]
