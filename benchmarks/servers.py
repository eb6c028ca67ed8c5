"""Servers under test as child processes: started, waited for until they are healthy, and stopped whatever happens."""

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

from benchmarks.load import Target
from benchmarks.machine import ROOT
from benchmarks.models import model_path
from benchmarks.ours import KV_MEMORY, MAX_MODEL_LEN, Options
from benchmarks.peers.install import vllm_python
from benchmarks.peers.llama_cpp import clean_environment, free_port
from benchmarks.peers.process import LOAD_LIMIT, PeerFailed, Processes
from benchmarks.peers.vllm_cpu import SETTINGS, environment
from benchmarks.peers.vllm_worker import MAX_SEQUENCES

NAME = "the-model"  # under which all serve it
ENTRY = "from nano_inference.cli import app; app()"


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    target: Target
    pid: int
    config: str
    memory: int  # bytes, when it had started


@contextmanager
def started(
    command: Sequence[str], variables: Mapping[str, str], port: int, log: Path, limit: float = LOAD_LIMIT
) -> Iterator[Running]:
    """Start a server on a port. Raises `PeerFailed` where it ends or is not healthy within the limit."""
    log.unlink(missing_ok=True)
    processes = Processes(command, variables, log)
    target = Target(f"http://127.0.0.1:{port}", NAME)
    try:
        wait_until_healthy(processes, target, limit)
        yield Running(target, processes.process.pid, shlex.join(command), processes.memory())
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
    raise PeerFailed(f"the server on {target.url} was not healthy within {limit:g} s; {processes.log} says why.")


def ours(options: Options, log: Path, *more: str, in_process: bool = False) -> AbstractContextManager[Running]:
    """`nano-inference serve`, with the settings of `ours.engine_config`."""
    port = free_port()
    settings = {
        "port": port,
        "served-model-name": NAME,
        "dtype": options.dtype,
        "backend": options.backend,
        "max-model-len": MAX_MODEL_LEN,
        "kv-cache-memory": KV_MEMORY,
        "device": "cpu",
        "log-level": "warning",
    } | ({"threads": options.threads} if options.threads else {})
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-c", ENTRY, "serve", str(model_path(options.model)), *flags, *more]
    command += ["--in-process"] if in_process else []
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return started(command, os.environ | paths, port, log)


def vllm(options: Options, cache: Path, log: Path, setting: str = "compiled") -> AbstractContextManager[Running]:
    """vLLM's own server, with the settings of `peers.vllm_worker`."""
    port, chosen = free_port(), SETTINGS[setting]
    settings = {
        "model": model_path(options.model),
        "served-model-name": NAME,
        "host": "127.0.0.1",
        "port": port,
        "dtype": options.dtype,
        "max-model-len": MAX_MODEL_LEN,
        "max-num-batched-tokens": chosen.batched_tokens,
        "max-num-seqs": MAX_SEQUENCES,
        "seed": 0,
        "uvicorn-log-level": "warning",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    flags += ["--enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    flags += ["--enforce-eager"] if chosen.eager else []
    command = [str(vllm_python(cache)), "-m", "vllm.entrypoints.openai.api_server", *flags]
    variables = clean_environment() | environment(chosen, options.threads or 1, cache)
    return started(command, variables, port, log)
