"""Agents' traces on our server and on llama.cpp's, with the same GGUF file, in turns.

Parts:

- `turns`: sessions with subagents from `nano-inference make-trace`, scaled to a model with 8,192
  positions, without waits for tools.
- `8k`: one session whose prompt begins with 6,800 tokens and grows by 64 per turn.
- `chat`: one session of 20 turns whose prompt begins with 240 tokens and grows by 64 per turn.

Every round starts each server anew and has its own trace. The first turn of a session is a cold
prompt, so only later turns count.
"""

import json
import os
import shlex
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import servers
from benchmarks.machine import handover_ns, placement
from benchmarks.measure import Row, console, show, spread
from benchmarks.ours import Options
from benchmarks.peers import install
from benchmarks.peers.compare import OURS
from benchmarks.peers.file_formats import file_of
from benchmarks.peers.llama_cpp import clean_environment, free_port
from benchmarks.peers.process import PeerFailed
from benchmarks.servers import Running
from nano_bench.load import run
from nano_bench.outcomes import percentile
from nano_bench.traces import Trace, read_trace
from nano_bench.traces import replay as replays
from nano_bench.traces.make import Statistics, sessions
from nano_bench.traces.report import trace_row

LLAMA = "llama.cpp"
CONTEXT = 8192
SLOTS = 4
FIELDS = {"temperature": 1.0, "ignore_eos": True}
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "part": lambda row: row["part"],
    "weights": lambda row: row["weights"],
    "engine": lambda row: row["engine"],
    "ms per later turn": lambda row: row["turn_ms"],
    "first token p50": lambda row: row["first_token_p50_ms"],
    "first token p95": lambda row: row["first_token_p95_ms"],
    "ms per further token": lambda row: row["per_token_ms"],
    "hits": lambda row: row["hit_share"],
    "cold first token": lambda row: row["cold_first_token_ms"],
    "last turn": lambda row: row["last_turn_ms"],
}


@dataclass(frozen=True)
class Choice:
    """The traces and the entrants.

    Attributes:
        parts: Names from `PARTS`.
        kinds: Kinds of GGUF files, from `file_formats.KINDS`.
        engines: Names from "nano-inference" and "llama.cpp".
        sessions: Sessions of the part `turns`.
        at_once: Sessions in progress.
    """

    parts: tuple[str, ...] = ("turns", "8k")
    kinds: tuple[str, ...] = ("BF16", "Q8_0")
    engines: tuple[str, ...] = (OURS, LLAMA)
    sessions: int = 4
    at_once: int = 2
    turns: int = 12
    input_tokens: int = 4000
    output_tokens: int = 32
    cache: Path = install.CACHE


def scaled(choice: Choice, number: int) -> list[dict[str, Any]]:
    about = Statistics(choice.turns, choice.input_tokens, choice.output_tokens)
    return list(sessions(choice.sessions, about, number))


def long_prefix(choice: Choice, number: int) -> list[dict[str, Any]]:
    return one_session(number, turns=14, first=6800, more=64, out=16)


def chat(choice: Choice, number: int) -> list[dict[str, Any]]:
    return one_session(number, turns=20, first=240, more=64, out=16)


