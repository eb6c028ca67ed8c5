"""Peak memory of a trainer's step on one long sequence: each trainer in a process of its own.

`python -m benchmarks.training_memory WHO MODEL TOKENS DTYPE` is such a process.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Row, show
from benchmarks.ours import Options, opened
from benchmarks.rl import token_ids
from nano_inference.rl import PolicyModel

OURS = {"PolicyModel, kept": False, "PolicyModel, recomputed": True}  # activations
PLAIN, CHECKPOINTED = "transformers", "transformers, recomputed"
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "who": lambda row: row["name"],
    "GiB before": lambda row: row["before_gib"],
    "GiB at the peak": lambda row: row["peak_gib"],
}


def measure(options: Options, lengths: tuple[int, ...], peers: tuple[str, ...]) -> list[Row]:
    """Return a row per trainer and length of the sequence. `peers`: dtypes of transformers."""
    runs = [(who, options.dtype) for who in OURS]
    runs += [(who, dtype) for dtype in peers for who in (PLAIN, CHECKPOINTED)]
    rows: list[Row] = []
    for tokens in lengths:
        for who, dtype in runs:
            command = [sys.executable, "-m", "benchmarks.training_memory"]
            command += [who, options.model, str(tokens), dtype]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            figures = json.loads(said.splitlines()[-1])
            rows.append({"name": f"{who}, {dtype}, {tokens} tokens", **figures})
    show("memory of a forward and backward pass of one sequence", COLUMNS, rows)
    return rows


def run(who: str, model: str, tokens: int, dtype: str) -> dict[str, float]:
    """Return memory in GiB before a step and at its peak, in this process."""
    with ExitStack() as stack:
        if who in OURS:
            step = _ours(OURS[who], model, tokens, dtype, stack)
        else:
            step = _theirs(who, model, tokens, dtype)
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present size
        before = _peak()
        step()
    return {"before_gib": round(before, 3), "peak_gib": round(_peak(), 3)}


def _peak() -> float:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def _ours(
    recomputes: bool, model: str, tokens: int, dtype: str, stack: ExitStack
) -> Callable[[], None]:
    options = Options(model, dtype, "auto", None, 1)
    engine = stack.enter_context(opened(options, max_model_len=tokens + 1))
    products = getattr(torch, dtype)
    policy = PolicyModel(engine, gradient_dtype=products, recompute_activations=recomputes)
    sequence = token_ids(random.Random(0), tokens)

    def step() -> None:
        policy.logprobs([sequence], from_position=1)[0].sum().backward()

    return step


def _theirs(who: str, model: str, tokens: int, dtype: str) -> Callable[[], None]:
    from benchmarks.training import transformers_model

    theirs = transformers_model(model, dtype).train()
    if who == CHECKPOINTED:
        theirs.gradient_checkpointing_enable()
    ids = torch.tensor([token_ids(random.Random(0), tokens)])

    def step() -> None:
        logits = theirs(ids, use_cache=False).logits[:, :-1].float()
        torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).sum().backward()

    return step


if __name__ == "__main__":
    name, path, count, kind = sys.argv[1:]
    print(json.dumps(run(name, path, int(count), kind)))
