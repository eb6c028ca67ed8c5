"""Tokens per second: every workload at the engine's own number of threads, W1 and W2 also with one
thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.measure import Row, show
from benchmarks.ours import Options, described, opened, timed

ONE_THREAD = ("W1", "W2")  # workloads that also run with one thread
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "workload": lambda row: row["name"],
    "seconds": lambda row: row["seconds"],
    "output tok/s": lambda row: row["output_tokens_per_s"],
    "prompt tok/s": lambda row: row.get("prompt_tokens_per_s"),
    "decode tok/s": lambda row: row.get("decode_tokens_per_s"),
    "first token, s": lambda row: row.get("first_token_s"),
    "cores": lambda row: row["placement"],
}


def measure(options: Options, workloads: Sequence[str]) -> list[Row]:
    rows, threads = measure_with(options, workloads)
    alone = [name for name in workloads if name in ONE_THREAD]
    if options.threads is None and threads > 1 and alone:
        rows += measure_with(replace(options, threads=1), alone)[0]
    show(f"throughput, {options.model}: median [min..max] of {options.repeats}", COLUMNS, rows)
    return rows


def measure_with(options: Options, workloads: Sequence[str]) -> tuple[list[Row], int]:
    """Return the rows, and the number of threads that they were measured with."""
    rows: list[Row] = []
    with opened(options) as engine:
        threads = torch.get_num_threads()
        for name in workloads:
            row = timed(engine, name, options.repeats)
            label = f"{name}, 1 thread" if threads == 1 else name
            rows.append({"name": label} | row | {"threads": threads, "config": described(engine)})
    return rows, threads
