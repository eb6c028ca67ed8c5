"""The device: its description, clocks and rates. On a CPU the same functions support dry runs."""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import machine
from benchmarks.roofline import Rates

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "pytest",
    "hypothesis",
)
IGNORED_FOLDERS = frozenset({"__pycache__", "prebuilt"})
CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active"


def describe(device: str) -> dict[str, Any]:
    """Describe the card, its driver and the versions, for every report."""
    found = {
        "device": device,
        "python": platform.python_version(),
        "commit": machine.commit(),
        "tree_of_src": tree_hash(machine.ROOT / "src"),
        "processor": machine.processor(),
    }
    found["memory_gib"] = str(round(psutil.virtual_memory().total / 2**30))
    for name in PACKAGES:
        found[name] = version_of(name)
    return found | (
        _cuda()
        if device != "cpu"
        else {"card": "none: a dry run on the CPU, without meaningful figures"}
    )


def tree_hash(folder: Path) -> str:
    """Return git's hash of a source folder (`git rev-parse COMMIT:src`) without using .git. Files
    that git ignores are not counted.
    """
    entries: list[tuple[bytes, bytes]] = []
    for path in folder.iterdir():
        if path.is_dir():
            if path.name in IGNORED_FOLDERS or path.name.endswith(".egg-info"):
                continue
            entries.append(
                (
                    path.name.encode() + b"/",
                    b"40000 %b\0%b" % (path.name.encode(), bytes.fromhex(tree_hash(path))),
                )
            )
        elif path.suffix != ".pyc":
            mode = b"100755" if os.access(path, os.X_OK) else b"100644"
            data = path.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).digest()
            entries.append((path.name.encode(), b"%b %b\0%b" % (mode, path.name.encode(), blob)))
    body = b"".join(entry for _, entry in sorted(entries))
    return hashlib.sha1(b"tree %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda() -> dict[str, str]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "card_memory_gib": f"{properties.total_memory / 2**30:.1f}",
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "cuda": str(torch.version.cuda),
        "driver": ask_driver("driver_version"),
        "clocks_mhz": ask_driver("clocks.max.sm,clocks.max.mem"),
        "power_limit": ask_driver("power.limit"),
    }


def ask_driver(fields: str) -> str:
    """Query `nvidia-smi` for the first card. Return "unknown" if there is none."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    if shutil.which(command[0]) is None:
        return "unknown"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def clocks(device: str) -> str:
    """Return clocks, temperature, power and throttling reasons (`CLOCKS`). Call it right after
    work.
    """
    return "none" if device == "cpu" else ask_driver(CLOCKS)


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any], device: str, repeats: int, calls: int = 1) -> list[float]:
    """Return the seconds per call of `repeats` runs of `calls` calls each. An extra run before is
    not counted.
    """
    run()
    found: list[float] = []
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            run()
        wait(device)
        found.append((time.perf_counter() - began) / calls)
    return found


def release(device: str) -> None:
    """Give unused memory back to the device."""
    if device != "cpu":
        torch.cuda.empty_cache()


def peak_bytes(device: str) -> dict[str, int]:
    """Return the peak memory by torch's count and by the driver's."""
    if device == "cpu":
        return {"allocated": psutil.Process().memory_info().rss, "reserved": 0, "used": 0}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "used": total - free,
    }


def measure_rates(
    device: str, copy_bytes: int, matrix: int, repeats: int
) -> dict[str, list[float]]:
    """Return bytes per second of a copy (read and write) and of a sum (read), and bf16 operations
    per second of a product.
    """
    copies, sums = _bandwidth(device, copy_bytes, repeats)
    release(device)
    dtype = torch.bfloat16
    a, b = (torch.randn(matrix, matrix, device=device).to(dtype) for _ in range(2))
    products = seconds_of(lambda: a @ b, device, repeats, calls=8)
    return {
        "copy": [2 * copy_bytes / each for each in copies],
        "read": [copy_bytes / each for each in sums],
        "product": [2 * matrix**3 / each for each in products],
    }


def _bandwidth(device: str, copy_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return the seconds of a copy and of a sum."""
    # random: zeros cost less power, and a card that compresses would move fewer bytes
    source = torch.randn(copy_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copies = seconds_of(lambda: target.copy_(source), device, repeats, calls=4)
    return copies, seconds_of(lambda: source.sum(), device, repeats, calls=4)


def rates_of(measured: dict[str, list[float]]) -> Rates:
    """Return the medians of the better bandwidth and of the product's rate."""
    bandwidth = max(statistics.median(measured["copy"]), statistics.median(measured["read"]))
    return Rates(statistics.median(measured["product"]), bandwidth)
