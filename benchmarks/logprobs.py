"""`python -m benchmarks.logprobs`: the cost of logprobs on W2, compared with kernels built without
them.

Two engines run in turns. The head of one skips the sums for logprobs, so the logprobs that it
reports are wrong.
"""

import argparse
from dataclasses import replace
from typing import Any

from benchmarks import measure
from benchmarks.ours import Options, arguments, opened
from benchmarks.workloads import warm_up, workload
from nano_inference import InferenceEngine
from nano_inference.ops.cpu.build import best_instruction_set, build
from nano_inference.ops.cpu.library import open_library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    name = best_instruction_set()
    bare = open_library(build(name, defines=("NANO_NO_LOGPROBS",)))
    rows: list[measure.Row] = []
    options = Options(backend="cpu")
    with opened(options) as usual, opened(options) as without:
        head: Any = getattr(without.model.ops.sample, "__self__")  # noqa: B009
        head.kernels = bare
        for label, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            watches = {"with": measure.Stopwatch(), "without": measure.Stopwatch()}
            for each in (usual, without):
                run(each, warm_up("W2"), temperature)
            for _ in range(repeats):
                for key, each in (("with", usual), ("without", without)):
                    each.flush_cache()
                    watches[key].time(lambda each=each, t=temperature: run(each, workload("W2"), t))
            rows += [watch.row(name=f"{label}, {key} logprobs") for key, watch in watches.items()]
            costs = measure.spread(
                a / b - 1
                for a, b in zip(watches["with"].seconds, watches["without"].seconds, strict=True)
            )
            rows.append({"name": f"{label}, cost", "share": costs})
            print(f"{label}: logprobs cost {100 * costs['median']:.2f} % of W2 {costs['runs']}")
    measure.write("logprobs", rows, options.as_dict(), None, options.model)


def run(engine: InferenceEngine, load: Any, temperature: float) -> None:
    prompts, params, n = arguments(load)
    engine.generate(prompts, [replace(each, temperature=temperature) for each in params], n)


if __name__ == "__main__":
    main()
