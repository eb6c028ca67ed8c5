"""Our server compared with its bare engine and with vLLM's server, under the same load.

Each part has rounds in which every entrant runs once, in a process that exists only for its turn,
so that nothing else computes:

- `throughput`: A closed loop of completions, answered whole and streamed, and the same loop on the
  bare engine.
- `first`: One request at a time, in milliseconds to the first token, for the server and the bare
  engine.
- `arrival`: A long prompt arrives among running streams. Measured is the time between tokens before
  and during its computation, in chunks of several sizes and in one piece.
- `idle`: The CPU use of the server's processes without requests.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import arrival, servers
from benchmarks.machine import handover_ns, placement
from benchmarks.measure import Row, console, show, spread
from benchmarks.ours import Options
from benchmarks.peers import install
from benchmarks.peers.compare import OURS
from benchmarks.peers.process import PeerFailed, Worker
from benchmarks.servers import Running
from nano_bench.cpu_time import CpuMeter, server_parts
from nano_bench.load import Target, drive, run
from nano_bench.outcomes import Load
from nano_bench.shape import token_requests

ALONE = f"{OURS}, no server"
PARTS = ("throughput", "first", "arrival", "idle")
IDLE = 10.0  # seconds
SINGLES_OUTPUT = 8  # tokens per request, if only the time to the first one counts


@dataclass(frozen=True)
class Choice:
    """The load and the entrants.

    Attributes:
        engines: Names from "nano-inference" and "vllm". The bare engine always runs with the first.
        budgets: Token budgets of a step, which split long prompts. The engine's default comes last.
        setting: Setting of vLLM, a name from `vllm_cpu.SETTINGS`.
    """

    engines: tuple[str, ...] = (OURS, "vllm")
    requests: int = 256
    warm_up: int = 64
    concurrency: int = 32
    prompt_tokens: int = 64
    output_tokens: int = 128
    singles: int = 64
    budgets: tuple[int, ...] = (24, 40, 72, 264)
    long_prompt: int = 4096
    setting: str = "compiled"
    cache: Path = install.CACHE


def measure(options: Options, parts: Sequence[str], choice: Choice) -> list[Row]:
    options = replace(options, threads=options.threads or psutil.cpu_count(logical=False) or 1)
    measured = {"throughput": throughput, "first": first, "arrival": arriving, "idle": idle}
    return [row for part in parts for row in measured[part](options, choice)]


@dataclass
class Seen:
    """Figures of one entrant over all rounds."""

    rates: list[float]
    loads: list[Row]
    handovers: list[tuple[float | None, float | None]]
    config: str = ""

    def row(self, engine: str, form: str) -> Row:
        parts = sorted({name for each in self.loads for name in each["cpu_s"]})
        return {
            "name": f"throughput: {engine}, {form}",
            "part": "throughput",
            "engine": engine,
            "form": form,
            "output_tokens_per_s": spread(self.rates),
            "cpu_s": {
                name: spread(each["cpu_s"].get(name, 0.0) for each in self.loads) for name in parts
            },
            "handover_ns": [list(pair) for pair in self.handovers],
            "placement": placement(self.handovers),
            "runs": self.loads,
            "config": self.config,
        }


Table = dict[tuple[str, str], Seen]


def throughput(options: Options, choice: Choice) -> list[Row]:
    table: Table = {}
    for number in range(options.repeats):
        entrants = [entrant for name, entrant in THROUGHPUT.items() if name in choice.engines]
        shift = number % len(entrants)
        for entrant in entrants[shift:] + entrants[:shift]:
            entrant(options, choice, number, table)
    rows = [seen.row(engine, form) for (engine, form), seen in table.items()]
    show(f"throughput, {options.model}, {choice.concurrency} in flight", THROUGHPUT_COLUMNS, rows)
    for line in targets(table):
        console.print(line, markup=False)
    return rows


def ours_and_alone(options: Options, choice: Choice, number: int, table: Table) -> None:
    def loop(worker: Worker) -> None:
        for prompts, note in (
            (prompts_of(choice, -1, choice.warm_up), None),
            (prompts_of(choice, number), ALONE),
        ):
            before = handover_ns()
            question = {"output_tokens": choice.output_tokens, "concurrency": choice.concurrency}
            done = worker.ask(question | {"prompts": prompts})
            if note is not None:
                rate = done["tokens"] / done["seconds"]
                note_run(table, (note, "whole"), rate, done, before, worker.config)

    if number % 2:  # alternate the first of the two
        served(options, choice, number, table)
    with alone(options, choice) as worker:
        loop(worker)
    if not number % 2:
        served(options, choice, number, table)


def served(options: Options, choice: Choice, number: int, table: Table) -> None:
    with servers.ours(options, log_of(choice, "ours")) as server:
        both_forms(server, OURS, choice, number, table)


def vllm(options: Options, choice: Choice, number: int, table: Table) -> None:
    if install.installed(choice.cache, "vllm") is None:
        console.print("skipping vllm: it is not installed; run `make peers`.")
        return
    try:
        with servers.vllm(options, choice.cache, log_of(choice, "vllm"), choice.setting) as server:
            both_forms(server, "vllm", choice, number, table)
    except PeerFailed as why:
        console.print(f"skipping vllm: {why}", markup=False)


THROUGHPUT: dict[str, Callable[[Options, Choice, int, Table], None]] = {
    OURS: ours_and_alone,
    "vllm": vllm,
}


def both_forms(server: Running, engine: str, choice: Choice, number: int, table: Table) -> None:
    """Warm up, then run the load once answered whole and once streamed."""
    for form in ("whole", "streamed"):
        stream = form == "streamed"
        under_load(server, token_prompts(choice, -1, choice.warm_up, stream), choice)
        before = handover_ns()
        done = under_load(server, token_prompts(choice, number, choice.requests, stream), choice)
        row = done.row()
        if done.errors or done.tokens != choice.requests * choice.output_tokens:
            raise PeerFailed(
                f"{engine} made {done.tokens} tokens, {len(done.errors)} errors: {done.errors[:3]}."
            )
        note_run(table, (engine, form), row["output_tokens_per_s"], row, before, server.config)
        console.print(
            f"round {number + 1}: {engine}, {form}: {row['output_tokens_per_s']:,.0f} tok/s, "
            f"{row['cpu_s']}"
        )


def note_run(
    table: Table,
    key: tuple[str, str],
    rate: float,
    done: dict[str, Any],
    before: float | None,
    config: str,
) -> None:
    seen = table.setdefault(key, Seen([], [], []))
    seen.rates.append(rate)
    seen.loads.append(done)
    seen.handovers.append((before, handover_ns()))
    seen.config = config


def under_load(server: Running, asks: list[Any], choice: Choice) -> Load:
    watched = server_parts(server.pid)
    return run(drive(server.target, asks, concurrency=choice.concurrency, watched=watched))


def token_prompts(choice: Choice, variant: int, count: int, stream: bool) -> list[Any]:
    """Return the load's requests. No two variants share a prompt."""
    return token_requests(
        count,
        choice.prompt_tokens,
        choice.output_tokens,
        stream=stream,
        seed=2 * variant + 1_000 + stream,
    )


