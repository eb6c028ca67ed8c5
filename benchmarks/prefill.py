"""Speed of prefill: by length, by chunk size, and with a shared prefix (W5)."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure import Row, show
from benchmarks.ours import Options, described, opened, timed, timed_prompt
from benchmarks.workloads import HIGHEST_ID, LOWEST_ID, Request, Workload

LENGTHS = (128, 512, 1024, 2048, 4096)
CHUNKS = (128, 256, 512, 1024, 2048)
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "what": lambda row: row["name"],
    "seconds": lambda row: row["seconds"],
    "prompt tok/s": lambda row: row.get("prompt_tokens_per_s"),
    "output tok/s": lambda row: row.get("output_tokens_per_s"),
    "cores": lambda row: row["placement"],
}


def measure(
    options: Options, lengths: Sequence[int], chunks: Sequence[int], workloads: Sequence[str]
) -> list[Row]:
    """Measure a prompt of each length whole, the longest one in chunks of each size, then whole
    workloads.
    """
    rows: list[Row] = []
    with opened(options) as engine:
        for length in lengths:
            row = timed_prompt(engine, prompt(length, 0), prompt(length, 1), options.repeats)
            rows.append({"name": f"{length} tokens"} | row | {"config": described(engine)})
        for name in workloads:
            rows.append(
                {"name": name}
                | timed(engine, name, options.repeats)
                | {"config": described(engine)}
            )
    for chunk in chunks:
        with opened(options, max_chunk_tokens=chunk) as engine:
            longest = max(lengths)
            row = timed_prompt(engine, prompt(longest, 0), prompt(longest, 1), options.repeats)
            rows.append(
                {"name": f"{longest} tokens, chunks of {chunk}"}
                | row
                | {"config": described(engine)}
            )
    show(f"prefill, {options.model}: median [min..max] of {options.repeats}", COLUMNS, rows)
    return rows


def prompt(length: int, seed: int) -> Workload:
    """Return a workload of one prompt of this length and one output token."""
    rng = random.Random(seed)
    ids = tuple(rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(length))
    return Workload(f"{length} tokens", f"{length} -> 1", (Request(ids, 1),))
