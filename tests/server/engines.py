"""Clients of tiny engines, and helpers for their tests."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nano_inference.config import EngineConfig
from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.remote.client import EngineClient, RequestStream
from nano_inference.remote.process_client import ProcessClient
from nano_inference.types import Delta, EngineStats, SamplingParams, TrainingSample

Run = Callable[[Coroutine[Any, Any, Any]], Any]  # runs a coroutine on a client's loop
PATIENCE = 30.0  # seconds: a hang fails instead of blocking
LONG = 40_000  # prompt length whose one step takes many seconds


def config_of(model: Path) -> EngineConfig:
    return EngineConfig(str(model), num_threads=1, kv_cache_memory=2**20, seed=0, block_size=4)


def slow_config_of(model: Path) -> EngineConfig:
    return EngineConfig(str(model), num_threads=1, kv_cache_memory=2**28, max_tokens_per_batch=LONG)


def params_of(seed: int, max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, top_k=50)


async def finished(stream: RequestStream, deltas: Sequence[Delta] = ()) -> list[TrainingSample]:
    """Read all deltas of a request and return its samples. Check that the deltas add up."""
    samples: dict[int, TrainingSample] = {}
    seen: dict[int, tuple[int, ...]] = {}
    read = list(deltas)
    while stream.samples_left:
        read += await asyncio.wait_for(stream.next(), PATIENCE)
    for delta in read:
        seen[delta.sample_index] = seen.get(delta.sample_index, ()) + delta.token_ids
        if delta.finished is not None:
            samples[delta.sample_index] = delta.finished
    for index, sample in samples.items():
        assert seen[index] in ((), sample.completion_tokens)
    return [samples[index] for index in sorted(samples)]


def core_of(samples: list[TrainingSample]) -> str:
    """Return the parts of samples that must match bit for bit on any engine."""
    return repr(
        [replace(sample, request_id=0, group_id=None, cached_tokens=0) for sample in samples]
    )


async def until(condition: Callable[[], object], patience: float = PATIENCE) -> float:
    """Wait for a condition and return the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patience, "it did not happen in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def idle(client: EngineClient) -> None:
    """Wait until the engine is idle, and check for leaked resources."""
    began = time.monotonic()
    while True:
        stats = await client.call("stats")
        if not (stats.num_running or stats.num_waiting or stats.num_held):
            break
        assert time.monotonic() - began < PATIENCE
        await asyncio.sleep(0.01)
    assert stats.num_free_blocks == stats.num_blocks
    assert client.num_samples == 0


def child_of(client: EngineClient) -> ProcessClient:
    """Return the client of the engine process. In a fleet it is that of replica 0."""
    if isinstance(client, FleetClient):
        client = client.supervisor.replicas["0"].client
    assert isinstance(client, ProcessClient)
    return client


def stats_with(**values: Any) -> EngineStats:
    """Return the statistics of a new engine with some fields replaced."""
    zeros: dict[str, Any] = {field.name: 0 for field in fields(EngineStats)}
    others = {"step_microseconds": {}, "ranks_busy": (), "ranks_waiting": (), "speculation": None}
    return EngineStats(**zeros | others | values)
