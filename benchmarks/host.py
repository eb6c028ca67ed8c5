"""`python -m benchmarks.host`: host time of a step by phase, with a model that does nothing.

The loop, scheduler, cache, batches and commits are real. The runner immediately returns fixed
tokens. Figures are means over the steps of a window (sequences cross a block boundary every 16
steps), then medians and extremes over windows.
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import processor
from nano_inference.config import CacheType, SchedulerConfig
from nano_inference.core.loop import PHASES, Add, EngineLoop
from nano_inference.core.sequence import CheckedRequest, Sequence
from nano_inference.device.runner import Sampled
from nano_inference.kv_cache.caches import CACHES
from nano_inference.ops.batches import ForwardBatch
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import TORCH, SamplingBatch
from nano_inference.sampling.token_rules import Rules, ThoughtBudget, TokenRules
from nano_inference.structured.mask_bits import mask_of
from nano_inference.types import SamplingParams

BLOCK_SIZE = 16
PROMPT = 256
VOCAB = 32_000
STOP = frozenset([0])  # never drawn
RESULTS = Path(__file__).parent / "results" / "host.json"


@dataclass(frozen=True)
class Case:
    """One workload. `running`: number of samples that decode. `turnover`: tokens of each sample, or
    0 for endless samples.
    """

    name: str
    running: int
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    num_samples: int = 1  # per prompt
    lookahead: int = 0
    cache_type: CacheType = "paged"
    turnover: int = 0
    rules: Rules | None = None


FILTERS = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
NAMED = {"logprob_token_ids": tuple(range(100, 108))}
# A budget that no window uses up. Each prompt opens a thought.
OPENING = tuple(range(1, 3))
THOUGHT = Rules(
    mask_of(range(VOCAB)),
    ThoughtBudget(10_000, OPENING, b"</think>", (3, 4), STOP, bytes_of=lambda _: b"a word"),
)
CASES = (
    *(Case("decode", running) for running in (1, 16, 64, 256, 512)),
    *(Case("decode, lookahead 1", running, lookahead=1) for running in (64, 256)),
    Case("decode, radix", 256, cache_type="radix"),
    Case("decode, top_p and top_k", 256, FILTERS),
    Case("decode, penalties", 256, PENALTIES),
    *(Case("decode, 8 named ids", running, NAMED) for running in (1, 16, 256)),
    *(Case("decode, thinking budget", running, rules=THOUGHT) for running in (1, 16, 256)),
    Case("groups of 8", 256, num_samples=8),
    # samples end and new prompts enter, half of each in the prefix cache
    Case("turnover", 256, turnover=64),
)


@dataclass(frozen=True)
class Row:
    """Microseconds per step: median, minimum and maximum of the window means. Phases: medians."""

    case: str
    running: int
    steps: int  # per window
    windows: int
    tokens_per_step: float
    median: float
    least: float
    most: float
    # CPU time of the stepping thread; compare this figure if other programs use the cores too
    cpu: float
    cpu_least: float
    phases: dict[str, float]
    least_phases: dict[str, float]


class NullRunner:
    """A `Runner` that computes nothing and draws the same token for all rows."""

    arrays = TORCH

    def __init__(self) -> None:
        self.draws: dict[tuple[int, int], Sampled] = {}

    def announce(self, *_: Any) -> None:
        """Do nothing: there is no other rank."""

    announce_draw = announce

    def forward(
        self,
        batches: tuple[ForwardBatch, ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: Sampled | None,
    ) -> None:
        pass

    def sample(self, result: None, batch: SamplingBatch) -> Sampled:
        num, named = len(batch), len(batch.named.ids)
        if (num, named) not in self.draws:
            reals = torch.full((num,), -1.5)
            nothing = torch.zeros((num, 0))
            ids = torch.randint(1, VOCAB, (num,), generator=torch.Generator().manual_seed(num))
            top, mass, of_named = (nothing.long(), nothing), torch.zeros(num), torch.zeros(named, 2)
            draw = Draw(ids, reals, reals, mass, None, *top, of_named)
            self.draws[num, named] = Sampled(draw, torch.zeros(0))
        return self.draws[num, named]


class Bench:
    """A loop with the sequences of a case, refilled as they end."""

    def __init__(self, case: Case, steps: int) -> None:
        self.case, self.steps = case, steps
        blocks = case.running * (PROMPT // BLOCK_SIZE + max(steps, case.turnover) // BLOCK_SIZE + 2)
        config = SchedulerConfig(max_batch_size=max(256, case.running), block_size=BLOCK_SIZE)
        cache = CACHES[case.cache_type](blocks, BLOCK_SIZE)
        self.loop = EngineLoop(cache, NullRunner(), config, case.lookahead, "null")
        self.rng = random.Random(0)
        self.stem = self.tokens(PROMPT // 2)
        self.num_requests = 0
        for _ in range(case.running // case.num_samples):
            self.add()

    def tokens(self, num: int) -> list[int]:
        return [self.rng.randrange(1, VOCAB) for _ in range(num)]

    def add(self) -> None:
        case, self.num_requests = self.case, self.num_requests + 1
        # Spread the ends over time from the start.
        first = case.turnover * self.num_requests // case.running
        length = (first if first <= case.turnover else case.turnover) or 100_000
        params = SamplingParams(max_tokens=length, **case.params)
        prompt = self.stem + self.tokens(PROMPT - len(self.stem) - len(OPENING)) + [*OPENING]
        sequence = Sequence(
            self.loop.sequences.new_id(),
            CheckedRequest(self.num_requests, len(prompt), params, STOP, self.num_requests),
            prompt,
            case.num_samples,
        )
        if case.rules is not None:
            sequence.rules = TokenRules(case.rules, len(prompt))
        self.loop.inbox.append(Add(sequence))

    def step(self) -> None:
        for _ in self.loop.step():
            self.add()

    def warm_up(self) -> None:
        """Run until every prompt is computed, or every first sample has ended."""
        for _ in range(self.case.turnover):
            self.step()
        while self.loop.sequences.waiting or len(self.loop.sequences.running) < self.case.running:
            self.step()
            if self.case.turnover:
                break
        for _ in range(4):
            self.step()

    def window(self) -> tuple[dict[str, float], float]:
        """Return microseconds per step by phase ("step" and "cpu": the whole), and tokens per step."""
        clock = self.loop.clock
        clock.nanoseconds = dict.fromkeys(PHASES, 0)
        tokens, spent, busy = self.loop.num_completion_tokens, 0, 0
        for _ in range(self.steps):
            began, woke = time.perf_counter_ns(), time.thread_time_ns()
            finished = self.loop.step()
            spent += time.perf_counter_ns() - began
            busy += time.thread_time_ns() - woke
            for _ in finished:
                self.add()
        figures = clock.microseconds(self.steps) | {
            "step": spent / 1e3 / self.steps,
            "cpu": busy / 1e3 / self.steps,
        }
        return figures, (self.loop.num_completion_tokens - tokens) / self.steps


def measure(windows: int = 7, steps: int = 64, cases: tuple[Case, ...] = CASES) -> list[Row]:
    """Measure every case, with `windows` windows of `steps` steps. Cases take turns because a
    machine's load varies.
    """
    rounds = [[measure_window(case, steps) for case in cases] for _ in range(windows)]
    return [
        summary(case, steps, list(own))
        for case, own in zip(cases, zip(*rounds, strict=True), strict=True)
    ]


def measure_window(case: Case, steps: int) -> tuple[dict[str, float], float]:
    bench = Bench(case, steps)  # always from the same state
    bench.warm_up()
    gc.collect()
    return bench.window()


def summary(case: Case, steps: int, windows: list[tuple[dict[str, float], float]]) -> Row:
    figures, tokens = [window for window, _ in windows], windows[-1][1]
    columns = {name: [window[name] for window in figures] for name in ("step", "cpu", *PHASES)}
    whole, cpu = columns.pop("step"), columns.pop("cpu")
    return Row(
        case=case.name,
        running=case.running,
        steps=steps,
        windows=len(windows),
        tokens_per_step=round(tokens, 1),
        median=round(statistics.median(whole), 1),
        least=round(min(whole), 1),
        most=round(max(whole), 1),
        cpu=round(statistics.median(cpu), 1),
        cpu_least=round(min(cpu), 1),
        phases={name: round(statistics.median(column), 1) for name, column in columns.items()},
        least_phases={name: round(min(column), 1) for name, column in columns.items()},
    )


def table(rows: list[Row]) -> str:
    """Format microseconds per step as Markdown: median, extremes, and the phases' medians."""
    phases = [name for name in PHASES if any(row.phases[name] >= 1 for row in rows)]
    lines = [["µs a step", "running", "median", "least", "most", "CPU", "CPU least", *phases]]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for row in rows:
        figures = (
            row.median,
            row.least,
            row.most,
            row.cpu,
            row.cpu_least,
            *(row.phases[name] for name in phases),
        )
        lines.append([row.case, str(row.running), *(f"{figure:.0f}" for figure in figures)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(rows: list[Row]) -> dict[str, Any]:
    """Return the figures with a description of the machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "machine": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),  # the share of other programs is unknown
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "block_size": BLOCK_SIZE,
        "prompt_tokens": PROMPT,
        "figures": [asdict(row) for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument(
        "--steps", type=int, default=64, help="steps per window, a multiple of the block size"
    )
    parser.add_argument(
        "--log",
        type=Path,
        default=None,
        help=f"write the figures to this file, such as {RESULTS.name}",
    )
    arguments = parser.parse_args()
    rows = measure(arguments.windows, arguments.steps)
    print(table(rows))
    if arguments.log is not None:
        arguments.log.parent.mkdir(exist_ok=True)
        arguments.log.write_text(json.dumps(report(rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
