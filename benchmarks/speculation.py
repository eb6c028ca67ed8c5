"""`python -m benchmarks speculation`: the savings of drafts, on texts of a real model.

Two engines in one process, one of them with drafts, complete each prompt in turns with the same
seeds. The tokens of both must be equal, and a difference aborts the run. The ratios compare times
of the same round: CPU seconds of the whole process (with `OMP_WAIT_POLICY=PASSIVE`, waiting threads
use none) and wall-clock time.
"""

import gc
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.measure import Row, show, spread
from benchmarks.models import model_path
from benchmarks.ours import Options, described, opened
from benchmarks.peers.drafts import Stream
from benchmarks.workloads import TAIL_MEDIAN, TAIL_SIGMA
from nano_inference import Grammar, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.config import MTP
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import SpeculationStats

CHATS = (
    "Explain how a bicycle stays upright, and list five tips for riding one in traffic.",
    "Write a short letter to a landlord about a heating that does not work.",
    "What is the difference between a virus and a bacterium? Give examples of both.",
    "Summarise the story of Robinson Crusoe in ten sentences.",
)
CODES = (
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import unittest\n\nclass TestStrings(unittest.TestCase):\n    def test_upper(self):\n",
    "<html>\n<head><title>Shop</title></head>\n<body>\n<table>\n<tr><td>Apple</td><td>1</td></tr>\n",
)
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"type": "string", "maxLength": 30},
    },
    "required": ["first_name", "last_name", "age", "occupation"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 5}


@dataclass(frozen=True)
class Task:
    """Prompts that are completed one after another, or together."""

    name: str
    what: str
    prompts: tuple[str, ...]
    params: dict[str, Any]
    samples: int = 1
    at_once: bool = False
    lengths: tuple[int, ...] = field(default=())  # max_tokens per prompt; empty: as in `params`

    def parts(self, round_: int) -> list[tuple[list[str], list[SamplingParams]]]:
        """Return the batches of arguments for `generate`."""
        each: list[SamplingParams] = []
        for place in range(len(self.prompts)):
            options: dict[str, Any] = self.params | {"seed": 1000 * round_ + place}
            if self.lengths:
                options["max_tokens"] = self.lengths[place]
            each.append(SamplingParams(**options))
        if self.at_once:
            return [(list(self.prompts), each)]
        return [([prompt], [params]) for prompt, params in zip(self.prompts, each, strict=True)]


