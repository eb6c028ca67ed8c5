"""Engines as processes that take turns. A signal stops all engines but the timed one, so that none
of them spins.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.machine import ROOT
from benchmarks.workloads import Workload
from nano_bench.cpu_time import cpu_seconds

LOAD_LIMIT = 600.0  # seconds
STOP_LIMIT = 2.0


class PeerFailed(Exception):
    """An engine ended, or did not do its task."""


@dataclass(frozen=True)
class Made:
    """Results of a run.

    Attributes:
        seconds: Duration.
        tokens: Tokens of all samples.
        drafted: Drafts computed by its steps.
        accepted: Drafts that became tokens.
    """

    seconds: float
    tokens: int
    drafted: int = 0
    accepted: int = 0


class Engine(Protocol):
    """One engine in one setting."""

    name: str
    setting: str
    config: str

    def prepare(self, load: Workload) -> None:
        """Prepare for a workload of this shape."""
        ...

    def run(self, load: Workload) -> float:
        """Run a workload of fixed lengths as `make` does, and return its seconds."""
        ...

    def make(self, load: Workload) -> Made:
        """Run a workload from an empty cache."""
        ...

    def stop(self) -> None:
        """End all processes."""
        ...

    def memory(self) -> int:
        """Return the bytes that the processes hold now."""
        ...

    def peak_memory(self) -> int:
        """Return the peak memory of the processes in bytes."""
        ...

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the processes so far."""
        ...


class Processes:
    """A process in a separate group, with all its children."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, **pipes: Any
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            pipes = {"stdout": file} | pipes
            self.process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stderr=file, start_new_session=True, **pipes
            )
        self.log = log

    def members(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) == self.process.pid:
                    found.append(process)
        return found

    def memory(self) -> int:
        total = 0
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def peak_memory(self) -> int:
        """Return the sum of the processes' peaks, including mapped files."""
        return sum(peak_memory(process.pid) for process in self.members())

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all running processes and of their ended children."""
        return sum(cpu_seconds(process.pid) for process in self.members())

    def sleep(self) -> None:
        """Stop all processes and wait until they have stopped."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        deadline = time.perf_counter() + STOP_LIMIT
        while time.perf_counter() < deadline and any(
            running(process) for process in self.members()
        ):
            time.sleep(0.002)

    def wake(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def require_alive(self) -> None:
        if self.process.poll() is not None:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])
            raise PeerFailed(
                f"`{self.process.args[0]}` ended with status {self.process.returncode}:\n{last}"  # pyright: ignore
            )

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.wake()
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):  # children that outlived it
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def peak_memory(pid: int) -> int:
    """Return the peak memory of a process in bytes, or 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def exact(name: str, load: Workload, made: Made) -> float:
    """Return the seconds of a run that made all requested tokens. Raises `PeerFailed`."""
    if made.tokens != load.output_tokens:
        raise PeerFailed(
            f"{name} made {made.tokens} tokens of {load.output_tokens} in {load.name}."
        )
    return made.seconds


def running(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Worker:
    """An engine that answers JSON lines (see `channel`)."""

    def __init__(
        self,
        name: str,
        setting: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        config: str,
    ) -> None:
        self.name, self.setting = name, setting
        began = time.perf_counter()
        self.processes = Processes(
            command, environment, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            ready = self._answer()
        except BaseException:  # also on an interrupt: nothing else would stop it
            self.processes.stop()
            raise
        self.load_seconds = time.perf_counter() - began
        self.weight_bytes: int | None = ready.get("weight_bytes")
        self.config = ready.get("config") or f"{config}, version {ready['version']}"
        self.processes.sleep()

    def prepare(self, load: Workload) -> None:
        del load

    def run(self, load: Workload) -> float:
        return exact(self.name, load, self.make(load))

    def make(self, load: Workload) -> Made:
        answer = self.ask(
            {
                "requests": [
                    [request.prompt, request.max_tokens, request.n] for request in load.requests
                ],
                "sampling": dict(load.sampling),
            }
        )
        return Made(**answer)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send one line and return its answer, while the worker is awake. Raises `PeerFailed`."""
        self.processes.wake()
        try:
            stdin = self.processes.process.stdin
            assert stdin is not None
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            return self._answer()
        finally:
            self.processes.sleep()

    def memory(self) -> int:
        return self.processes.memory()

    def peak_memory(self) -> int:
        return self.processes.peak_memory()

    def cpu_seconds(self) -> float:
        return self.processes.cpu_seconds()

    def stop(self) -> None:
        self.processes.stop()

    def _answer(self) -> dict[str, Any]:
        stdout = self.processes.process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:  # it closed its end, so it will exit soon
            self.processes.process.wait(timeout=60)
            self.processes.require_alive()
        return json.loads(line)
