"""Shared parts of the scripts in this folder: a workload and ways to watch a fleet run it."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nano_inference import EngineConfig, SamplingParams, TrainingSample
from nano_ray import RayFleet, Replica

PROMPTS = [[3 + index, 5, 6, 7, 8, 9 + index % 3] for index in range(32)]
PARAMS = SamplingParams(max_tokens=300, ignore_eos=True, top_p=0.95)
SEEDED = [replace(PARAMS, seed=index) for index in range(len(PROMPTS))]
WIDTH = 4
PATIENCE = 120.0  # timeout in seconds for every wait

Bits = list[Any]
began = time.monotonic()


def say(*words: object) -> None:
    print(f"{time.monotonic() - began:6.1f}", *words, file=sys.stderr, flush=True)


def config_of(model: str) -> EngineConfig:
    """Return a configuration with small batches, so that the workload takes seconds."""
    return EngineConfig(
        model,
        dtype="float32",
        device="cpu",
        num_threads=1,
        kv_cache_memory=2**24,
        max_batch_size=4,
        seed=7,
    )


def bits(samples: list[TrainingSample]) -> Bits:
    """Return the fields that must not depend on the replica."""
    return [
        [s.prompt_tokens, s.completion_tokens, s.logprobs, s.log_kept_mass, s.seed, s.sample_index,
         s.weight_version, s.finish_reason, [[v.version, v.start, v.end] for v in s.weight_versions]]
        for s in samples
    ]  # fmt: skip


def until(what: str, holds: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)


class Meanwhile:
    """A call on another thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._found: Any = None
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._do, daemon=True)
        self._thread.start()

    def _do(self) -> None:
        try:
            self._found = self._call()
        except BaseException as problem:
            self._problem = problem

    def runs(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            raise TimeoutError("a call does not return")
        if self._problem is not None:
            raise self._problem
        return self._found


def serving(fleet: RayFleet) -> list[Replica]:
    return [each for each in fleet.replicas() if each.state == "serving"]


def in_the_middle(fleet: RayFleet) -> Meanwhile:
    """Start `generate` and return once every replica has sampled tokens and most remain."""
    before = fleet.stats().completion_tokens
    running = Meanwhile(lambda: bits(fleet.generate(PROMPTS, SEEDED, WIDTH)))
    until("tokens", lambda: fleet.stats().completion_tokens > before + 3000 or not running.runs())
    return running
