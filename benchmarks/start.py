"""Commands that answer with one token, from the start of the process to its end: `nano-inference
generate` and llama.cpp's `llama-cli` on the same `.gguf` files, in turns.

Files and caches are warm: a first run of each command is not counted. Memory is the peak of the
process by the system's account, mapped files included.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.machine import ROOT
from benchmarks.measure import Row, show, spread
from benchmarks.models import model_path
from benchmarks.ours import Options
from benchmarks.peers import install
from benchmarks.peers.llama_cpp import clean_environment, gguf_of, llama_bin, quantised

GLANCE = 0.004  # seconds between looks at a process
CONTEXT = 4096  # tokens: llama.cpp allocates the KV cache of a whole context
PROMPT = "The capital of France is"
COLUMNS = {
    "command": lambda row: row["engine"],
    "file": lambda row: row["file"],
    "s": lambda row: row["seconds"],
    "peak MiB": lambda row: row["peak_mib"],
}


class Run(NamedTuple):
    """One process: seconds until its end, and its peak memory in bytes."""

    seconds: float
    peak: int


def measure(options: Options, kinds: Sequence[str], cache: Path) -> list[Row]:
    """Return a row per engine and kind of file. Without llama.cpp, only ours."""
    threads = options.threads or psutil.cpu_count(logical=False) or 1
    has_llama = install.installed(cache, "llama.cpp") is not None
    plain = gguf_of(model_path(options.model), cache)
    rows: list[Row] = []
    for kind in kinds:
        file = plain if kind == "BF16" else quantised(plain, kind, cache)
        commands = {"nano-inference": ours(file, threads)}
        if has_llama:
            commands["llama.cpp"] = llama_cli(file, threads, cache)
        runs: dict[str, list[Run]] = {name: [] for name in commands}
        for number in range(options.repeats + 1):
            for name, command in commands.items():
                run = run_once(command)
                if number:  # the first one warms the caches
                    runs[name].append(run)
        rows += [
            {
                "name": f"{name} {kind}",
                "engine": name,
                "file": kind,
                "file_mib": file.stat().st_size / 2**20,
                "seconds": spread(run.seconds for run in each),
                "peak_mib": spread(run.peak / 2**20 for run in each),
            }
            for name, each in runs.items()
        ]
    show(f"one token by a command, {options.model}: median [min..max]", COLUMNS, rows)
    return rows


def ours(file: Path, threads: int) -> list[str]:
    program = [sys.executable, "-m", "nano_inference", "generate", str(file), "-p", PROMPT]
    program += ["--max-model-len", str(CONTEXT), "--threads", str(threads)]
    return [*program, "--max-tokens", "1", "--temperature", "0"]


def llama_cli(file: Path, threads: int, cache: Path) -> list[str]:
    program = [str(llama_bin(cache) / "llama-cli"), "-m", str(file), "-p", PROMPT, "-n", "1"]
    return [*program, "-c", str(CONTEXT), "-t", str(threads), "--temp", "0", "--single-turn"]


def run_once(command: Sequence[str]) -> Run:
    """Run a command without output. Raise `RuntimeError` if it fails."""
    environment = clean_environment()
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's second start has compiled modules
    began = time.perf_counter()
    peak = 0
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
            time.sleep(GLANCE)
        seconds = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}.")
    return Run(seconds, peak)


def peak_of(pid: int) -> int:
    """Return the peak memory of a running process in bytes, 0 if it has just ended.

    The account that `wait4` returns would include the memory of this process before `exec`.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return values[0] if values else 0
