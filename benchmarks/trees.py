"""`python -m benchmarks trees`: a trainer's step on a tree of branches, beside flat sequences.

An agent's rollout branches twice: a prompt and a first turn, five answers of a tool, and two last
turns after each. Passed together, a token of the tree is computed once. Passed one by one, each of
the ten branches computes its whole context again.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Row, show, spread
from benchmarks.ours import Options, opened
from benchmarks.rl import token_ids
from nano_inference.rl import PolicyModel

PROMPT, TURN, ANSWER, LAST = 512, 128, 128, 96
ANSWERS, LASTS = 5, 2
MICRO_BATCH = 4096  # rows, more than the tree has
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "sequences": lambda row: row["name"],
    "rows of the backward pass": lambda row: row["rows"],
    "forward s": lambda row: row["forward"],
    "backward s": lambda row: row["backward"],
    "CPU s": lambda row: row["cpu"],
}


def tree(rng: random.Random) -> list[list[int]]:
    """Return the ten branches as whole sequences."""
    trunk = token_ids(rng, PROMPT + TURN)
    answers = [trunk + token_ids(rng, ANSWER) for _ in range(ANSWERS)]
    return [answer + token_ids(rng, LAST) for answer in answers for _ in range(LASTS)]


def num_rows(sequences: list[list[int]]) -> int:
    """Return the number of different prefixes: the rows of a tree."""
    return len({tuple(ids[:end]) for ids in sequences for end in range(1, len(ids))})


def measure(options: Options) -> list[Row]:
    """Return a row for the tree and one for flat sequences, in turns."""
    rng = random.Random(0)
    kinds = {"tree": 1, "flat": ANSWERS * LASTS}  # number of calls
    taken: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    differences: list[float] = []
    rows: dict[str, int] = {}
    with opened(options, max_model_len=1024, enable_prefix_caching=False) as engine:
        policy = PolicyModel(engine, micro_batch_tokens=MICRO_BATCH)
        for turn in range(options.repeats + 1):
            sequences = tree(rng)
            rows = {"tree": num_rows(sequences), "flat": sum(len(ids) - 1 for ids in sequences)}
            gradients: dict[str, dict[str, Tensor]] = {}
            for kind, calls in kinds.items():
                size = len(sequences) // calls
                parts = [sequences[at : at + size] for at in range(0, len(sequences), size)]
                seconds = _step(policy, parts)
                gradients[kind] = {
                    name: param.grad
                    for name, param in policy.named_parameters()
                    if param.grad is not None
                }
                policy.zero_grad(set_to_none=True)
                if turn:
                    taken[kind].append(seconds)
            differences.append(_difference(gradients["tree"], gradients["flat"]))
    result: list[Row] = []
    for kind, runs in taken.items():
        forward, backward, cpu = (spread(part) for part in zip(*runs, strict=True))
        row: Row = {"name": kind, "rows": rows[kind], "forward": forward, "backward": backward}
        result.append(row | {"cpu": cpu, "difference": max(differences)})
    show(
        f"a step on {ANSWERS * LASTS} branches; gradients differ by at most "
        f"{max(differences):.1e} of their norm",
        COLUMNS,
        result,
    )
    return result


def _step(policy: PolicyModel, parts: list[list[list[int]]]) -> tuple[float, float, float]:
    """Return the seconds of forward and backward passes, and the CPU seconds of both."""
    forward = backward = 0.0
    cpu = time.process_time()
    for part in parts:
        began = time.perf_counter()
        logprobs = torch.cat(policy.logprobs(part, from_position=PROMPT))
        scored = time.perf_counter()
        logprobs.sum().backward()
        forward, backward = forward + scored - began, backward + time.perf_counter() - scored
    return forward, backward, time.process_time() - cpu


def _difference(tree: dict[str, Tensor], flat: dict[str, Tensor]) -> float:
    """Return the largest norm of a difference, relative to the norm of the gradient."""
    pairs = ((tree[name], flat[name]) for name in flat)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)
