"""`python -m benchmarks.segments`: the cost for one rank of adding o and down in eight segments.

The bare products run in turns with unsegmented ones, on one thread. The fastest of many rounds
counts, so that other work on the machine matters little. W1 and W2 run on two engines in turns. One
of them has no segments, so its bits do not match its fingerprint.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks import measure
from benchmarks.ours import Options, arguments, opened
from benchmarks.workloads import warm_up, workload
from nano_inference.ops.cpu import library
from nano_inference.ops.cpu.program import Program
from nano_inference.ops.cpu.recorder import Recorder
from nano_inference.ops.cpu.weights import PackedWeight
from nano_inference.parallel.bounds import row_segments, segment_unit

# K, N, unit of the segments
SHAPES = ((576, 576, 64), (1536, 576, None), (1024, 3072, 128), (2048, 3072, 128))
BATCHES = (1, 8, 64)
WEIGHTS = 2**23  # bytes of different weights that are read in turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of the workloads; 0: only the products"
    )
    given = parser.parse_args()
    rows: list[measure.Row] = []
    for columns, outputs, unit in SHAPES:
        segments = row_segments(columns, unit or segment_unit(columns))
        for batch in BATCHES:
            plain, cut = fastest(columns, outputs, batch, (None, segments), given.rounds)
            rows.append(
                {
                    "name": f"{columns} x {outputs}, {batch} rows",
                    "plain_us": plain,
                    "segments_us": cut,
                }
            )
            print(
                f"{rows[-1]['name']}: {plain:.1f} us, in segments {cut:.1f} "
                f"({100 * (cut / plain - 1):+.1f} %)"
            )
    options = Options(backend="cpu")
    if given.repeats:
        with opened(options) as usual, opened(options) as without:
            without.model.ops = replace(without.model.ops, in_segments=False)
            for name in ("W1", "W2"):
                watches = {"with": measure.Stopwatch(), "without": measure.Stopwatch()}
                for each in (usual, without):
                    each.generate(*arguments(warm_up(name)))
                for _ in range(given.repeats):
                    for key, each in (("with", usual), ("without", without)):
                        each.flush_cache()
                        watches[key].time(
                            lambda each=each, name=name: each.generate(*arguments(workload(name)))
                        )
                rows += [
                    watch.row(name=f"{name}, {key} segments") for key, watch in watches.items()
                ]
                pairs = zip(watches["with"].seconds, watches["without"].seconds, strict=True)
                costs = measure.spread(a / b - 1 for a, b in pairs)
                rows.append({"name": f"{name}, cost", "share": costs})
                print(f"{name}: segments cost {100 * costs['median']:.2f} % {costs['runs']}")
    measure.write("segments", rows, options.as_dict(), None, options.model)


def fastest(
    columns: int, outputs: int, batch: int, ways: Sequence[tuple[int, ...] | None], rounds: int
) -> list[float]:
    """Return the microseconds of a product with each of these segments, measured in turns."""
    count = max(2, WEIGHTS // (2 * columns * outputs))
    weights = [PackedWeight(outputs, columns, torch.bfloat16, 1) for _ in range(count)]
    for weight in weights:
        weight.write(0, torch.randn(outputs, columns))
    x = torch.randn(batch, columns).to(torch.bfloat16)
    programs: list[Program] = []
    for segments in ways:
        recorder = Recorder(torch.bfloat16)
        source = recorder.new(columns, torch.bfloat16)
        sums = [recorder.linear(source, weight, None, segments) for weight in weights]
        programs.append(Program(recorder, (source,), (sums[-1],), None, 1, library.load()))
    best = [float("inf")] * len(ways)
    for turn in range(rounds):
        for way in range(len(ways)) if turn % 2 else reversed(range(len(ways))):
            start = time.perf_counter()
            programs[way].run(batch, (x,))
            best[way] = min(best[way], (time.perf_counter() - start) / count)
    return [1e6 * seconds for seconds in best]


if __name__ == "__main__":
    main()
