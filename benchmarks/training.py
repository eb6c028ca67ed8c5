"""A trainer's step on the same tokens, in turns: `PolicyModel`, `LoraPolicy`, and transformers with
torch's autograd.

Groups share their prompt. Without sharing, each sample has a prompt of its own.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Row, console, show, spread
from benchmarks.models import model_path
from benchmarks.ours import Options, opened
from benchmarks.rl import token_ids
from nano_inference import LoraSettings
from nano_inference.checkpoints.embedded import EMBEDDED_MODELS
from nano_inference.rl import AdamW, LoraPolicy, PolicyModel

PROMPT, SAMPLES, TOKENS = 256, 8, 64  # samples per group, as in W2
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "who": lambda row: row["name"],
    "forward s": lambda row: row["forward"],
    "backward s": lambda row: row["backward"],
    "AdamW s": lambda row: row["optimizer"],
}
Step = Callable[[list[list[int]]], tuple[float, float, float]]  # seconds of each part


def measure(options: Options, peers: tuple[str, ...]) -> list[Row]:
    """Return a row per trainer and kind of group. `peers`: dtypes of transformers."""
    rng = random.Random(0)
    with opened(options, max_loras=1, max_model_len=512) as engine:
        steps: dict[str, Step] = {
            "PolicyModel": _ours(PolicyModel(engine)),
            "LoraPolicy, rank 16": _ours(LoraPolicy(engine, LoraSettings(rank=16))),
        }
        for dtype in peers:
            steps[f"transformers, {dtype}"] = _theirs(options.model, dtype)
        found: dict[str, list[tuple[float, float, float]]] = {}
        for turn in range(options.repeats + 1):
            ends = [token_ids(rng, TOKENS) for _ in range(SAMPLES)]
            prompt = token_ids(rng, PROMPT)
            groups = {
                "one prompt": [prompt + end for end in ends],
                "a prompt each": [token_ids(rng, PROMPT) + end for end in ends],
            }
            for name, step in steps.items():
                for kind, sequences in groups.items():
                    seconds = step(sequences)
                    taken = ", ".join(f"{part:.1f}" for part in seconds)
                    console.print(f"turn {turn}, {name}, {kind}: {taken} s")
                    if turn:
                        found.setdefault(f"{name}, {kind}", []).append(seconds)
    rows: list[Row] = []
    for name, runs in found.items():
        forward, backward, optimizer = (spread(part) for part in zip(*runs, strict=True))
        whole = statistics.median(sum(run) for run in runs)
        rows.append(
            {"name": name, "forward": forward, "backward": backward, "optimizer": optimizer}
            | {"whole": whole}
        )
    show(f"a step of {SAMPLES} x ({PROMPT} + {TOKENS}) tokens, in turns", COLUMNS, rows)
    return rows


def _ours(policy: PolicyModel | LoraPolicy) -> Step:
    optimizer = AdamW(policy.parameters(), lr=0.0)

    def step(sequences: list[list[int]]) -> tuple[float, float, float]:
        began = time.perf_counter()
        logprobs = torch.cat(policy.logprobs(sequences, from_position=PROMPT))
        made = time.perf_counter()
        logprobs.mean().backward()
        differentiated = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return made - began, differentiated - made, time.perf_counter() - differentiated

    return step


def transformers_model(model: str, dtype: str) -> Any:
    """Return the model as a module of transformers."""
    from transformers import AutoModelForCausalLM

    path, options = str(model_path(model)), dict[str, Any]()
    if model in EMBEDDED_MODELS:
        file = next(model_path(model).glob("*.gguf"), None)
        options = {"gguf_file": file.name} if file is not None else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **options)


def _theirs(model: str, dtype: str) -> Step:
    theirs = transformers_model(model, dtype).train()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.0, foreach=False)

    def step(sequences: list[list[int]]) -> tuple[float, float, float]:
        ids = torch.tensor(sequences)
        began = time.perf_counter()
        logits = theirs(ids, use_cache=False).logits[:, PROMPT - 1 : -1].float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, PROMPT:, None])
        made = time.perf_counter()
        logprobs.mean().backward()
        differentiated = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return made - began, differentiated - made, time.perf_counter() - differentiated

    return step
