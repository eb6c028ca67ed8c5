"""The engine under test: build it, and run and time workloads."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.machine import hide_instructions
from benchmarks.measure import Row, Stopwatch, spread
from benchmarks.models import model_path
from benchmarks.workloads import Workload, warm_up, workload
from nano_inference import EngineConfig, InferenceEngine, SamplingParams

MAX_MODEL_LEN = 4352
KV_MEMORY = 4 << 30  # vLLM gets the same value


@dataclass(frozen=True)
class Options:
    """Options shared by the commands. `threads` None: the engine's own choice."""

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    backend: str = "auto"
    threads: int | None = None
    repeats: int = 3

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def engine_config(options: Options, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model_path": str(model_path(options.model)),
        "dtype": options.dtype,
        "backend": options.backend,
        "num_threads": options.threads,
        "device": "cpu",
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory": KV_MEMORY,
    }
    return EngineConfig(**values | changes)


@contextmanager
def opened(options: Options, **changes: Any) -> Iterator[InferenceEngine]:
    hide_instructions()
    with InferenceEngine(engine_config(options, **changes)) as engine:
        yield engine


def described(engine: InferenceEngine) -> str:
    """Describe the engine's arithmetic in one line."""
    numerics = engine.numerics
    invariant = "schedule-invariant" if numerics.schedule_invariant else "not schedule-invariant"
    return f"{numerics.fingerprint}, {torch.get_num_threads()} threads, {invariant}"


def arguments(load: Workload) -> tuple[list[list[int]], list[SamplingParams], int]:
    """Return the arguments of `generate`: prompts, their parameters, samples of each."""
    prompts = [list(request.prompt) for request in load.requests]
    params = [
        SamplingParams(
            **{
                "temperature": 1.0,
                "ignore_eos": True,
                **load.sampling,
                "max_tokens": request.max_tokens,
            }
        )
        for request in load.requests
    ]
    return prompts, params, load.requests[0].n


def run(engine: InferenceEngine, load: Workload) -> int:
    """Run a workload and return the number of its tokens. All tokens have logprobs."""
    tokens = sum(
        len(sample.logprobs) for sample in engine.generate(*arguments(load), progress=False)
    )
    if tokens != load.output_tokens:
        raise AssertionError(f"{load.name} made {tokens} tokens, not {load.output_tokens}.")
    return tokens


def timed(engine: InferenceEngine, name: str, repeats: int) -> Row:
    """Warm up, then time a workload by name. For W1, also time the first token and the rate of the
    other tokens.
    """
    first, load = Stopwatch(), workload(name)
    run(engine, warm_up(name))
    whole = Stopwatch()
    for _ in range(repeats):
        if name == "W1":
            engine.flush_cache()
            first.time(lambda: run(engine, load.cut(1)))
        engine.flush_cache()
        whole.time(lambda: run(engine, load))
    return whole.row(**figures(load, whole.seconds, first.seconds))


def timed_prompt(engine: InferenceEngine, load: Workload, warm: Workload, repeats: int) -> Row:
    """Warm up with one workload, then time another. Rates count prompt tokens."""
    run(engine, warm)
    watch = Stopwatch()
    for _ in range(repeats):
        engine.flush_cache()
        watch.time(lambda: run(engine, load))
    return watch.row(
        prompt_tokens=load.prompt_tokens, prompt_tokens_per_s=watch.rates(load.prompt_tokens)
    )


def figures(load: Workload, whole: list[float], first: list[float]) -> Row:
    """Return the rates of a workload from the times of its runs, and from those of its first token
    if measured.
    """
    row: Row = {
        "workload": load.name,
        "what": load.what,
        "output_tokens": load.output_tokens,
        "output_tokens_per_s": spread(load.output_tokens / seconds for seconds in whole),
    }
    if load.requests[0].max_tokens == 1:
        row["prompt_tokens_per_s"] = spread(load.prompt_tokens / seconds for seconds in whole)
    if first:
        later = load.output_tokens - 1
        row["first_token_s"] = spread(first)
        row["decode_tokens_per_s"] = spread(
            later / max(all_of_it - one, 1e-9) for all_of_it, one in zip(whole, first, strict=True)
        )
    return row
