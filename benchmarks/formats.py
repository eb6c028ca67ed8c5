"""Weights in 8 and 4 bits, keys and values in 8 bits: speed, memory and quality,
measured in turns.
"""

import hashlib
import math
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, show, spread
from benchmarks.models import model_path
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.embedded import EMBEDDED_MODELS
from nano_inference.config import KVCacheDType
from nano_inference.engine.scoring import ScoreRequest, score_tokens
from nano_inference.models.parameters.storage import formats_of, num_bytes
from nano_inference.models.parameters.table import param_table

KINDS: tuple[str | None, ...] = (None, "int8", "int8-32", "int4", "file")
TEXT = Path(__file__).parents[1] / "docs" / "speculation.md"
MOST_TEXT = 1500  # tokens
CONTEXT = 500
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "weights": lambda row: row["name"],
    "MB": lambda row: row["weight_mb"],
    "W1 decode tok/s": lambda row: row["decode_tokens_per_s"],
    "64 samples tok/s": lambda row: row["batch_tokens_per_s"],
    "prompt tok/s": lambda row: row["prompt_tokens_per_s"],
    "perplexity": lambda row: row["perplexity"],
    "largest |logprob - float32|": lambda row: row["largest_difference"],
    "mean": lambda row: row["mean_difference"],
}
CACHES: tuple[KVCacheDType, ...] = ("auto", "int8")
CACHE = 1 << 28  # bytes
SPEED = "4 streams after 1,500 tokens, tok/s"
CACHE_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "keys and values": lambda row: row["name"],
    "bytes per token": lambda row: row["bytes_per_token"],
    "blocks": lambda row: row["blocks"],
    SPEED: lambda row: row["decode_tokens_per_s"],
    "perplexity": lambda row: row["perplexity"],
    "largest |logprob - plain cache|": lambda row: row["largest_difference"],
    "mean": lambda row: row["mean_difference"],
}


def measure(model: str, dtype: str, repeats: int, kinds: tuple[str | None, ...]) -> list[Row]:
    """Return a row per weight format.

    The speeds are medians without the first round: one stream of 128 tokens after 128, eight
    prompts of 256 tokens with 8 samples of 64 each, and a prompt of 500 tokens. The quality compares
    the logprobs of a text with those of plain float32 weights.
    """
    path = model if model in EMBEDDED_MODELS else str(model_path(model))
    rng = random.Random(3)
    with ExitStack() as stack:
        engines = {kind: stack.enter_context(_engine(path, dtype, kind)) for kind in kinds}
        speeds: dict[str | None, dict[str, list[float]]] = {kind: {} for kind in kinds}
        for turn in range(repeats + 1):
            prompts = [[rng.randrange(1000, 40_000) for _ in range(256)] for _ in range(8)]
            for kind, engine in engines.items():
                for name, value in _speeds(engine, prompts, turn).items():
                    if turn:
                        speeds[kind].setdefault(name, []).append(value)
        with _engine(path, "float32", None) as exact:
            tokens = exact.tokenizer.encode(TEXT.read_text("utf-8"))[:MOST_TEXT]
            expected = _logprobs(exact, tokens)
        rows: list[Row] = []
        for kind, engine in engines.items():
            found = _logprobs(engine, tokens)
            apart = [abs(a - b) for a, b in zip(found, expected, strict=True)]
            table = param_table(engine.spec)
            rows.append(
                {
                    "name": kind or dtype,
                    "weight_mb": round(_bytes(engine, table) / 1e6, 1),
                    **{name: spread(values) for name, values in speeds[kind].items()},
                    "perplexity": round(math.exp(-sum(found) / len(found)), 3),
                    "largest_difference": round(max(apart), 4),
                    "mean_difference": round(sum(apart) / len(apart), 5),
                    "text": f"{TEXT.name}, {len(tokens)} tokens, sha256 "
                    f"{hashlib.sha256(repr(tokens).encode()).hexdigest()[:12]}",
                    "fingerprint": engine.numerics.fingerprint,
                }
            )
    show(f"formats, {model}: median [min..max] of {repeats}, in turns", COLUMNS, rows)
    return rows


