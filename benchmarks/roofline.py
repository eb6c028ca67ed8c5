"""Lower bounds on a workload's time, from its arithmetic and bytes at the rates of the same run.

The bounds assume an ideal engine. Its first step computes every distinct prompt token once. Each
later step computes one token of every unfinished sequence. A step costs

- arithmetic: the products of its rows with all weights, the head for sampled tokens, and
  attention (4 x heads x head size for each row, key and layer: scores and weighted values);
- bytes: all weights once, and the keys and values that its rows attend to, a shared prompt once.

The measured rates turn these into two times. `bound` takes the larger one in each step (arithmetic
and reading overlap perfectly) and sums over the steps. `serial` adds both (no overlap at all).
`arithmetic` and `reading` are the totals of one kind. No engine beats `bound` unless it batches
prompts and decodes of different requests better than step by step. Such batches help only if some
steps read and others compute. Attention windows are not modeled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import machine
from benchmarks.measure import Row, Stopwatch, cell, console, show, spread
from benchmarks.models import model_path
from benchmarks.ours import Options, described, opened, timed
from benchmarks.workloads import Workload, distinct_prompt_tokens, with_shared_prefix, workload
from nano_inference.checkpoints.loading import load_spec
from nano_inference.models.spec.model import ModelSpec

READ_BYTES = 512 << 20  # far larger than the caches
RATE_RUNS = 5
# SmolLM2-135M at 436 GFLOP/s, arithmetic only, calculated by hand. This module must reproduce it.
REFERENCE_RATE = 436e9
REFERENCE = {
    "W2": (1265, "output tok/s"),
    "W3": (502, "output tok/s"),
    "W4": (1232, "prompt tok/s"),
    "W5": (2.64, "s"),
}


@dataclass(frozen=True)
class Shape:
    """Cost of a model. Products count two operations per weight and row.

    Attributes:
        layers, head: Operations per row in all layers' products, and in the head.
        attention: Operations per row and key, all layers together.
        weights: Bytes of all weights that a step reads.
        kv: Bytes of one token's keys and values, all layers together.
    """

    layers: int
    head: int
    attention: int
    weights: int
    kv: int


@dataclass(frozen=True)
class Step:
    """Operations and bytes of one step."""

    operations: int
    bytes: int


@dataclass(frozen=True)
class Rates:
    """Operations and bytes per second."""

    product: float
    read: float


@dataclass(frozen=True)
class Bound:
    """Seconds of a workload, as the module docstring defines them."""

    arithmetic: float
    reading: float
    bound: float
    serial: float


def shape_of(spec: ModelSpec, bytes_per_value: int = 2) -> Shape:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = spec.hidden_size * (2 * q + 2 * kv + 3 * spec.intermediate_size)
    head = spec.hidden_size * spec.vocab_size
    return Shape(
        layers=2 * spec.num_layers * layer,
        head=2 * head,
        attention=4 * q * spec.num_layers,
        weights=bytes_per_value * (spec.num_layers * layer + head),
        kv=bytes_per_value * 2 * kv * spec.num_layers,
    )


def steps_of(load: Workload, shape: Shape) -> list[Step]:
    """Return the steps of an ideal engine: every distinct prompt token in the first, then one token
    per sequence.
    """
    distinct = distinct_prompt_tokens(load.requests)
    pairs = sum(
        triangle(len(r.prompt)) - triangle(shared)
        for r, shared in with_shared_prefix(load.requests)
    )
    operations = distinct * shape.layers + len(load.requests) * shape.head + pairs * shape.attention
    steps = [Step(operations, shape.weights + distinct * shape.kv)]
    for made in range(1, max(request.max_tokens for request in load.requests)):
        running = tuple(request for request in load.requests if request.max_tokens > made)
        rows = sum(request.n for request in running)
        keys = sum(request.n * (len(request.prompt) + made) for request in running)
        operations = rows * (shape.layers + shape.head) + keys * shape.attention
        steps.append(
            Step(
                operations,
                shape.weights + (distinct_prompt_tokens(running) + rows * made) * shape.kv,
            )
        )
    return steps


def triangle(length: int) -> int:
    """Return the number of row and key pairs in a causal prompt: row p attends to p + 1 keys."""
    return length * (length + 1) // 2


def bound_of(steps: Sequence[Step], rates: Rates) -> Bound:
    times = [(step.operations / rates.product, step.bytes / rates.read) for step in steps]
    arithmetic, reading = sum(time for time, _ in times), sum(time for _, time in times)
    return Bound(arithmetic, reading, sum(max(pair) for pair in times), arithmetic + reading)


def reference_rows(shape: Shape) -> list[Row]:
    """Return the figures calculated by hand, and this module's figures at the same rate."""
    rows: list[Row] = []
    for name, (by_hand, unit) in REFERENCE.items():
        load = workload(name)
        seconds = bound_of(steps_of(load, shape), Rates(REFERENCE_RATE, float("inf"))).arithmetic
        count = load.output_tokens if unit.startswith("output") else load.prompt_tokens
        computed = seconds if unit == "s" else count / seconds
        rows.append({"name": name, "by_hand": float(by_hand), "computed": computed, "unit": unit})
    return rows


