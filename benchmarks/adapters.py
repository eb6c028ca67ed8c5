"""Adapters: the cost of rows with and without one, and of an update, measured in turns."""

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Row, show, spread
from benchmarks.ours import Options, opened
from benchmarks.rl import token_ids
from nano_inference import InferenceEngine, LoraSettings, SamplingParams
from nano_inference.rl import LoraPolicy

RANK = 16
HEAD = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
SHARES: dict[str, tuple[str | None, ...]] = {  # adapters that the requests of a step cycle through
    "none": (None,),
    "one": ("0",),
    "8 by turns": tuple(map(str, range(8))),
    "one with the head": ("head",),
}
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "adapters": lambda row: row["name"],
    "one stream tok/s": lambda row: row.get("decode_tokens_per_s", "-"),
    "64 requests tok/s": lambda row: row.get("batch_tokens_per_s", "-"),
    "prompt of 500 tokens, tok/s": lambda row: row.get("prompt_tokens_per_s", "-"),
    "update ms": lambda row: row.get("update_ms", "-"),
    "copy of its bytes ms": lambda row: row.get("copy_ms", "-"),
}


def measure(options: Options) -> list[Row]:
    """Return a row per share of adapters, and one for updates."""
    rng = random.Random(0)
    with opened(options, max_loras=9, max_model_len=1024, max_batch_size=64) as engine:
        for name in {each for names in SHARES.values() for each in names} - {None}:
            policy = LoraPolicy(engine, settings("lm_head" if name == "head" else ""))
            with torch.no_grad():
                for param in policy.parameters():
                    param.add_(torch.randn(param.shape) * 0.01)
            policy.publish(name)
        speeds: dict[str, dict[str, list[float]]] = {share: {} for share in SHARES}
        for turn in range(options.repeats + 1):
            prompts = [token_ids(rng, 128) for _ in range(64)]
            long = token_ids(rng, 500)
            for share, names in SHARES.items():
                for what, value in _speeds(engine, prompts, long, names, turn).items():
                    if turn:
                        speeds[share].setdefault(what, []).append(value)
        rows: list[Row] = [
            {"name": share, **{what: spread(values) for what, values in own.items()}}
            for share, own in speeds.items()
        ]
        rows.append(_updates(engine, max(options.repeats, 9)))
    show(f"adapters of rank {RANK}: median of {options.repeats}, in turns", COLUMNS, rows)
    return rows


def settings(targets: str = "") -> LoraSettings:
    return LoraSettings(rank=RANK, targets=HEAD if targets else "all-linear")


def _speeds(
    engine: InferenceEngine,
    prompts: list[list[int]],
    long: list[int],
    names: tuple[str | None, ...],
    turn: int,
) -> dict[str, float]:
    def seconds(given: list[list[int]], count: int) -> float:
        engine.flush_cache()
        params = [
            SamplingParams(
                max_tokens=count, ignore_eos=True, seed=turn, adapter=names[place % len(names)]
            )
            for place in range(len(given))
        ]
        began = time.perf_counter()
        engine.generate(given, params, progress=False)
        return time.perf_counter() - began

    first = seconds(prompts[:1], 1)
    return {
        "decode_tokens_per_s": 127 / (seconds(prompts[:1], 128) - first),
        "batch_tokens_per_s": 64 * 32 / seconds(prompts, 32),
        "prompt_tokens_per_s": 500 / seconds([long], 1),
    }


def _updates(engine: InferenceEngine, repeats: int) -> Row:
    policy = LoraPolicy(engine, settings(), name="0")
    updates: list[float] = []
    copies: list[float] = []
    matrices = [param.detach() for param in policy.parameters()]
    for _ in range(repeats):
        began = time.perf_counter()
        held = [matrix.clone() for matrix in matrices]
        copies.append((time.perf_counter() - began) * 1e3)
        del held
        began = time.perf_counter()
        policy.publish()
        updates.append((time.perf_counter() - began) * 1e3)
    size = sum(matrix.nbytes for matrix in matrices)
    return {
        "name": f"an update, {size / 1e6:.1f} MB",
        "update_ms": spread(updates),
        "copy_ms": spread(copies),
    }
