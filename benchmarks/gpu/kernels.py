"""Part `kernels`: the time of a decode step by kernel, compared with the lower bounds by memory
traffic.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import idle, ours
from benchmarks.gpu.report import Part, ratio
from benchmarks.gpu.scale import Scale
from benchmarks.roofline import Rates, Shape

STEPS = 30  # under the profiler
SHOWN = 14  # kernels per batch size that get a row
# A kernel's group by the first word that its name contains. Products may be the vendor's.
GROUPS = (
    ("attention", ("attention_kernel",)),
    ("draw", ("_reduce_kernel", "_finish_kernel", "_filter", "_copy_kernel")),
    ("products", ("_vector_kernel", "_tensor_kernel", "_product", "_add_segments", "_by_head")),
    ("products", ("gemm", "gemv", "nvjet", "cutlass", "splitK", "cublas")),
)


@dataclass(frozen=True)
class KernelTime:
    """A kernel in an average step: number of launches, and microseconds of all of them."""

    name: str
    count: float
    microseconds: float


def times_of(
    events: Iterable[Mapping[str, Any]], steps: int, kinds: frozenset[str]
) -> list[KernelTime]:
    """Return the kernels by name, slowest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in kinds and "dur" in event:
            found[event["name"]].append(float(event["dur"]))
    times = [KernelTime(name, len(each) / steps, sum(each) / steps) for name, each in found.items()]
    return sorted(times, key=lambda time: -time.microseconds)


def group_of(name: str) -> str:
    """Return a kernel's purpose, as far as its name shows it."""
    return next((group for group, words in GROUPS if any(word in name for word in words)), "others")


def floors_of(
    shape: Shape, scale: Scale, batch: int, context: float, rates: Rates
) -> dict[str, float]:
    """Return each group's minimum microseconds per step: bytes over the measured bandwidth.

    `context` counts the tokens of all sequences together.
    """
    logits = batch * scale.small["vocab_size"] * 4
    parts = {"products": shape.weights, "attention": context * shape.kv, "draw": logits}
    return {name: size / rates.read * 1e6 for name, size in parts.items()}


def measure_kernels(run: Any) -> None:
    """Trace steady decodes at each batch size. `run` is a `parts.Run`."""
    scale, rates = run.scale, run.rates()
    part = Part(run.out, "kernels")
    shape = run.shape(scale.small)
    kinds = idle.ON_HOST if scale.device == "cpu" else idle.ON_DEVICE
    steps = min(STEPS, scale.steps)
    with ours.opened(scale, run.small()) as engine:
        for batch in scale.batches:
            path = run.out / f"trace-kernels-{batch}.json.gz"
            idle.trace_decode(engine, batch, scale, steps, path)
            with gzip.open(path, "rt", encoding="utf-8") as file:
                events = json.load(file)["traceEvents"]
            if path.stat().st_size > idle.MOST_BYTES:
                path.unlink()
            context = batch * (scale.context + ours.WARM_STEPS + steps / 2)
            floors = floors_of(shape, scale, batch, context, rates)
            add_rows(part, batch, events, steps, kinds, floors)


def add_rows(
    part: Part,
    batch: int,
    events: list[dict[str, Any]],
    steps: int,
    kinds: frozenset[str],
    floors: Mapping[str, float],
) -> None:
    """Add rows for a step's launches and gaps, for each group with its lower bound, and for the
    slowest kernels.
    """
    times = times_of(events, steps, kinds)
    wall, worked = idle.busy(idle.spans(events, kinds))
    head = f"batch {batch}"
    part.add(f"{head}, launches", [sum(time.count for time in times)], "a step")
    part.add(f"{head}, step", [wall / steps], "µs", note="under the profiler")
    part.add(f"{head}, gaps", [(wall - worked) / steps], "µs a step", note="nothing runs")
    groups: dict[str, float] = defaultdict(float)
    for time in times:
        groups[group_of(time.name)] += time.microseconds
    for name, microseconds in sorted(groups.items()):
        floor = floors.get(name)
        note = (
            "no floor: latency"
            if floor is None
            else (f"floor {floor:.0f} µs: {ratio(floor, microseconds):.0%} of it is needed")
        )
        part.add(f"{head}, {name}", [microseconds], "µs a step", note=note)
    for time in times[:SHOWN]:
        share = ratio(time.microseconds, wall / steps)
        part.add(
            f"{head}, {time.name[:60]}",
            [time.microseconds],
            "µs a step",
            note=f"{time.count:.1f} launches of {ratio(time.microseconds, time.count):.2f} µs, {share:.1%}",
        )
