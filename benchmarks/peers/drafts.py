"""Savings of drafts in ours and in the peers: one stream, each engine with and without drafts, all
in turns.

The prompts are those of `benchmarks.speculation`. Each engine draws with its own noise, and vLLM
and llama.cpp may draw other tokens with drafts than without. Rates are compared, not texts. The
report has every tried setting.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.measure import Row, console, show, spread
from benchmarks.ours import Options
from benchmarks.peers import llama_cpp, vllm_cpu
from benchmarks.peers.compare import OURS, OURS_DRAFTS, opened
from benchmarks.peers.process import Engine, Made, PeerFailed
from benchmarks.workloads import WARM_UP_TOKENS, Request, Workload

WITHOUT = "no drafts"
SETTINGS: dict[str, tuple[str, ...]] = {
    OURS: tuple(OURS_DRAFTS),
    "vllm": tuple(vllm_cpu.DRAFTS),
    "llama.cpp": tuple(llama_cpp.DRAFTS),
}
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "task": lambda row: row["task"],
    "engine": lambda row: row["engine"],
    "drafts": lambda row: row["setting"],
    "tok/s": lambda row: row["tokens_per_s"],
    "gain": lambda row: row["gain"],
    "CPU s": lambda row: row["cpu_seconds"],
    "tokens per step": lambda row: row["tokens_a_step"],
    "drafts drawn": lambda row: row["accepted_share"],
}


@dataclass(frozen=True)
class Stream:
    """Prompts that are completed one after another."""

    name: str
    what: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    sampling: dict[str, Any]

    def loads(self, round_: int) -> list[Workload]:
        """Return a workload per prompt. Each round has its own seed."""
        return [
            Workload(
                self.name,
                self.what,
                (Request(prompt, self.max_tokens),),
                self.sampling | {"seed": 1000 * round_ + place},
            )
            for place, prompt in enumerate(self.prompts)
        ]


@dataclass
class Runner:
    """An engine in one setting, and its results on the current stream."""

    engine: Engine
    made: list[Made] = field(default_factory=list[Made])  # one per round: all prompts together
    cpu: list[float] = field(default_factory=list[float])
    others: list[float] = field(default_factory=list[float])

    @property
    def label(self) -> str:
        return f"{self.engine.name} ({self.engine.setting})"

    def warm_up(self, stream: Stream) -> None:
        loads = [load.cut(WARM_UP_TOKENS) for load in stream.loads(999)]
        self.engine.prepare(stream.loads(0)[0])
        for load in loads:
            self.engine.make(load)

    def race(self, stream: Stream, round_: int) -> None:
        self.others.append(machine.others_load())
        used = self.engine.cpu_seconds()
        parts = [self.engine.make(load) for load in stream.loads(round_)]
        self.cpu.append(self.engine.cpu_seconds() - used)
        self.made.append(
            Made(
                sum(part.seconds for part in parts),
                sum(part.tokens for part in parts),
                sum(part.drafted for part in parts),
                sum(part.accepted for part in parts),
            )
        )

    def rates(self) -> list[float]:
        return [made.tokens / made.seconds for made in self.made]

    def row(self, stream: Stream, without: "Runner | None") -> Row:
        engine = self.engine
        drafted = sum(made.drafted for made in self.made)
        pairs = zip(self.rates(), without.rates() if without else (), strict=False)
        gains = [mine / plain for mine, plain in pairs]
        return {
            "name": f"{stream.name}, {engine.name}, {engine.setting}",
            "task": stream.name,
            "what": stream.what,
            "engine": engine.name,
            "setting": engine.setting,
            "config": engine.config,
            "tokens_per_s": spread(self.rates()),
            "gain": spread(gains) if gains else None,
            # a step yields one new token plus its accepted drafts
            "tokens_a_step": spread(
                made.tokens / (made.tokens - made.accepted) for made in self.made
            ),
            "accepted_share": sum(made.accepted for made in self.made) / drafted
            if drafted
            else None,
            "tokens": [made.tokens for made in self.made],
            "cpu_seconds": spread(self.cpu),
            "others_busy_cores": spread(self.others),
        }


def measure(
    options: Options,
    streams: Sequence[Stream],
    engines: Sequence[str],
    vllm_dtype: str,
    cache: Path,
) -> list[Row]:
    """Return a row per stream, engine and setting. For an unavailable engine, print the reason and
    omit it.

    Args:
        options: Options of all engines.
        streams: Streams to run.
        engines: Names from `OURS`, `"vllm"`, `"llama.cpp"`.
        vllm_dtype: Dtype of vLLM's weights. Without AVX-512, vLLM is very slow in bfloat16.
        cache: Folder where the peers are installed.
    """
    options = replace(options, threads=options.threads or psutil.cpu_count(logical=False) or 1)
    told = {"vllm": replace(options, dtype=vllm_dtype)}
    rows: list[Row] = []
    loaded: dict[tuple[str, str], Engine | None] = {}
    with ExitStack() as running:
        found = [
            opened((name, setting), told.get(name, options), cache, loaded, running)
            for name in engines
            for setting in SETTINGS[name]
        ]
        engines_here = [engine for engine in found if engine is not None]
        for stream in streams:
            rows += compete(stream, engines_here, options.repeats)
    show(
        f"drafts, {options.model}, one stream: median [min..max] of rounds, {options.threads} threads",
        COLUMNS,
        rows,
    )
    return rows


def compete(stream: Stream, engines: Sequence[Engine], rounds: int) -> list[Row]:
    """Run the rounds of one stream. The starting engine rotates by one each round."""
    runners = [Runner(engine) for engine in engines]
    runners = [each for each in runners if attempt(each, lambda each=each: each.warm_up(stream))]
    for round_ in range(rounds):
        shift = round_ % max(len(runners), 1)
        for each in runners[shift:] + runners[:shift]:
            if attempt(each, lambda each=each, round_=round_: each.race(stream, round_)):
                console.print(
                    f"{stream.name} round {round_ + 1}: {each.label} {each.rates()[-1]:.1f} tok/s"
                )
            else:  # otherwise its rounds would not match those of the others
                runners.remove(each)
    plain = {each.engine.name: each for each in runners if each.engine.setting == WITHOUT}
    rows = [each.row(stream, plain.get(each.engine.name)) for each in runners]
    for engine in engines:
        if isinstance(engine, llama_cpp.LlamaServer):  # the next stream starts another
            engine.stop()
    return rows


def attempt(runner: Runner, run: Callable[[], None]) -> bool:
    try:
        run()
    except (PeerFailed, OSError) as why:
        console.print(f"{runner.label} failed: {why}", markup=False)
        return False
    return True