def prompts_of(choice: Choice, variant: int, count: int | None = None) -> list[list[int]]:
    return [
        ask.body["prompt"]
        for ask in token_prompts(choice, variant, count or choice.requests, False)
    ]


@contextmanager
def alone(options: Options, choice: Choice) -> Iterator[Worker]:
    """Start the engine in a separate process, without a server."""
    command = [sys.executable, "-m", "benchmarks.closed_loop", json.dumps(options.as_dict())]
    worker = Worker(ALONE, "", command, os.environ, log_of(choice, "alone"), "")
    try:
        yield worker
    finally:
        worker.stop()


def log_of(choice: Choice, name: str) -> Path:
    return choice.cache / "logs" / f"serve-{name}.log"


def targets(table: Table) -> list[str]:
    """Return the ratios, round by round."""
    lines: list[str] = []
    for (engine, form), against, what in (
        ((OURS, "whole"), (ALONE, "whole"), "of the bare engine"),
        ((OURS, "streamed"), (ALONE, "whole"), "of the bare engine"),
        ((OURS, "whole"), ("vllm", "whole"), "of vLLM's server"),
        ((OURS, "streamed"), ("vllm", "streamed"), "of vLLM's server"),
    ):
        if (engine, form) in table and against in table:
            pairs = zip(table[engine, form].rates, table[against].rates, strict=True)
            found = spread(own / other for own, other in pairs)
            lines.append(
                f"{form}: {found['median']:.3f} [{found['min']:.3f}..{found['max']:.3f}] {what}"
            )
    return lines


