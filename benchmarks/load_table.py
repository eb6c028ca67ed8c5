"""The load tool on its own: some runs of one shape against a server that is already there, and a
table of them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import typer

from benchmarks import load
from benchmarks.cpu_time import server_parts
from benchmarks.measure import Row, console, show
from benchmarks.wire import Broken

SHOWN_ERRORS = 5


@dataclass(frozen=True)
class Shape:
    """What a run sends. `prompt_tokens` are words where it is a chat; with a `rate`, `concurrency`
    is not used.
    """

    requests: int = 256
    concurrency: int = 32
    rate: float | None = None
    prompt_tokens: int = 64
    output_tokens: int = 128
    chat: bool = False
    stream: bool = True
    warm_up: int = 32
    seed: int = 0

    def asks(self, count: int, seed: int) -> list[load.Ask]:
        make = load.chat_requests if self.chat else load.token_requests
        return make(count, self.prompt_tokens, self.output_tokens, stream=self.stream, seed=seed)


def percentiles(name: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        found: dict[str, float] | None = row[name]
        return " / ".join(f"{value:,.1f}" for value in found.values()) if found else "-"

    return text


COLUMNS: dict[str, Callable[[Row], Any]] = {
    "what": lambda row: row["name"],
    "output tok/s": lambda row: row["output_tokens_per_s"],
    "first token, ms, p50 / p90 / p99": percentiles("first_token_ms"),
    "between tokens, ms, p50 / p99 / most": percentiles("between_tokens_ms"),
    "whole, ms, p50 / p90 / p99": percentiles("whole_ms"),
    "errors": lambda row: row["errors"],
    "CPU s": lambda row: ", ".join(
        f"{name} {seconds:.2f}" for name, seconds in row["cpu_s"].items()
    ),
}


def measure(target: load.Target, shape: Shape, repeats: int, pid: int | None = None) -> list[Row]:
    """Warm up, then run; each run has prompts of its own. Prints a table."""
    rows: list[Row] = []
    try:
        if not target.model:
            target = replace(target, model=load.run(load.model_of(target)))
        if shape.warm_up:
            load.run(
                load.drive(
                    target, shape.asks(shape.warm_up, shape.seed - 1), concurrency=shape.concurrency
                )
            )
    except (Broken, ValueError, LookupError) as problem:
        raise typer.BadParameter(f"{target.url}: {problem}.") from None
    for number in range(repeats):
        asks = shape.asks(shape.requests, shape.seed + number)
        watched = server_parts(pid) if pid is not None else {}
        done = load.run(
            load.drive(
                target,
                asks,
                concurrency=shape.concurrency,
                rate=shape.rate,
                watched=watched,
                seed=shape.seed,
            )
        )
        rows.append({"name": f"run {number + 1}"} | done.row())
        for error, count in Counter(done.errors).most_common(SHOWN_ERRORS):
            console.print(f"{count} x {error}", markup=False)
    show(f"load on {target.url}, {target.model}: {described(shape)}", COLUMNS, rows)
    return rows


def described(shape: Shape) -> str:
    pace = f"{shape.concurrency} at once" if shape.rate is None else f"{shape.rate:g} a second"
    kind = "chats" if shape.chat else "completions"
    unit = "words" if shape.chat else "tokens"
    form = "streamed" if shape.stream else "whole"
    return (
        f"{shape.requests} {kind}, {shape.prompt_tokens} {unit} -> {shape.output_tokens} "
        f"tokens, {pace}, {form}"
    )
