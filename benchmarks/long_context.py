"""`python -m benchmarks.long_context`: decode speed of one stream after a long context, and the
time of a weight update.
"""

import argparse
import random

from benchmarks import measure
from benchmarks.ours import Options, opened
from nano_inference import InferenceEngine, SamplingParams
from nano_inference.checkpoints.loading import read_tensors, resolve_model

STEPS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    options = Options()
    rows: list[measure.Row] = []
    with opened(options) as engine:
        for context in (128, 1024, 4096):
            watch = measure.Stopwatch()
            for _ in range(repeats):
                prefill(engine, context)
                watch.time(lambda: [engine.step() for _ in range(STEPS)])
                engine.abort()
            rows.append(watch.row(name=f"decode at {context:,}", tokens_per_s=watch.rates(STEPS)))
        for dtype, weights in state_dicts(options.model).items():
            watch = measure.Stopwatch()
            for _ in range(repeats):
                watch.time(lambda weights=weights: engine.update_weights(weights, blocking=True))
            size = sum(tensor.numel() * 2 for tensor in weights.values())
            rows.append(watch.row(name=f"update from {dtype}", bytes_per_s=watch.rates(size)))
    rates = ("tokens_per_s", "bytes_per_s")
    columns = {
        "what": lambda r: r["name"],
        "seconds": lambda r: r["seconds"],
        "cores": lambda r: r["placement"],
    }
    columns["per second"] = lambda r: next(r[name] for name in rates if name in r)
    measure.show("one stream, and updates", columns, rows)
    measure.write("long_context", rows, options.as_dict(), None, options.model)


def prefill(engine: InferenceEngine, context: int) -> None:
    """Step until one running sequence has computed this many tokens."""
    engine.flush_cache()
    ids = [random.randrange(100, 49000) for _ in range(context)]
    engine.add_request(ids, SamplingParams(max_tokens=2 * STEPS, ignore_eos=True))
    engine.step()
    engine.step()


def state_dicts(model: str) -> dict[str, dict]:
    """Return the checkpoint in float32 and in bfloat16."""
    whole = dict(read_tensors(resolve_model(model)))
    return {
        "float32": {name: tensor.float() for name, tensor in whole.items()},
        "bfloat16": {name: tensor.bfloat16() for name, tensor in whole.items()},
    }


if __name__ == "__main__":
    main()