def one_session(
    number: int, *, turns: int, first: int, more: int, out: int
) -> list[dict[str, Any]]:
    """Return one session, whose blocks of 16 tokens are those of no other round."""
    requests = [
        {
            "t": float(turn),
            "type": "s",
            "in": first + more * turn,
            "out": out,
            "hash_ids": [number * 1000 + block for block in range((first + more * turn) // 16)],
            "think_time": 0.0,
        }
        for turn in range(turns)
    ]
    about = {"id": f"long-{number}", "block_size": 16, "hash_id_scope": "global"}
    return [about | {"requests": requests}]


PARTS: Mapping[str, Callable[[Choice, int], list[dict[str, Any]]]] = {
    "turns": scaled,
    "8k": long_prefix,
    "chat": chat,
}


@dataclass
class Seen:
    """Figures of one entrant over all rounds."""

    runs: list[Row] = field(default_factory=list[Row])
    handovers: list[tuple[float | None, float | None]] = field(
        default_factory=list[tuple[float | None, float | None]]
    )
    config: str = ""

    def row(self, part: str, kind: str, engine: str) -> Row:
        figures = {
            name: spread(each[name] for each in self.runs)
            for name in (
                *("turn_ms", "first_token_p50_ms", "first_token_p95_ms", "per_token_ms"),
                *("hit_share", "cold_first_token_ms", "last_turn_ms", "last_first_token_ms"),
            )
        }
        return {
            "name": f"{part}: {engine}, {kind}",
            "part": part,
            "engine": engine,
            "weights": kind,
            **figures,
            "handover_ns": [list(pair) for pair in self.handovers],
            "placement": placement(self.handovers),
            "runs": self.runs,
            "config": self.config,
        }


def measure(options: Options, choice: Choice) -> list[Row]:
    """Return a row per part, kind of file and engine. Skips what cannot run, with the reason."""
    options = replace(options, threads=options.threads or psutil.cpu_count(logical=False) or 1)
    rows: list[Row] = []
    for part in choice.parts:
        for kind in choice.kinds:
            try:
                rows += race(options, choice, part, kind)
            except (PeerFailed, OSError) as why:
                console.print(f"skipping {part}, {kind}: {why}", markup=False)
    show(f"agents, {options.model}: median [min..max]", COLUMNS, rows)
    for line in targets(rows):
        console.print(line, markup=False)
    return rows


def race(options: Options, choice: Choice, part: str, kind: str) -> list[Row]:
    path = file_of(kind, options.model, choice.cache)
    seen: dict[str, Seen] = {}
    engines = [name for name in choice.engines if is_there(name, choice)]
    for number in range(options.repeats):
        shift = number % max(len(engines), 1)
        trace = trace_of(PARTS[part](choice, number))
        for engine in engines[shift:] + engines[:shift]:
            entry = seen.setdefault(engine, Seen())
            with STARTS[engine](options, choice, path, kind) as server:
                before = handover_ns()
                entry.runs.append(replayed(server, trace, choice.at_once))
                entry.handovers.append((before, handover_ns()))
                entry.config = server.config
    return [entry.row(part, kind, engine) for engine, entry in seen.items()]


def is_there(engine: str, choice: Choice) -> bool:
    if engine != LLAMA or install.installed(choice.cache, LLAMA) is not None:
        return True
    console.print("skipping llama.cpp: it is not installed; run `make peers`.")
    return False


def trace_of(made: list[dict[str, Any]]) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        file.write_text("\n".join(map(json.dumps, made)))
        return read_trace(file).limited(time_scale=0.0)


def replayed(server: Running, trace: Trace, at_once: int) -> Row:
    """Replay and return the figures of the later turns. Raises `PeerFailed`."""
    options = replays.Options(at_once, fields=FIELDS)
    done, played = run(replays.replay(server.target, trace, options))
    if done.errors:
        raise PeerFailed(f"{len(done.errors)} turns failed: {done.errors[0]}")
    later = [each.outcome for each in played if each.index]
    firsts = [one.first_token for one in later if one.first_token is not None]
    cold = [each.outcome.first_token or 0.0 for each in played if not each.index]
    last = max(played, key=lambda each: each.index).outcome
    return {
        "turn_ms": statistics.fmean(one.ended - one.began for one in later) * 1e3,
        "first_token_p50_ms": percentile(firsts, 50) * 1e3,
        "first_token_p95_ms": percentile(firsts, 95) * 1e3,
        "per_token_ms": statistics.median(one.per_token or 0.0 for one in later) * 1e3,
        "cold_first_token_ms": statistics.median(cold) * 1e3,
        "last_turn_ms": (last.ended - last.began) * 1e3,
        "last_first_token_ms": (last.first_token or 0.0) * 1e3,
        "cached_tokens": sum(one.cached_tokens or 0 for one in later) / len(later),
        "hit_share": trace_row(done, played)["hit_share"] or 0.0,
        "summary": done.row() | trace_row(done, played),
    }


def targets(rows: list[Row]) -> list[str]:
    """Return a line per target: a turn against llama.cpp, and the first token after 8k tokens."""
    by_name = {(row["part"], row["weights"], row["engine"]): row for row in rows}
    said: list[str] = []
    for (part, kind, engine), row in by_name.items():
        if engine != OURS:
            continue
        if (other := by_name.get((part, kind, LLAMA))) is not None:
            ratio = other["turn_ms"]["median"] / row["turn_ms"]["median"]
            said.append(
                f"{part}, {kind}: llama.cpp takes {ratio:.2f} x our time for a later turn (target 1.5)"
            )
            if part == "chat":
                ratio = other["last_turn_ms"]["median"] / row["last_turn_ms"]["median"]
                said.append(f"{part}, {kind}: the 20th turn {ratio:.2f} x (target 10 for hybrids)")
        if part == "8k":
            late = row["first_token_p95_ms"]["median"]
            said.append(f"{part}, {kind}: p95 to the first token {late:.0f} ms (target 150)")
    return said


def ours(
    options: Options, choice: Choice, path: Path, kind: str
) -> AbstractContextManager[Running]:
    more = [] if kind == "BF16" else ["--quantization", "file"]
    log = log_of(choice, OURS)
    return servers.ours(options, log, *more, path=path, max_model_len=CONTEXT)


def llama(
    options: Options, choice: Choice, path: Path, kind: str
) -> AbstractContextManager[Running]:
    """Start llama-server with slots for all agents in progress, which share one KV buffer, and its
    default memory for prompts of idle slots.
    """
    port = free_port()
    settings = [
        *("-t", str(options.threads), "-tb", str(options.threads), "-np", str(SLOTS)),
        *("-c", str(SLOTS * CONTEXT), "--kv-unified", "--flash-attn", "on", "--jinja"),
    ]
    binary = install.llama_bin(choice.cache) / "llama-server"
    place = ["-m", str(path), "--host", "127.0.0.1", "--port", str(port), "--alias", servers.NAME]
    config = shlex.join(["llama-server", *settings])
    return servers.started(
        [str(binary), *place, "--no-webui", "--log-disable", *settings],
        clean_environment() | {"HOME": os.environ.get("HOME", "/")},
        port,
        log_of(choice, LLAMA),
        config=config,
    )


Start = Callable[[Options, Choice, Path, str], AbstractContextManager[Running]]
STARTS: Mapping[str, Start] = {OURS: ours, LLAMA: llama}


def log_of(choice: Choice, engine: str) -> Path:
    return choice.cache / "logs" / f"agents-{engine}.log"
