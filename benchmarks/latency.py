"""Waiting times: first token, gaps between tokens in a full batch, and a cold start with its
memory.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.measure import Row, Stopwatch, show, spread
from benchmarks.ours import Options, arguments, described, opened, run
from benchmarks.workloads import Workload, warm_up, workload
from nano_bench.outcomes import percentile
from nano_inference import InferenceEngine

COLUMNS: dict[str, Callable[[Row], Any]] = {
    "what": lambda row: row["name"],
    "median [min..max]": lambda row: row["figure"],
    "unit": lambda row: row["unit"],
    "cores": lambda row: row.get("placement"),
}


def measure(options: Options, workloads: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    with opened(options) as engine:
        for name in workloads:
            rows += [
                row | {"config": described(engine)}
                for row in streamed(engine, name, options.repeats)
            ]
    rows += cold_start(options)
    show(f"latency, {options.model}: {options.repeats} runs", COLUMNS, rows)
    return rows


def streamed(engine: InferenceEngine, name: str, repeats: int) -> list[Row]:
    """Measure the time to the first token and the gaps between tokens, as a consumer of the stream
    sees them.

    All requests arrive together, so the time to the first token includes the wait for the other
    prompts.
    """
    run(engine, warm_up(name))
    watch = Stopwatch()
    firsts: list[list[float]] = []
    gaps: list[list[float]] = []
    for _ in range(repeats):
        engine.flush_cache()
        first, gap = watch.time(lambda: arrivals(engine, workload(name)))
        firsts.append(first)
        gaps.append(gap)
    figures = [("first token", "p50", 50, firsts), ("first token", "p99", 99, firsts)]
    if any(gaps):
        figures += [("between tokens", "p50", 50, gaps), ("between tokens", "p99", 99, gaps)]
        figures += [("between tokens", "longest", 100, gaps)]
    # one sequence has one first token, so no percentiles
    if workload(name).num_sequences == 1:
        figures = [(what, "", share, runs) for what, _, share, runs in figures[:1]] + figures[2:]
    return [
        watch.row(
            name=f"{name} {what} {which}".strip(),
            workload=name,
            figure=spread(percentile(run_times, share) * 1e3 for run_times in runs),
            unit="ms",
        )
        for what, which, share, runs in figures
    ]


def arrivals(engine: InferenceEngine, load: Workload) -> tuple[list[float], list[float]]:
    """Return seconds until each sequence's first token, and between its deliveries."""
    began = time.perf_counter()
    last: dict[tuple[int, int], float] = {}
    first: list[float] = []
    gaps: list[float] = []
    for delta in engine.generate(*arguments(load), stream=True, progress=False):
        now, key = time.perf_counter(), (delta.request_id, delta.sample_index)
        if not delta.token_ids:
            continue
        if key in last:
            gaps.append(now - last[key])
        else:
            first.append(now - began)
        last[key] = now
    return first, gaps


def cold_start(options: Options) -> list[Row]:
    """Measure a fresh process from its start to its first token, and its memory. Files are in the
    system's cache.
    """
    runs = [fresh_process(options) for _ in range(options.repeats)]
    what = {
        "started": "cold start: process start to first token",
        "imports": "cold start: of it imports",
        "load": "cold start: of it building the engine",
        "first": "cold start: of it the first token",
    }
    rows: list[Row] = [
        {"name": name, "figure": spread(each[key] for each in runs), "unit": "s"}
        for key, name in what.items()
    ]
    memory = {"after_load": "memory after load", "peak": "peak memory, after W2"}
    rows += [
        {"name": name, "figure": spread(each[key] / 2**20 for each in runs), "unit": "MiB"}
        for key, name in memory.items()
        if all(each[key] is not None for each in runs)
    ]
    return rows


def fresh_process(options: Options) -> dict[str, float]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.cold_start", json.dumps(options.as_dict())]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the process prints a line at its first token
        started = time.perf_counter() - began
        report = json.loads(process.stdout.readline())
    return report | {"started": started}
