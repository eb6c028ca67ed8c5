"""`python -m benchmarks grammars`: the extra cost of a step whose sequences follow grammars, have a
budget of thought or return logprobs of named ids.

Batches of 64 sequences decode with and without them, in turns on one engine, because a machine's
load varies. The ratio uses the CPU seconds of the whole process. With
`OMP_WAIT_POLICY=PASSIVE`, waiting threads use no CPU time.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import Row, show, spread
from benchmarks.models import model_path
from benchmarks.ours import Options, described, opened
from nano_inference import Grammar, InferenceEngine, SamplingParams
from nano_inference.core.loop import PHASES

PROMPT = "Write a long list of people as JSON: <think>\n"  # the budget counts a thought
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"  # a chat template
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


def cases(steps: int) -> dict[str, dict[str, Any]]:
    """Return the sampling parameters of each case. No sample and no thought ends within a window.

    Args:
        steps: Timed steps of a window.
    """
    people = {"type": "array", "items": PERSON, "minItems": 200}
    return {
        "none": {},
        "none again": {},  # for the difference between two equal runs
        "regex": {"grammar": Grammar.regex("[0-9a-f ]{4000}")},
        "JSON schema": {"grammar": Grammar.json_schema(people)},
        "any JSON": {
            "grammar": Grammar.json_schema({"type": "array", "items": {}, "minItems": 2000})
        },
        "thinking budget": {"thinking_token_budget": steps + 48},
        "8 named ids": {"logprob_token_ids": tuple(range(100, 108))},
    }


NAMES = tuple(cases(1))


def measure(
    options: Options, sequences: int, steps: int, names: Sequence[str] = NAMES
) -> list[Row]:
    """Return a row per case: milliseconds per step, and their ratio to a step of the first case.

    Args:
        options: Options of the engine.
        sequences: Sequences per step.
        steps: Timed steps per case and round.
        names: Names of cases.
    """
    windows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with (
        TemporaryDirectory() as folder,
        opened(thinking(options, Path(folder)), max_batch_size=sequences) as engine,
    ):
        for round_ in range(options.repeats):
            for name in names:
                window = decode(engine, cases(steps)[name], sequences, steps, round_)
                windows[name].append(window)
        config = described(engine)
    rows = [
        row(name, own, windows[names[0]])
        | {"sequences": sequences, "steps": steps, "config": config}
        for name, own in windows.items()
    ]
    show(f"{sequences} sequences, {options.model}: ms per step", COLUMNS, rows)
    return rows


def thinking(options: Options, folder: Path) -> Options:
    """Return options with the same model, in a folder whose chat template has thoughts."""
    for path in model_path(options.model).iterdir():
        if path.name != "chat_template.jinja":
            (folder / path.name).symlink_to(path.resolve())
    (folder / "chat_template.jinja").write_text(THINKS, encoding="utf-8")
    return replace(options, model=str(folder))


def decode(
    engine: InferenceEngine, case: Mapping[str, Any], sequences: int, steps: int, seed: int
) -> dict[str, float]:
    """Return the milliseconds per step while all sequences decode: CPU, wall, and each phase."""
    for place in range(sequences):
        params = SamplingParams(
            max_tokens=steps + 64, ignore_eos=True, seed=seed * sequences + place, **case
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
    "case": lambda row: row["name"],
    "CPU": lambda row: row["cpu_ms"],
    "ratio": lambda row: row["cpu_ratio"],
    "wall": lambda row: row["wall_ms"],
    **{
        phase: lambda row, phase=phase: row["phases_ms"][phase]
        for phase in ("build", "forward", "commit", "sample")
    },
}