def at(temperature: float, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Return tasks at a temperature. The names of greedy ones say so."""
    end = "" if temperature else ", greedy"
    return tuple(
        replace(each, name=each.name + end, params=each.params | {"temperature": temperature})
        for each in tasks
    )


def streams(model: str, tasks: tuple[Task, ...]) -> list[Stream]:
    """Return the single-stream tasks for other engines: token ids, plain parameters, and the schema
    as a dict.
    """
    tokenizer = load_tokenizer(model_path(model))
    found: list[Stream] = []
    for task in tasks:
        if task.at_once:
            continue
        schema = {"json_schema": PEOPLE} if "grammar" in task.params else {}
        temperature = task.params["temperature"]
        sampling = {"temperature": temperature, "ignore_eos": not schema, **schema}
        prompts = tuple(tuple(tokenizer.encode(text)) for text in task.prompts)
        found.append(Stream(task.name, task.what, prompts, task.params["max_tokens"], sampling))
    return found


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def long_tail(count: int) -> tuple[int, ...]:
    """Return lengths as in W6, up to 512."""
    r = random.Random(6)
    each = [r.lognormvariate(0, TAIL_SIGMA) * TAIL_MEDIAN for _ in range(count)]
    return tuple(min(max(round(length), 16), 512) for length in each)


_TEXT = {"max_tokens": 160, "temperature": 1.0, "ignore_eos": True}
TASKS = (
    Task("chat", "one stream of chat, 160 tokens", tuple(map(chat, CHATS)), _TEXT),
    Task("code", "one stream of code, 160 tokens", CODES, _TEXT),
    Task(
        "JSON",
        "one stream under a schema",
        ("Five people as JSON: ", "The family Miller as JSON: ", "Our team as JSON: "),
        {"max_tokens": 300, "grammar": Grammar.json_schema(PEOPLE)},
    ),
    Task(
        "long tail",
        "4 prompts x 8 requests of 16..512 tokens",
        tuple(chat(text) for text in CHATS for _ in range(8)),
        _TEXT,
        at_once=True,
        lengths=long_tail(32),
    ),
    Task(
        "batch 64",
        "4 prompts x 16 samples of 96 tokens",
        tuple(map(chat, CHATS)),
        _TEXT | {"max_tokens": 96},
        samples=16,
        at_once=True,
    ),
)


@dataclass
class Turn:
    """Times, tokens and steps of one engine on a task."""

    cpu: float = 0.0
    wall: float = 0.0
    tokens: int = 0
    steps: int = 0


def measure(
    options: Options, source: str, tasks: tuple[Task, ...] = TASKS, codes: str | None = None
) -> list[Row]:
    """Return a row per task with the speedup by drafts.

    Args:
        options: Options of the engines.
        source: Source of the drafts, `EngineConfig.speculation` or `"mtp"`.
        tasks: Tasks to run.
        codes: Quantization of the drafts of `"mtp"`. None: plain weights.
    """
    rows: list[Row] = []
    with ExitStack() as stack:
        sizes = {"max_batch_size": 64, "max_model_len": 1024, "kv_cache_memory": 1 << 30}
        plain = stack.enter_context(opened(options, **sizes))
        setting = "draft_model" if source == MTP else "speculation"
        drafts = {setting: source} | ({"draft_quantization": codes} if codes else {})
        drafted = stack.enter_context(opened(options, **sizes, **drafts))
        for engine in (plain, drafted):
            engine.generate(CODES[0], SamplingParams(max_tokens=8), progress=False)
        for task in tasks:
            before = stats_of(drafted)
            turns: list[tuple[Turn, Turn]] = []
            for round_ in range(options.repeats):
                one, other = Turn(), Turn()
                for prompts, params in task.parts(round_):
                    pairs = [(plain, one), (drafted, other)]
                    found = [
                        timed(engine, turn, prompts, params, task.samples)
                        for engine, turn in (pairs if round_ % 2 == 0 else pairs[::-1])
                    ]
                    for a, b in zip(*found, strict=True):
                        if a.logprobs != b.logprobs:
                            raise AssertionError(f"{task.name}: drafts have changed a sample.")
                turns.append((one, other))
            rows.append(row(task, turns, before, stats_of(drafted)))
            rows[-1]["config"] = described(drafted)
        costs = stats_of(drafted)
        rows.append(
            {
                "name": "a step by its rows",
                "rows": costs.step_rows,
                "seconds": [round(each, 5) for each in costs.step_seconds],
            }
        )
    show(f"drafts of {source}, {options.model}", COLUMNS, rows[:-1])
    return rows


def stats_of(engine: InferenceEngine) -> SpeculationStats:
    found = engine.stats().speculation
    return found if found is not None else SpeculationStats((), {}, {})


def timed(
    engine: InferenceEngine,
    turn: Turn,
    prompts: list[str],
    params: list[SamplingParams],
    samples: int,
) -> list[TrainingSample]:
    """Complete prompts, and add the costs to a turn."""
    engine.flush_cache()
    gc.collect()
    steps = engine.stats().num_steps
    began, busy = time.perf_counter(), time.process_time()
    found = engine.generate(prompts, params, samples, progress=False)
    turn.cpu += time.process_time() - busy
    turn.wall += time.perf_counter() - began
    turn.steps += engine.stats().num_steps - steps
    turn.tokens += sum(len(sample.completion_tokens) for sample in found)
    return found


def row(
    task: Task, turns: list[tuple[Turn, Turn]], before: SpeculationStats, after: SpeculationStats
) -> Row:
    """Return a row of the report, with the drafts of this task only."""
    return {
        "name": task.name,
        "what": task.what,
        "cpu_ratio": spread(one.cpu / other.cpu for one, other in turns),
        "wall_ratio": spread(one.wall / other.wall for one, other in turns),
        "tokens_per_s": spread(other.tokens / other.wall for _, other in turns),
        "fewer_steps": spread(one.steps / other.steps for one, other in turns),
        "drafted": {
            name: minus(each, before.drafted.get(name, ())) for name, each in after.drafted.items()
        },
        "accepted": {
            name: minus(each, before.accepted.get(name, ()))
            for name, each in after.accepted.items()
        },
    }


def minus(counts: tuple[int, ...], earlier: tuple[int, ...]) -> list[int]:
    return [n - (earlier[i] if i < len(earlier) else 0) for i, n in enumerate(counts)]


def accepted(row: Row) -> str:
    """Return the accepted share of the drafts at the first positions."""
    drafted = [sum(column) for column in zip(*padded(row["drafted"]), strict=True)]
    taken = [sum(column) for column in zip(*padded(row["accepted"]), strict=True)]
    return " ".join(f"{t / d:.2f}" for t, d in zip(taken[:4], drafted, strict=False) if d)


def padded(counts: dict[str, list[int]]) -> list[list[int]]:
    most = max(map(len, counts.values()), default=0)
    return [[*each, *[0] * (most - len(each))] for each in counts.values()]


COLUMNS: dict[str, Callable[[Row], Any]] = {
    "task": lambda row: row["name"],
    "CPU, times": lambda row: row["cpu_ratio"],
    "wall, times": lambda row: row["wall_ratio"],
    "steps, times fewer": lambda row: row["fewer_steps"],
    "drawn, by place": accepted,
}
