"""Speed of the reference backend's decode and prefill in both dtypes: `python
benchmarks/reference.py --log FILE`.

There is one warm-up of the same shape with other token ids, then medians of `--repeats` runs with
their spread. Use a quiet machine: every operation waits for its slowest thread.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

DECODES = 32  # completion tokens per sequence
PROMPT = 32
PREFILL = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--log", type=Path, default=None, help="write the figures to this file")
    arguments = parser.parse_args()
    figures = [
        row
        for dtype in ("bfloat16", "float32")
        for row in measure(arguments.model, dtype, arguments.repeats)
    ]
    report = {
        "machine": machine(),
        "torch": torch.__version__,
        "model": arguments.model,
        "figures": figures,
    }
    if arguments.log is not None:
        arguments.log.write_text(json.dumps(report, indent=2) + "\n")


def measure(model: str, dtype: Any, repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    config = EngineConfig(
        model_path=model, dtype=dtype, max_model_len=1024, enable_prefix_caching=False
    )
    with InferenceEngine(config) as engine:
        rng = random.Random(0)
        for batch in (1, 16, 64):
            params = SamplingParams(max_tokens=DECODES, ignore_eos=True)
            short = SamplingParams(max_tokens=1, ignore_eos=True)

            def decode(
                n: int = batch, long: SamplingParams = params, first: SamplingParams = short
            ) -> float:
                prompts = [[rng.randrange(100, 40000) for _ in range(PROMPT)] for _ in range(n)]
                prefill = timed(lambda: engine.generate(prompts, first))
                return n * (DECODES - 1) / (timed(lambda: engine.generate(prompts, long)) - prefill)

            rows.append(row(engine, f"decode, {batch} sequences", decode, repeats))

        def prefill() -> float:
            prompt = [rng.randrange(100, 40000) for _ in range(PREFILL)]
            return PREFILL / timed(lambda: engine.generate([prompt], SamplingParams(max_tokens=1)))

        rows.append(row(engine, f"prefill, {PREFILL} tokens", prefill, repeats))
    return rows


def row(
    engine: InferenceEngine, name: str, run: Callable[[], float], repeats: int
) -> dict[str, Any]:
    run()
    rates = [run() for _ in range(repeats)]
    figure = {
        "dtype": engine.numerics.dtype,
        "what": name,
        "tokens_per_second": {
            "median": statistics.median(rates),
            "min": min(rates),
            "max": max(rates),
        },
        "runs": repeats,
    }
    spread = f"[{min(rates):.1f}..{max(rates):.1f}]"
    print(f"{engine.numerics.dtype:<9} {name:<22} {statistics.median(rates):7.1f} tok/s {spread}")
    return figure


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def machine() -> str:
    cores = torch.get_num_threads()
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        name = lines[0] if lines else name
    return f"{name}, {cores} threads"


if __name__ == "__main__":
    main()
