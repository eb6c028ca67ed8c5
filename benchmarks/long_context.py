"""`python -m benchmarks.long_context`: decode speed of one stream after a long context, with keys and
values in 16 and in 8 bits, in turns, and the time of a weight update.
"""

import argparse
import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.ours import Options, described, opened
from nano_inference import InferenceEngine, SamplingParams
from nano_inference.checkpoints.loading import read_tensors, resolve_model

STEPS = 64
KEPT = ("auto", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--contexts", default="128,1024,4096")
    parser.add_argument("--updates", action="store_true", help="also measure weight updates")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    options = Options(chosen.model, repeats=chosen.repeats)
    contexts = [int(each) for each in chosen.contexts.split(",")]
    sizes: dict[str, Any] = {
        "max_model_len": max(contexts) + 4 * STEPS,
        "max_batch_size": 4,
        "max_tokens_per_batch": 2048,
    }
    rows: list[measure.Row] = []
    with ExitStack() as stack:
        engines = {
            kept: stack.enter_context(opened(options, **sizes, kv_cache_dtype=kept))
            for kept in KEPT
        }
        for context in contexts:
            watches = {kept: measure.Stopwatch() for kept in KEPT}
            for kept in KEPT:
                prefill(engines[kept], context)
            for number in range(chosen.repeats):
                for kept in KEPT[:: 1 if number % 2 else -1]:
                    watches[kept].time(partial(run, engines[kept], STEPS // chosen.repeats))
            for kept, engine in engines.items():
                engine.abort()
                name = f"decode at {context:,}, {kept}"
                rates = watches[kept].rates(STEPS // chosen.repeats)
                rows.append(
                    watches[kept].row(name=name, tokens_per_s=rates, config=described(engine))
                )
        if chosen.updates:
            rows += updates(engines["auto"], options)
    rates = ("tokens_per_s", "bytes_per_s")
    columns = {
        "what": lambda r: r["name"],
        "seconds": lambda r: r["seconds"],
        "cores": lambda r: r["placement"],
    }
    columns["per second"] = lambda r: next(r[name] for name in rates if name in r)
    measure.show("one stream, and updates", columns, rows)
    measure.write("long_context", rows, options.as_dict(), chosen.out, options.model)


def prefill(engine: InferenceEngine, context: int) -> None:
    """Step until one running sequence has computed this many tokens."""
    engine.flush_cache()
    ids = [random.randrange(100, 49000) for _ in range(context)]
    engine.add_request(ids, SamplingParams(max_tokens=2 * STEPS, ignore_eos=True))
    before = engine.stats().completion_tokens
    while engine.stats().completion_tokens < before + 2:
        engine.step()


def run(engine: InferenceEngine, steps: int) -> None:
    for _ in range(steps):
        engine.step()


def updates(engine: InferenceEngine, options: Options) -> list[measure.Row]:
    rows: list[measure.Row] = []
    for dtype, weights in state_dicts(options.model).items():
        watch = measure.Stopwatch()
        for _ in range(options.repeats):
            watch.time(lambda weights=weights: engine.update_weights(weights, blocking=True))
        size = sum(tensor.numel() * 2 for tensor in weights.values())
        rows.append(watch.row(name=f"update from {dtype}", bytes_per_s=watch.rates(size)))
    return rows


def state_dicts(model: str) -> dict[str, dict[str, Any]]:
    """Return the checkpoint in float32 and in bfloat16."""
    whole = dict(read_tensors(resolve_model(model)))
    return {
        "float32": {name: tensor.float() for name, tensor in whole.items()},
        "bfloat16": {name: tensor.bfloat16() for name, tensor in whole.items()},
    }


if __name__ == "__main__":
    main()
