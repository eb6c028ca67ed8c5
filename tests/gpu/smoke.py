"""Check that an engine starts on this GPU and that its graphs compute what its kernels compute.

    python -m tests.gpu.smoke [--models FOLDER] [--dry-run]

The model has the shape of Qwen3-0.6B and random weights. It runs with default settings and with
`batch_invariant`. Each run prints the start-up line, the memory table, a few tokens and the number
of replayed steps, and checks that graphs and eager steps give the same bits. The second run happens
even if the first fails. A failure prints its stack.
"""

import argparse
import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.interpreter import interpret

TOKENS = 8
PROMPTS = ([5, 9, 2], [7] * 40, [11, 3] * 150)


def generate(folder: Path, scale: Any, count: int, **changes: Any) -> tuple[list[Any], int]:
    """Return the samples' tokens and logprobs, and the number of replayed steps."""
    from nano_inference import EngineConfig, InferenceEngine, SamplingParams

    values = {"model_path": str(folder), "device": scale.device, "dtype": scale.dtype}
    config = EngineConfig(**values, backend="cuda", **scale.options | changes)
    began = time.monotonic()
    with InferenceEngine(config) as engine:
        print(f"started in {time.monotonic() - began:.1f} s", flush=True)
        print(engine.memory_budget, flush=True)
        prompts = [prompt[: engine.max_model_len - TOKENS - 1] for prompt in PROMPTS[:count]]
        params = [
            SamplingParams(
                max_tokens=TOKENS if count > 1 else 3,
                seed=i,
                ignore_eos=True,
                temperature=float(i > 0),
            )
            for i in range(count)
        ]
        samples = engine.generate(prompts, params, progress=False)
        outputs = [(s.completion_tokens, s.logprobs) for s in samples]
        return outputs, getattr(engine.runner, "num_replays", 0)


def try_one(folder: Path, scale: Any, count: int, *, batch_invariant: bool) -> bool:
    """Run one engine with graphs and one without. Return True if all is well."""
    name = "batch_invariant" if batch_invariant else "fast"
    print(f"-- {name}", flush=True)
    try:
        outputs, replays = generate(folder, scale, count, batch_invariant=batch_invariant)
        print(f"tokens {[tokens for tokens, _ in outputs]}", flush=True)
        print(f"steps that were replayed: {replays}", flush=True)
        if not replays:
            raise RuntimeError("no step was replayed from a graph.")
        eager, _ = generate(
            folder, scale, count, batch_invariant=batch_invariant, cuda_graphs=False
        )
    except Exception:
        traceback.print_exc()
        return False
    same = eager == outputs
    # fast kernels for few rows add in another order than those of eager steps
    print(f"graphs equal eager steps to the bit: {same}", flush=True)
    return same or not batch_invariant


def main() -> int:
    parser = argparse.ArgumentParser(description="Does an engine start on this GPU at all?")
    parser.add_argument("--models", type=Path, help="of the random model; it stays there")
    parser.add_argument(
        "--dry-run", action="store_true", help="a toy model in Triton's interpreter, on the CPU"
    )
    options = parser.parse_args()
    if options.dry_run:
        interpret()
    from benchmarks.gpu.models import random_model
    from benchmarks.gpu.scale import REAL, TOY

    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    scale = TOY if options.dry_run else REAL
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_model(
            (options.models or Path(temporary)) / "small", scale.small, scale.device
        )
        count = 1 if options.dry_run else len(PROMPTS)
        good = [try_one(folder, scale, count, batch_invariant=exact) for exact in (False, True)]
    print(
        f"verdict: fast {'starts' if good[0] else 'FAILED'}, batch_invariant {'starts' if good[1] else 'FAILED'}",
        flush=True,
    )
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
