"""`python benchmarks/step_shares.py`: the reference backend's CPU time per step by operation.

Figures are medians over steps of one thread's own CPU time, so that other work on the machine
disturbs them little.
"""

import argparse
import functools
import json
import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

OPERATIONS = (
    "embed",
    "linear",
    "rms_norm",
    "rope_and_store",
    "plan_attention",
    "attention",
    "gate",
    "logits",
    "sample",
)
PROMPT = 128
DECODES = 16


@dataclass(frozen=True)
class Shares:
    """Milliseconds of CPU time per step: in total, by operation, and outside of all operations."""

    dtype: str
    batch: int
    step: float
    operations: dict[str, float]
    rest: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--log", type=Path, default=None, help="write the figures to this file")
    arguments = parser.parse_args()
    rows = [
        measure(arguments.model, dtype, batch)
        for dtype in ("bfloat16", "float32")
        for batch in (1, 16, 64)
    ]
    print(table(rows))
    if arguments.log is not None:
        figures = [asdict(row) for row in rows]
        report = {
            "machine": processor(),
            "threads": 1,
            "torch": torch.__version__,
            "figures": figures,
        }
        arguments.log.write_text(json.dumps(report, indent=2) + "\n")


def measure(model: str, dtype: Any, batch: int) -> Shares:
    config = EngineConfig(
        model_path=model,
        dtype=dtype,
        device="cpu",
        max_batch_size=batch,
        max_model_len=512,
        num_threads=1,
    )
    rng = random.Random(0)
    with InferenceEngine(config) as engine:
        spent: Counter[str] = Counter()
        ops = engine.model.ops
        timed = {name: count_time(getattr(ops, name), name, spent) for name in OPERATIONS}
        engine.model.ops = replace(ops, **timed)
        for _ in range(batch):
            prompt = [rng.randrange(100, 40000) for _ in range(PROMPT)]
            engine.add_request(prompt, SamplingParams(max_tokens=DECODES + 2, ignore_eos=True))
        steps: list[Counter[str]] = []
        while engine.has_pending():
            spent.clear()
            began = time.thread_time()
            engine.step()
            spent["step"] = time.thread_time() - began
            steps.append(spent.copy())
    decodes = steps[2:-1]  # the first step computes the prompts, the second warms up
    middle = {
        name: 1e3 * statistics.median(step[name] for step in decodes)
        for name in ("step", *OPERATIONS)
    }
    total = middle.pop("step")
    return Shares(str(dtype), batch, total, middle, total - sum(middle.values()))


def count_time(run: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(run)
    def counted(*args: Any) -> Any:
        began = time.thread_time()
        result = run(*args)
        spent[name] += time.thread_time() - began
        return result

    return counted


def table(rows: list[Shares]) -> str:
    heads = [f"{row.dtype}, {row.batch}" for row in rows]
    lines = [["", *heads], ["---", *["---:"] * len(rows)]]
    lines.append(["one step, ms", *(f"{row.step:.0f}" for row in rows)])
    lines += [
        [f"`{name}`", *(f"{row.operations[name] / row.step:.0%}" for row in rows)]
        for name in OPERATIONS
    ]
    lines.append(["everything else", *(f"{row.rest / row.step:.0%}" for row in rows)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
