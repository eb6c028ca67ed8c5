"""Our engine against the installed peers, in turns: a round times each engine once, and rounds
repeat.

One engine computes at a time, and the others are stopped. The best of a peer's settings counts for
each workload. Peers are not asked for logprobs, but ours always returns them. Round k uses the ids
of variant k, so no engine finds a prompt of an earlier run cached.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine, models
from benchmarks.measure import Row, Stopwatch, cell, console, show, spread
from benchmarks.ours import Options, figures
from benchmarks.peers import install, llama_cpp, transformers_cpu, vllm_cpu
from benchmarks.peers.process import Engine, PeerFailed, Worker
from benchmarks.workloads import warm_up, workload

OURS = "nano-inference"
PEERS = ("vllm", "llama.cpp", "transformers")
# additional options of our engine, by setting
OURS_SETTINGS: dict[str, dict[str, Any]] = {"default": {}}
ONE_STREAM = {"max_batch_size": 8, "max_model_len": 1024, "kv_cache_memory": 1 << 30}
OURS_DRAFTS: dict[str, dict[str, Any]] = {
    "no drafts": ONE_STREAM,
    "suffix": ONE_STREAM | {"speculation": "suffix"},
    "suffix, its own weights in int4": ONE_STREAM
    | {"speculation": "suffix", "draft_model": "self", "draft_quantization": "int4"},
}
FIRST_TOKEN_VARIANT = 500  # the separate run for the first token has its own ids
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "workload": lambda row: row["workload"],
    "engine": lambda row: row["engine"],
    "setting": lambda row: row["setting"],
    "seconds": lambda row: row["seconds"],
    "output tok/s": lambda row: row["output_tokens_per_s"],
    "prompt tok/s": lambda row: row.get("prompt_tokens_per_s"),
    "decode tok/s": lambda row: row.get("decode_tokens_per_s"),
    "first token, s": lambda row: row.get("first_token_s"),
    "CPU s": lambda row: row["cpu_seconds"],
    "memory, MiB": lambda row: row["memory_mib"],
    "cores": lambda row: row["placement"],
}


@dataclass
class Entrant:
    """An engine in one setting, and its times on the current workload."""

    engine: Engine
    whole: Stopwatch = field(default_factory=Stopwatch)
    first: Stopwatch = field(default_factory=Stopwatch)
    memory: int = 0
    peak: int = 0
    cpu: list[float] = field(default_factory=list[float])  # CPU seconds of its processes
    others: list[float] = field(default_factory=list[float])  # busy cores, all engines stopped

    @property
    def label(self) -> str:
        return f"{self.engine.name} ({self.engine.setting})"

    def warm_up(self, name: str) -> None:
        self.engine.prepare(workload(name))
        self.engine.run(warm_up(name))

    def race(self, name: str, number: int) -> None:
        """Run one round of a workload."""
        if name == "W1":
            before = machine.handover_ns()
            self.first.add(
                self.engine.run(workload(name, FIRST_TOKEN_VARIANT + number).cut(1)), before
            )
        self.others.append(machine.others_load())
        before, used = machine.handover_ns(), self.engine.cpu_seconds()
        self.whole.add(self.engine.run(workload(name, number)), before)
        self.cpu.append(self.engine.cpu_seconds() - used)
        self.memory = self.engine.memory()
        self.peak = max(self.peak, self.engine.peak_memory())

    def row(self, name: str) -> Row:
        engine = self.engine
        return self.whole.row(
            name=f"{name}, {engine.name}, {engine.setting}",
            engine=engine.name,
            setting=engine.setting,
            config=engine.config,
            memory_mib=round(self.memory / 2**20),
            peak_memory_mib=round(self.peak / 2**20),
            cpu_seconds=spread(self.cpu),
            others_busy_cores=spread(self.others),
            **figures(workload(name), self.whole.seconds, self.first.seconds),
        )


@dataclass(frozen=True)
class Choice:
    """The engines that take part. Empty settings: the default one of each workload.

    Attributes:
        engines: Names from "nano-inference", "vllm", "llama.cpp", "transformers".
        vllm, llama, transformers: Names of settings. An unknown name is an error.
        limit: Seconds. An engine that takes longer in a round skips the remaining rounds.
    """

    engines: tuple[str, ...] = (OURS, "vllm", "llama.cpp")
    vllm: tuple[str, ...] = ()
    llama: tuple[str, ...] = ()
    transformers: tuple[str, ...] = ()
    limit: float = 60.0
    cache: Path = install.CACHE


def measure(options: Options, workloads: Sequence[str], choice: Choice) -> list[Row]:
    """Measure all workloads, with one pass per requested peer setting, because two vLLM processes
    would fill the memory.
    """
    options = replace(options, threads=options.threads or psutil.cpu_count(logical=False) or 1)
    rows: list[Row] = []
    asked = (choice.vllm, choice.llama, choice.transformers)
    for number in range(max(1, *map(len, asked))):
        with ExitStack() as running:
            loaded: dict[tuple[str, str], Engine | None] = {}
            for name in workloads:
                keys = wanted(name, choice, number)
                engines = [opened(key, options, choice.cache, loaded, running) for key in keys]
                rows += compete(
                    name, [engine for engine in engines if engine], options.repeats, choice.limit
                )
    show(
        f"peers, {options.model}: median [min..max] of rounds, {options.threads} threads",
        COLUMNS,
        rows,
    )
    for line in ratios(rows):
        console.print(line, markup=False)
    return rows


def wanted(name: str, choice: Choice, number: int) -> list[tuple[str, str]]:
    """Return (engine, setting) pairs for a workload in a pass. Our engine takes part in the first
    pass.
    """
    pairs = [(OURS, "default")] if OURS in choice.engines and number == 0 else []
    for peer, asked, table in (
        ("vllm", choice.vllm, vllm_cpu),
        ("llama.cpp", choice.llama, llama_cpp),
        ("transformers", choice.transformers, transformers_cpu),
    ):
        default = table.DEFAULTS.get(name, next(iter(table.SETTINGS)))
        settings = (asked or (default,))[number : number + 1]
        pairs += [(peer, setting) for setting in settings if peer in choice.engines]
    return pairs


def opened(
    key: tuple[str, str],
    options: Options,
    cache: Path,
    loaded: dict[tuple[str, str], Engine | None],
    running: ExitStack,
) -> Engine | None:
    """Return the engine, started at its first use. If it is unavailable, print the reason and
    return None.
    """
    if key not in loaded:
        loaded[key] = started(key, lambda: start(*key, options, cache), cache, running)
    return loaded[key]


def started(
    key: tuple[str, str], begin: Callable[[], Engine], cache: Path, running: ExitStack
) -> Engine | None:
    """Start an engine with `begin`; `running` stops it. If it is unavailable, print the reason and
    return None.
    """
    name, setting = key
    try:
        if name in ("vllm", "llama.cpp") and install.installed(cache, name) is None:
            raise PeerFailed("it is not installed; run `make peers`.")
        engine = begin()
        running.callback(engine.stop)
    except PeerFailed as why:
        console.print(f"skipping {name} ({setting}): {why}", markup=False)
        return None
    return engine


def start(name: str, setting: str, options: Options, cache: Path) -> Engine:
    log, folder, threads = (
        cache / "logs" / f"{name}.log",
        models.model_path(options.model),
        options.threads or 1,
    )
    if name == "vllm":
        return vllm_cpu.vllm_worker(setting, folder, options.dtype, threads, cache, log)
    if name == "transformers":
        return transformers_cpu.transformers_worker(setting, folder, options.dtype, threads, log)
    if name == "llama.cpp":
        return llama_cpp.LlamaServer(setting, llama_cpp.gguf_of(folder, cache), threads, cache, log)
    return ours(setting, options, (OURS_SETTINGS | OURS_DRAFTS)[setting], log)


def ours(setting: str, options: Options, changes: Mapping[str, Any], log: Path) -> Worker:
    """Start this engine in a separate process. Raises `PeerFailed`."""
    command = [sys.executable, "-m", "benchmarks.peers.ours_worker"]
    command += [json.dumps(options.as_dict()), json.dumps(changes)]
    return Worker(OURS, setting, command, os.environ, log, "")


def compete(name: str, engines: Sequence[Engine], rounds: int, limit: float) -> list[Row]:
    """Run the rounds of one workload. The starting engine rotates by one each round."""
    entrants: list[Entrant] = []
    for engine in engines:
        entrant = Entrant(engine)
        if attempt(entrant, lambda entrant=entrant: entrant.warm_up(name)):
            entrants.append(entrant)
    for number in range(rounds):
        shift = number % max(len(entrants), 1)
        for entrant in entrants[shift:] + entrants[:shift]:
            slow = entrant.whole.seconds and entrant.whole.seconds[-1] > limit
            if not slow and attempt(
                entrant, lambda entrant=entrant, number=number: entrant.race(name, number)
            ):
                console.print(
                    f"{name} round {number + 1}: {entrant.label} {entrant.whole.seconds[-1]:.2f} s"
                )
    rows = [entrant.row(name) for entrant in entrants if entrant.whole.seconds]
    for engine in engines:
        if isinstance(engine, llama_cpp.LlamaServer):  # sized for one workload
            engine.stop()
    return rows


def attempt(entrant: Entrant, run: Callable[[], None]) -> bool:
    try:
        run()
    except (PeerFailed, OSError) as why:
        console.print(f"{entrant.label} failed: {why}", markup=False)
        return False
    return True


def best(rows: Sequence[Row], name: str, engine: str) -> Row | None:
    """Return the row of an engine's fastest setting on a workload."""
    of_engine = [row for row in rows if row["workload"] == name and row["engine"] == engine]
    return min(of_engine, key=lambda row: row["seconds"]["median"], default=None)


def ratio(ours: Row, peer: Row) -> dict[str, Any]:
    """Return our speedup, round by round: both ran in the same round."""
    pairs = list(zip(ours["seconds"]["runs"], peer["seconds"]["runs"], strict=False))
    return spread(theirs / own for own, theirs in pairs)


def ratios(rows: Sequence[Row]) -> list[str]:
    """Return one line per workload: ours against the best setting of each peer."""
    lines: list[str] = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        ours = best(rows, name, OURS)
        found = {peer: best(rows, name, peer) for peer in PEERS}
        parts = [
            f"{cell(ratio(ours, row))} x {peer} ({row['setting']})"
            for peer, row in found.items()
            if ours and row
        ]
        if parts:
            lines.append(f"{name}: ours is {', '.join(parts)}")
    return lines