def measure_caches(model: str, dtype: str, repeats: int) -> list[Row]:
    """Return a row per KV format: capacity, quality and speed.

    The quality compares the logprobs of a text, computed in one piece, with those of a cache in
    `dtype`. The speed is measured in turns on 4 streams of 64 tokens after 1,500 tokens each.
    """
    path = model if model in EMBEDDED_MODELS else str(model_path(model))
    rng = random.Random(3)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(1500)] for _ in range(4)]
    with ExitStack() as stack:
        engines = {
            kept: stack.enter_context(
                InferenceEngine(
                    EngineConfig(
                        path,
                        dtype=dtype,  # pyright: ignore
                        device="cpu",
                        kv_cache_dtype=kept,
                        kv_cache_memory=CACHE,
                        max_model_len=2048,
                    )
                )
            )
            for kept in CACHES
        }
        speeds: dict[str, list[float]] = {kept: [] for kept in CACHES}
        for turn in range(repeats + 1 if repeats else 0):
            for kept, engine in engines.items():
                found = _decode_speed(engine, prompts, turn)
                if turn:
                    speeds[kept].append(found)
        tokens = engines["auto"].tokenizer.encode(TEXT.read_text("utf-8"))[:MOST_TEXT]
        logprobs = {kept: _logprobs(engine, tokens, MOST_TEXT) for kept, engine in engines.items()}
        rows: list[Row] = []
        for kept, engine in engines.items():
            found, budget = logprobs[kept], engine.memory_budget
            apart = [abs(a - b) for a, b in zip(found, logprobs["auto"], strict=True)]
            rows.append(
                {
                    "name": dtype if kept == "auto" else kept,
                    "bytes_per_token": budget.bytes_per_token,
                    "blocks": budget.num_units,
                    **({"decode_tokens_per_s": spread(speeds[kept])} if repeats else {}),
                    "perplexity": round(math.exp(-sum(found) / len(found)), 3),
                    "largest_difference": round(max(apart), 4),
                    "mean_difference": round(sum(apart) / len(apart), 5),
                    "text": f"{TEXT.name}, {len(tokens)} tokens, sha256 "
                    f"{hashlib.sha256(repr(tokens).encode()).hexdigest()[:12]}",
                    "fingerprint": engine.numerics.fingerprint,
                }
            )
    columns = CACHE_COLUMNS if repeats else {k: v for k, v in CACHE_COLUMNS.items() if k != SPEED}
    show(f"KV caches of {CACHE >> 20} MiB, {model}", columns, rows)
    return rows


def _decode_speed(engine: InferenceEngine, prompts: list[list[int]], turn: int) -> float:
    """Return tokens per second after prompts that are cached except for the last block."""
    seconds: list[float] = []
    for count in (1, 1, 64):  # the first run computes the prompts
        began = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True, seed=turn))
        seconds.append(time.perf_counter() - began)
    return len(prompts) * 63 / (seconds[2] - seconds[1])


def _engine(path: str, dtype: str, kind: str | None) -> InferenceEngine:
    limits = {"max_model_len": 1024, "max_batch_size": 64, "kv_cache_memory": 1 << 30}
    return InferenceEngine(
        EngineConfig(path, dtype=dtype, device="cpu", quantization=kind, **limits)  # pyright: ignore
    )


def _bytes(engine: InferenceEngine, table: Any) -> int:
    return num_bytes(table, engine.model.dtype, formats_of(engine.model.params))


def _speeds(engine: InferenceEngine, prompts: list[list[int]], turn: int) -> dict[str, float]:
    def seconds(given: list[list[int]], count: int, samples: int = 1) -> float:
        engine.flush_cache()
        params = SamplingParams(max_tokens=count, ignore_eos=True, seed=turn)
        began = time.perf_counter()
        engine.generate(given, params, samples)
        return time.perf_counter() - began

    short, long = [prompts[0][:128]], [[*prompts[1], *prompts[2]][:500]]
    first = seconds(short, 1)
    return {
        "decode_tokens_per_s": 127 / (seconds(short, 128) - first),
        "batch_tokens_per_s": 8 * 8 * 64 / seconds(prompts, 64, 8),
        "prompt_tokens_per_s": 500 / seconds(long, 1),
    }


def _logprobs(engine: InferenceEngine, tokens: list[int], context: int = CONTEXT) -> list[float]:
    """Return the logprob of each token of a text, given the earlier tokens of its piece."""
    pieces = [tokens[at : at + context] for at in range(0, len(tokens), context)]
    scores = score_tokens(engine, [ScoreRequest(piece, 1) for piece in pieces])
    return [value for each in scores for value in each.logprobs]
