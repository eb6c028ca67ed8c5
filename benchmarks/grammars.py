"""`python -m benchmarks grammars`: the extra cost of a step whose sequences follow grammars.

Batches of 64 sequences decode with and without a grammar, in turns on one engine, because a
machine's load varies. The ratio uses the CPU seconds of the whole process. With
`OMP_WAIT_POLICY=PASSIVE`, waiting threads use no CPU time.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.measure import Row, show, spread
from benchmarks.ours import Options, described, opened
from nano_inference import Grammar, InferenceEngine, SamplingParams
from nano_inference.core.loop import PHASES

PROMPT = "Write a long list of people as JSON: "
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["friend", "colleague", "other"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
# no sample with one of these grammars can end within a window
GRAMMARS: Mapping[str, Grammar | None] = {
    "none": None,
    "none again": None,  # for the difference between two equal runs
    "regex": Grammar.regex("[0-9a-f ]{4000}"),
    "JSON schema": Grammar.json_schema({"type": "array", "items": PERSON, "minItems": 200}),
    "any JSON": Grammar.json_schema({"type": "array", "items": {}, "minItems": 2000}),
}


def measure(options: Options, sequences: int, steps: int) -> list[Row]:
    """Return a row per grammar: milliseconds per step, and their ratio to a step without one.

    Args:
        options: Options of the engine.
        sequences: Sequences per step.
        steps: Timed steps per grammar and round.
    """
    windows: dict[str, list[dict[str, float]]] = {name: [] for name in GRAMMARS}
    with opened(options, max_batch_size=sequences) as engine:
        for round_ in range(options.repeats):
            for name, grammar in GRAMMARS.items():
                window = decode(engine, grammar, sequences, steps, round_)
                windows[name].append(window)
        config = described(engine)
    rows = [
        row(name, own, windows["none"]) | {"sequences": sequences, "steps": steps, "config": config}
        for name, own in windows.items()
    ]
    show(f"{sequences} sequences, {options.model}: ms per step", COLUMNS, rows)
    return rows


def decode(
    engine: InferenceEngine, grammar: Grammar | None, sequences: int, steps: int, seed: int
) -> dict[str, float]:
    """Return the milliseconds per step while all sequences decode: CPU, wall, and each phase."""
    for place in range(sequences):
        params = SamplingParams(
            max_tokens=steps + 64,
            ignore_eos=True,
            seed=seed * sequences + place,
            grammar=grammar,
        )
        engine.add_request(PROMPT, params)
    loop = engine.loop
    deadline = time.monotonic() + 120
    while min((seq.num_completion_tokens for seq in loop.sequences.running), default=0) < 4 or (
        len(loop.sequences.running) < sequences
    ):
        engine.step()
        if time.monotonic() > deadline:
            raise TimeoutError("not all sequences come to decode.")
    loop.clock.nanoseconds = dict.fromkeys(PHASES, 0)
    gc.collect()
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(steps):
        if engine.step():
            raise AssertionError("a sequence has ended within the window.")
    figures = {
        "cpu": (time.process_time() - busy) * 1e3 / steps,
        "wall": (time.perf_counter() - began) * 1e3 / steps,
    } | {phase: us / 1e3 for phase, us in loop.clock.microseconds(steps).items()}
    engine.abort()
    engine.step()
    return figures


def row(name: str, own: list[dict[str, float]], plain: list[dict[str, float]]) -> Row:
    """Return a row of the report. The ratio compares windows of the same round."""
    return {
        "name": name,
        "cpu_ms": spread(each["cpu"] for each in own),
        "cpu_ratio": spread(a["cpu"] / b["cpu"] for a, b in zip(own, plain, strict=True)),
        "wall_ms": spread(each["wall"] for each in own),
        "phases_ms": {
            phase: round(statistics.median(each[phase] for each in own), 3) for phase in PHASES
        },
    }


COLUMNS: dict[str, Callable[[Row], Any]] = {
    "grammar": lambda row: row["name"],
    "CPU": lambda row: row["cpu_ms"],
    "ratio": lambda row: row["cpu_ratio"],
    "wall": lambda row: row["wall_ms"],
    **{
        phase: lambda row, phase=phase: row["phases_ms"][phase]
        for phase in ("build", "forward", "commit", "sample")
    },
}
