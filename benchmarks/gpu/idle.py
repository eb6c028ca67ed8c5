"""Device utilization in steady decode, measured by a torch profiler trace that is kept."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.card import wait
from benchmarks.gpu.ours import start_decode
from benchmarks.gpu.scale import Scale
from nano_inference import InferenceEngine

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ON_HOST = frozenset({"cpu_op"})  # replacement in a dry run
MOST_BYTES = 10_000_000  # size limit of a kept trace


def trace_decode(engine: InferenceEngine, batch: int, scale: Scale, steps: int, path: Path) -> Path:
    """Profile steps of a steady decode and write a trace for Chrome and Perfetto (.json.gz)."""
    device = [] if scale.device == "cpu" else [ProfilerActivity.CUDA]
    start_decode(engine, batch, scale)
    wait(scale.device)
    with profile(activities=[ProfilerActivity.CPU, *device]) as recorded:
        for _ in range(steps):
            engine.step()
        wait(scale.device)
    engine.abort()
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(path))
    return path


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def spans(events: Iterable[dict[str, Any]], kinds: frozenset[str]) -> list[tuple[float, float]]:
    """Return (start, end) in microseconds of the events of some categories."""
    chosen = (event for event in events if event.get("cat") in kinds and "dur" in event)
    return sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in chosen
    )


def busy(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the microseconds from the first start to the last end, and the busy microseconds among
    them.
    """
    if not spans:
        return 0.0, 0.0
    total, (first, reached) = 0.0, (spans[0][0], spans[0][0])
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return reached - first, total


def idle_share(path: Path, device: str) -> tuple[float, float, int]:
    """Return (share of the time in which the device was idle, total milliseconds, number of
    events).
    """
    found = spans(read_trace(path), ON_HOST if device == "cpu" else ON_DEVICE)
    wall, worked = busy(found)
    return (1 - worked / wall if wall else 1.0), wall / 1000, len(found)