def first(options: Options, choice: Choice) -> list[Row]:
    """Measure the milliseconds to the first token of single requests: medians per round."""
    middles: dict[str, list[float]] = {ALONE: [], OURS: []}
    asks = [
        token_requests(
            choice.singles, choice.prompt_tokens, SINGLES_OUTPUT, stream=True, seed=5_000 + number
        )
        for number in range(options.repeats + 1)
    ]
    with alone(options, choice) as worker:
        for number, each in enumerate(asks):
            question = {
                "singles": [ask.body["prompt"] for ask in each],
                "output_tokens": SINGLES_OUTPUT,
            }
            if number:  # the first one warms up
                middles[ALONE].append(statistics.median(worker.ask(question)["first_tokens"]) * 1e3)
            else:
                worker.ask(question)
    with servers.ours(options, log_of(choice, "ours")) as server:
        for number, each in enumerate(asks):
            done = run(drive(server.target, each, concurrency=1))
            if done.errors or not done.first_tokens:
                raise PeerFailed(
                    f"{len(done.first_tokens)} first tokens, {len(done.errors)} errors: "
                    f"{done.errors[:3]}."
                )
            if number:
                middles[OURS].append(statistics.median(done.first_tokens) * 1e3)
    rows: list[Row] = [
        {
            "name": f"first token, one at a time: {engine}",
            "part": "first",
            "engine": engine,
            "ms": spread(values),
        }
        for engine, values in middles.items()
    ]
    show(f"first token of single requests, {options.model}", FIRST_COLUMNS, rows)
    return rows


def arriving(options: Options, choice: Choice) -> list[Row]:
    """Measure the time between tokens before and while a long prompt arrives, for each token budget
    of a step.
    """
    rows: list[Row] = []
    for budget in (*choice.budgets, None):
        flags = ("--max-tokens-per-batch", str(budget)) if budget is not None else ()
        with servers.ours(options, log_of(choice, "ours"), *flags) as server:
            runs = [arrive(server.target, choice, number) for number in range(options.repeats + 1)][
                1:
            ]
        rows.append(
            {
                "name": f"arrival: {budget or 'unbounded'}",
                "part": "arrival",
                "budget": budget,
                "before_p99_ms": spread(each.before for each in runs),
                "during_p99_ms": spread(each.during for each in runs),
                "growth": spread(each.during / each.before for each in runs),
                "long_prompt_s": spread(each.waited for each in runs),
            }
        )
        show(
            f"a prompt of {choice.long_prompt} tokens arrives, {options.model}",
            ARRIVAL_COLUMNS,
            rows[-1:],
        )
    return rows


def arrive(target: Target, choice: Choice, number: int) -> arrival.Arrival:
    return run(arrival.arrive(target, choice.long_prompt, seed=number))


def idle(options: Options, choice: Choice) -> list[Row]:
    """Measure the idle CPU use after a load, in percent of a core per round."""
    seen: dict[str, list[float]] = {}
    with servers.ours(options, log_of(choice, "ours")) as server:
        under_load(server, token_prompts(choice, -1, choice.warm_up, True), choice)
        meter = CpuMeter(server_parts(server.pid))
        for _ in range(options.repeats):
            before = meter.read()
            time.sleep(IDLE)
            for name, seconds in meter.read().items():
                seen.setdefault(name, []).append((seconds - before[name]) / IDLE * 100)
    del seen["client"]
    rows: list[Row] = [
        {"name": f"idle: {name}", "part": "idle", "percent": spread(seen[name])} for name in seen
    ]
    show(f"an idle server, {options.model}", IDLE_COLUMNS, rows)
    return rows


IDLE_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "process": lambda row: row["name"].removeprefix("idle: "),
    "% of a core": lambda row: row["percent"],
}
THROUGHPUT_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "engine": lambda row: row["engine"],
    "answers": lambda row: row["form"],
    "output tok/s": lambda row: row["output_tokens_per_s"],
    "CPU s": lambda row: ", ".join(
        f"{name} {each['median']:.1f}" for name, each in row["cpu_s"].items()
    ),
    "cores": lambda row: row["placement"],
}
FIRST_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "engine": lambda row: row["engine"],
    "first token, ms (p50)": lambda row: row["ms"],
}
ARRIVAL_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "tokens per step": lambda row: row["budget"] or "unbounded",
    "between tokens before, ms (p99)": lambda row: row["before_p99_ms"],
    "between tokens during it, ms (p99)": lambda row: row["during_p99_ms"],
    "growth": lambda row: row["growth"],
    "the long prompt's first token, s": lambda row: row["long_prompt_s"],
}
