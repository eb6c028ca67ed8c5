"""Bubbles of a pipeline: the waiting share of its stages, by the number of sequence groups that
take turns.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.measure import Row, Stopwatch, show, spread
from benchmarks.ours import Options, described, opened
from benchmarks.workloads import HIGHEST_ID, LOWEST_ID
from nano_inference import InferenceEngine, SamplingParams

BEAT = 1.5  # seconds until rank 0 learns the working time of the others
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "what": lambda row: row["name"],
    "tok/s": lambda row: row["output_tokens_per_s"],
    "waiting, by stage": lambda row: " / ".join(
        f"{share['median']:.0%}" for share in row["waiting_shares"]
    ),
    "steps": lambda row: row["steps"],
    "sequences per step": lambda row: row["sequences_per_step"],
    "cores": lambda row: row["placement"],
}


def measure(
    options: Options, stages: int, groups: Sequence[int], sequences: int, tokens: int
) -> list[Row]:
    """Decode this many sequences on one rank with one thread, on one rank with a thread per stage,
    then in a pipeline.
    """
    rows: list[Row] = []
    for threads in sorted({1, stages}):
        with opened(replace(options, threads=threads)) as engine:
            name = f"one rank, {threads} thread{'s' * (threads > 1)}"
            rows.append({"name": name} | _timed(engine, options.repeats, sequences, tokens))
    with opened(replace(options, threads=1), pipeline_parallel=stages) as engine:
        for number in groups:
            loop = engine.loop
            loop.config, loop.lookahead = replace(loop.config, groups=number), number - 1
            name = f"{stages} stages of one thread, {number} group{'s' * (number > 1)}"
            rows.append({"name": name} | _timed(engine, options.repeats, sequences, tokens))
    show(
        f"{sequences} sequences of {tokens} tokens, {options.model}: median of {options.repeats}",
        COLUMNS,
        rows,
    )
    return rows


def _timed(engine: InferenceEngine, repeats: int, sequences: int, tokens: int) -> Row:
    _run(engine, sequences, 8)
    watch, shares, steps = Stopwatch(), list[list[float]](), 0
    for _ in range(repeats):
        engine.flush_cache()
        time.sleep(BEAT)
        before = engine.stats()
        watch.time(lambda: _run(engine, sequences, tokens))
        time.sleep(BEAT)
        after = engine.stats()
        steps = after.num_steps - before.num_steps
        busy = [new - old for new, old in zip(after.ranks_busy, before.ranks_busy, strict=True)]
        shares.append([1 - each / watch.seconds[-1] for each in busy])
    return watch.row(
        output_tokens_per_s=watch.rates(sequences * tokens),
        waiting_shares=[spread(each) for each in zip(*shares, strict=True)],
        steps=steps,
        sequences_per_step=sequences * tokens / steps,
        config=described(engine),
    )


def _run(engine: InferenceEngine, sequences: int, tokens: int) -> None:
    rng = random.Random(tokens)
    prompts = [[rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(16)] for _ in range(sequences)]
    engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True), progress=False)
