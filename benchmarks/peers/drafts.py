"""What drafts save in ours and in the peers: one stream, each engine without drafts and with them,
all in turns.

The prompts are those of `benchmarks.speculation`. Each engine draws with noise of its own, and vLLM
and llama.cpp may draw other tokens with drafts than without; so rates are compared, not texts. Every
setting that was tried is in the report.
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
    "tokens a step": lambda row: row["tokens_a_step"],
    "drafts drawn": lambda row: row["accepted_share"],
}


@dataclass(frozen=True)
class Stream:
    """Prompts that are completed one after the other."""

    name: str
    what: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    sampling: dict[str, Any]

    def loads(self, round_: int) -> list[Workload]:
        """A workload a prompt; in another round with another seed."""
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
    """An engine in one setting, and what it has made of the stream that is being run."""

    engine: Engine
    made: list[Made] = field(default_factory=list[Made])  # one a round: all prompts together
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
            # a step makes its newest token and those of its drafts that were drawn
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
    """A row for each stream, engine and setting. An engine that cannot be had is left out with a
    line that says why.

    Args:
        options: of all engines.
        streams: to run.
        engines: of `OURS`, `"vllm"`, `"llama.cpp"`.
        vllm_dtype: of vLLM's weights; without AVX-512 it computes in bfloat16 very slowly.
        cache: where the peers are installed.
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
    """Rounds of one stream; who starts moves on by one each round."""
    runners = [Runner(engine) for engine in engines]
    runners = [each for each in runners if attempt(each, lambda each=each: each.warm_up(stream))]
    for round_ in range(rounds):
        shift = round_ % max(len(runners), 1)
        for each in runners[shift:] + runners[:shift]:
            if attempt(each, lambda each=each, round_=round_: each.race(stream, round_)):
                console.print(
                    f"{stream.name} round {round_ + 1}: {each.label} {each.rates()[-1]:.1f} tok/s"
                )
            else:  # else its rounds would not be those of the others
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