def measure_rates(threads: int) -> Row:
    """Measure operations and bytes per second of torch, and of the engine's kernels if they are
    available.
    """
    library, watch = machine.kernels(), Stopwatch()
    row: Row = {"name": f"rates, {threads} threads", "threads": threads}
    measures: dict[str, Callable[[], float]] = {
        "torch_product": torch_product_rate,
        "torch_read": torch_read_rate,
    }
    if library is not None:
        measures["kernel_product"] = lambda: library.product_rate(threads)
        measures["kernel_read"] = lambda: library.read_rate(READ_BYTES, threads)
    for name, one in measures.items():
        row[name] = spread(watch.time(one) for _ in range(RATE_RUNS))
    return watch.row(**row)


def rates_in(row: Row) -> Rates:
    """Return the better product rate and the better read rate, because an engine may use either."""
    products = [row[name]["median"] for name in ("kernel_product", "torch_product") if name in row]
    reads = [row[name]["median"] for name in ("kernel_read", "torch_read") if name in row]
    return Rates(max(products), max(reads))


def torch_product_rate(size: int = 2048) -> float:
    """Measure torch's own product of bf16 matrices of this size (not schedule-invariant)."""
    x, weight = torch.randn(size, size).bfloat16(), torch.randn(size, size).bfloat16()
    torch.nn.functional.linear(x, weight)
    return rate(lambda: torch.nn.functional.linear(x, weight), 2.0 * size**3)


def torch_read_rate() -> float:
    values = torch.zeros(READ_BYTES // 4)
    values.sum()
    return rate(lambda: values.sum(), float(READ_BYTES))


def rate(run: Callable[[], Any], amount: float) -> float:
    watch = Stopwatch()
    for _ in range(RATE_RUNS):
        watch.time(run)
    return amount / min(watch.seconds)


COLUMNS: dict[str, Callable[[Row], Any]] = {
    "workload": lambda row: row["name"],
    "arithmetic, s": lambda row: row["arithmetic_s"],
    "reading, s": lambda row: row["reading_s"],
    "bound, s": lambda row: row["bound_s"],
    "serial, s": lambda row: row["serial_s"],
    "bound tok/s": lambda row: row["bound_output_tokens_per_s"],
    "ours, s": lambda row: row.get("seconds"),
    "share of bound": lambda row: row.get("share_of_bound"),
    "cores": lambda row: row.get("placement"),
}
RATE_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "what": lambda row: row["what"],
    "per second": lambda row: row["figure"],
    "unit": lambda row: row["unit"],
}
REFERENCE_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "workload": lambda row: row["name"],
    "by hand": lambda row: row["by_hand"],
    "this module": lambda row: row["computed"],
    "unit": lambda row: row["unit"],
}


def measure(options: Options, workloads: Sequence[str], *, run: bool = True) -> list[Row]:
    """Measure the rates and compute the bounds. With `run`, also time each workload and compute its
    share of the bound.
    """
    shape = shape_of(load_spec(model_path(options.model)), 4 if options.dtype == "float32" else 2)
    if options.model == "smollm2-135m":
        show(
            "SmolLM2-135M at 436 GFLOP/s, only arithmetic",
            REFERENCE_COLUMNS,
            reference_rows(shape),
        )
    with opened(options) as engine:
        config, measured = described(engine), measure_rates(torch.get_num_threads())
        show_rates(measured)
        rows = [bound_row(name, shape, rates_in(measured)) for name in workloads]
        if run:
            rows = [
                row | with_share(timed(engine, row["workload"], options.repeats), row)
                for row in rows
            ]
        rows = [row | {"config": config} for row in rows]
    show(f"roofline, {options.model}", COLUMNS, rows)
    console.print("bound: the larger of arithmetic and reading in each step; serial: their sum.")
    return [measured, *rows]


def bound_row(name: str, shape: Shape, rates: Rates) -> Row:
    load = workload(name)
    steps = steps_of(load, shape)
    bound = bound_of(steps, rates)
    return {
        "name": name,
        "workload": name,
        "operations": sum(step.operations for step in steps),
        "bytes": sum(step.bytes for step in steps),
        "product_rate": rates.product,
        "read_rate": rates.read,
        "arithmetic_s": bound.arithmetic,
        "reading_s": bound.reading,
        "bound_s": bound.bound,
        "serial_s": bound.serial,
        "bound_output_tokens_per_s": load.output_tokens / bound.bound,
    }


def with_share(measured: Row, bound: Row) -> Row:
    return measured | {
        "share_of_bound": spread(bound["bound_s"] / each for each in measured["seconds"]["runs"])
    }


def show_rates(row: Row) -> None:
    names = {"product": ("GFLOP/s, bf16", 1e9), "read": ("GB/s", 1e9)}
    lines: list[Row] = []
    for key in ("kernel_product", "torch_product", "kernel_read", "torch_read"):
        if key in row:
            unit, scale = names[key.split("_")[1]]
            figure = spread(each / scale for each in row[key]["runs"])
            lines.append({"what": key.replace("_", " "), "figure": figure, "unit": unit})
    show(
        f"rates, {row['threads']} threads, cores {row['placement']}: {cell(row['seconds'])} s",
        RATE_COLUMNS,
        lines,
    )
