"""The engine on the card: whole workloads, and steady decodes at a fixed number of sequences."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import card
from benchmarks.gpu.card import wait
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.workload import nano_vllm
from benchmarks.ours import run
from benchmarks.roofline import Rates, Shape
from benchmarks.workloads import WARM_UP_TOKENS, Workload
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.types import EngineStats

WARM_STEPS = 10  # decode steps before the timed ones
BLOCKS = 5  # blocks of timed steps, for the spread
MOST_STEPS = 2000  # steps until all prompts are computed


@dataclass(frozen=True)
class Decoded:
    """A steady decode.

    Attributes:
        seconds: Seconds per step, block by block.
        context: Mean number of tokens of all sequences together.
        phases: Host microseconds in an average step, by phase of the loop.
        clocks: Clocks of the card right afterwards.
    """

    seconds: list[float]
    context: float
    phases: dict[str, float]
    clocks: str

    def rates(self, batch: int) -> list[float]:
        """Return tokens per second."""
        return [batch / each for each in self.seconds]


def engine_config(scale: Scale, folder: Path, **changes: Any) -> EngineConfig:
    """Return the measured engine's config with some changes."""
    values: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": scale.dtype,
        "device": scale.device,
        "backend": "cuda",
        "batch_invariant": False,
        "lookahead": 1,
        "seed": 0,
    }
    return EngineConfig(**values | scale.options | changes)


@contextmanager
def opened(scale: Scale, folder: Path, **changes: Any) -> Iterator[InferenceEngine]:
    with InferenceEngine(engine_config(scale, folder, **changes)) as engine:
        yield engine


def warm_up_of(load: Workload, scale: Scale) -> Workload:
    """Return the same shapes with other ids and short completions, so that the timed runs find
    nothing cached.
    """
    other = nano_vllm(seed=1)
    prompts = [token for request in other.requests for token in request.prompt]
    vocab = scale.small["vocab_size"]
    place = 0
    requests = []
    for request in load.cut(WARM_UP_TOKENS).requests:
        ids = tuple(prompts[(place + i) % len(prompts)] % vocab for i in range(len(request.prompt)))
        place += len(ids)
        requests.append(type(request)(ids, request.max_tokens, request.n))
    return Workload(load.name, load.what, tuple(requests), load.sampling)


def timed(engine: InferenceEngine, load: Workload, scale: Scale, repeats: int) -> list[float]:
    """Return the seconds of a workload's runs after a warm-up, each from an empty prefix cache."""
    run(engine, warm_up_of(load, scale))
    found: list[float] = []
    for _ in range(repeats):
        engine.flush_cache()
        wait(scale.device)
        began = time.perf_counter()
        run(engine, load)
        found.append(time.perf_counter() - began)
    return found


def start_decode(
    engine: InferenceEngine, batch: int, scale: Scale, params: dict[str, Any] | None = None
) -> None:
    """Add `batch` sequences and step until all of them decode."""
    rng = random.Random(batch)
    # never reached: the caller aborts
    most = scale.context + 2 * (scale.steps + WARM_STEPS) + MOST_STEPS
    limit = engine.max_model_len - scale.context
    sampling = SamplingParams(max_tokens=min(most, limit), ignore_eos=True, **(params or {}))
    vocab = scale.small["vocab_size"]
    for _ in range(batch):
        engine.add_request([rng.randrange(vocab) for _ in range(scale.context)], sampling)
    running = engine.loop.sequences.running
    for _ in range(MOST_STEPS):
        running = engine.loop.sequences.running
        if len(running) == batch and all(len(seq.token_ids) > scale.context for seq in running):
            break
        engine.step()
    else:
        raise RuntimeError(f"{len(running)} of {batch} sequences decode after {MOST_STEPS} steps.")
    for _ in range(WARM_STEPS if scale.device != "cpu" else 1):
        engine.step()


def decode(
    engine: InferenceEngine, batch: int, scale: Scale, params: dict[str, Any] | None = None
) -> Decoded:
    """Time the steps of a steady decode of `batch` sequences."""
    start_decode(engine, batch, scale, params)
    context = lengths = sum(len(seq.token_ids) for seq in engine.loop.sequences.running)
    each = max(1, scale.steps // BLOCKS)
    before = engine.stats()
    seconds: list[float] = []
    for _ in range(BLOCKS):
        wait(scale.device)
        began = time.perf_counter()
        for _ in range(each):
            engine.step()
        wait(scale.device)
        seconds.append((time.perf_counter() - began) / each)
    clocks, after = card.clocks(scale.device), engine.stats()
    if len(engine.loop.sequences.running) != batch:
        raise RuntimeError("a sequence ended while it was timed.")
    lengths = sum(len(seq.token_ids) for seq in engine.loop.sequences.running)
    engine.abort()
    return Decoded(seconds, (context + lengths) / 2, phases_between(before, after), clocks)


def phases_between(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Return the host's microseconds in an average step since `before`, by phase."""
    steps = after.num_steps - before.num_steps
    old = before.step_microseconds
    return {
        name: (each * after.num_steps - old.get(name, 0.0) * before.num_steps) / max(steps, 1)
        for name, each in after.step_microseconds.items()
    }


def decode_bound(shape: Shape, rates: Rates, batch: int, context: float) -> float:
    """Return the minimum seconds of a decode step: its bytes or its operations, whichever takes
    longer.
    """
    reading = (shape.weights + context * shape.kv) / rates.read
    arithmetic = (batch * (shape.layers + shape.head) + context * shape.attention) / rates.product
    return max(reading, arithmetic)
