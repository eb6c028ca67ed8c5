"""Conditions of a measurement: processor, versions, commit, and the placement of the cores.

On a virtual machine the host may move the cores between core complexes. Then a hand-over between
two threads takes 300 ns instead of 50, single streams become faster and shared activations slower.
Every timing therefore records the placement.
"""

import functools
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from nano_inference.errors import NanoInferenceError
from nano_inference.ops.cpu import build

ROOT = Path(__file__).parents[1]
HANDOVERS = 20_000  # 1 to 7 ms
HIDDEN = {"native": (), "avx512": ("amx",), "avx2": ("amx", "avx512", "avx_vnni")}
FAR_NS = 200.0  # observed: 33 to 104 ns if both cores share a cache, else 300 to 330


class Kernels:
    """Machine measurements in the CPU backend's library."""

    def __init__(self, functions: Any) -> None:
        self._c = functions

    def ping(self, rounds: int) -> float:
        """Return the seconds of a barrier of two threads, which show the distance of
        their cores.
        """
        return self._c.nano_ping(rounds)

    def read_rate(self, num_bytes: int, num_threads: int) -> float:
        """Return the bytes per second that threads read from memory, the best of three passes."""
        from nano_inference.ops.cpu.memory import Arena  # pyright: ignore

        data = Arena().take((num_bytes // 4,), torch.float32)
        data.fill_(1.0)
        return max(
            self._c.nano_read_rate(data.data_ptr(), data.numel(), num_threads) for _ in range(3)
        )

    def product_rate(self, num_threads: int) -> float:
        """Return the operations per second of bf16 products in cache, two per pair of numbers: the
        best of three.
        """
        return max(self._c.nano_product_rate(num_threads) for _ in range(3))


@functools.cache
def kernels() -> Kernels | None:
    """Return the library of the CPU backend, or None if it is missing and cannot be built."""
    try:
        from nano_inference.ops.cpu import library  # pyright: ignore

        return Kernels(library.load())
    except (ImportError, AttributeError, OSError, RuntimeError, NanoInferenceError):
        return None


def handover_ns() -> float | None:
    """Measure the nanoseconds of a hand-over between two cores. None if that is impossible."""
    library = kernels()
    if library is None or available_cores() < 2:
        return None
    return round(library.ping(HANDOVERS) * 1e9, 1)


def placement(handovers: list[tuple[float | None, float | None]]) -> str:
    """Return `"near"` or `"far"`, `"moved"` if the (before, after) pairs disagree, `"unknown"`
    without figures.
    """
    seen = [each for pair in handovers for each in pair if each is not None]
    if not seen:
        return "unknown"
    far = sum(each > FAR_NS for each in seen)
    return "near" if far == 0 else "far" if far == len(seen) else "moved"


def available_cores() -> int:
    return (
        len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count() or 1
    )


def others_load(seconds: float = 0.2) -> float:
    """Return the number of busy cores while this thread sleeps: those of other programs, and of our
    own spinning threads.
    """
    psutil.cpu_percent()
    time.sleep(seconds)
    return round(psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1), 2)


def machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "instructions": os.environ.get("BENCHMARK_INSTRUCTIONS", "native"),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "busy_cores_before": others_load(),
        "handover_ns": handover_ns(),
    }


def hide_instructions() -> None:
    """Hide the instructions named by BENCHMARK_INSTRUCTIONS from the kernels: `avx512` hides AMX,
    `avx2` also hides AVX-512. This roughly simulates a smaller machine.
    """
    hidden = HIDDEN[os.environ.get("BENCHMARK_INSTRUCTIONS", "native")]
    if hidden:
        flags = frozenset(each for each in build._processor_flags() if not each.startswith(hidden))
        build._processor_flags = lambda: flags


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("nano-inference", "torch", "numpy", "tokenizers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from source"
    return found


def commit() -> str:
    """Return the commit of this tree, with "-dirty" if files differ from it, or "unknown" outside
    of git.
    """
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
