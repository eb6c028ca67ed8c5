"""The parts of the benchmarks. Each part opens its engines, measures, and writes its figures
immediately.
"""

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import arrivals, card, few_rows, head, hf, idle, ours
from benchmarks.gpu.kernels import measure_kernels
from benchmarks.gpu.models import random_model
from benchmarks.gpu.pdl import measure_pdl
from benchmarks.gpu.report import Part, median_of, ratio, runs_of
from benchmarks.gpu.rl import measure_rl
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.sweep import measure_sweep
from benchmarks.gpu.torch_loop import TorchLoop
from benchmarks.gpu.workload import TEMPERATURE, nano_vllm
from benchmarks.roofline import Rates, Shape, bound_of, shape_of, steps_of
from benchmarks.workloads import BASE, Workload, workload
from nano_inference import InferenceEngine
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.cuda import availability
from nano_inference.ops.interface import FEW_ROWS

RATES = "rates"
LOOP_BATCH = 128  # sequences of the plain torch loop: 2,048 positions each take 30 GB
STATIC_BATCH = 64


@dataclass(frozen=True)
class Run:
    """State shared by all parts.

    Attributes:
        scale: Sizes of the measurements.
        out: Folder of the figures.
        models: Folder of the random models.
        seconds: Time limit of the part. No measurement starts that would probably exceed it.
    """

    scale: Scale
    out: Path
    models: Path
    seconds: float

    def small(self) -> Path:
        return random_model(self.models / "small", self.scale.small, self.scale.device)

    def large(self) -> Path:
        return random_model(self.models / "large", self.scale.large, self.scale.device)

    def shape(self, config: dict[str, Any]) -> Shape:
        return shape_of(spec_from_config(config), getattr(torch, self.scale.dtype).itemsize)

    def nano(self) -> Workload:
        return self.scale.fit(nano_vllm())

    def rates(self) -> Rates:
        """Return the rates that an earlier part of this run measured, or measure them now."""
        if not runs_of(self.out, RATES):
            measure_rates(self)
        found = runs_of(self.out, RATES)
        rates = card.rates_of(
            {"copy": found["copy"], "read": found["sum"], "product": found["bf16 product"]}
        )
        return Rates(rates.product * 1e12, rates.read * 1e9)


def attempt(part: Part, name: str, measure: Callable[[], None]) -> None:
    """Run a measurement. Record a failure and continue."""
    try:
        measure()
    except Exception as error:
        stack = traceback.format_exc()
        print(stack, flush=True)
        part.fail(name, f"{type(error).__name__}: {error}", stack)
    gc.collect()


def measure_rates(run: Run) -> None:
    """Measure bandwidth and arithmetic of the card."""
    scale, part = run.scale, Part(run.out, RATES)
    found = card.measure_rates(scale.device, scale.copy_bytes, scale.matrix, max(3, scale.repeats))
    part.add("copy", [each / 1e9 for each in found["copy"]], "GB/s", note="read and written")
    part.add("sum", [each / 1e9 for each in found["read"]], "GB/s", note="read only")
    part.add(
        "bf16 product",
        [each / 1e12 for each in found["product"]],
        "TFLOP/s",
        note=f"{scale.matrix} cubed",
    )


def measure_engine(run: Run) -> None:
    """Measure the default engine: start-up, steady decode, idle share, the nano-vllm workload, the
    draw, W1 to W6.
    """
    scale, part, folder, rates = run.scale, Part(run.out, "engine"), run.small(), run.rates()
    began = time.perf_counter()
    with ours.opened(scale, folder) as engine:
        started(part, engine, began, scale)
        shape = run.shape(scale.small)
        for batch in scale.batches:
            attempt(
                part,
                f"decode, batch {batch}",
                lambda batch=batch: decoded(part, engine, batch, run, shape, rates),
            )
        attempt(part, "arrivals", lambda: arrived(part, engine, run))
        attempt(part, "nano-vllm", lambda: nano(part, engine, run, shape, rates))
        attempt(part, "device idle", lambda: traced(part, engine, scale.batches[-1], run))
        attempt(part, "draw", lambda: drawn(part, engine, scale.batches[-1], run, rates))
        for rows in (1, FEW_ROWS):
            attempt(
                part,
                f"trunk, {rows} rows",
                lambda rows=rows: trunks(part, engine, rows, run, shape, rates),
            )
        for options in ({"raw_logprobs": True}, {"top_logprobs": 5}, {"top_p": 0.95, "top_k": 50}):
            attempt(
                part,
                f"decode with {options}",
                lambda options=options: asked(part, engine, options, run),
            )
        for name in BASE:
            attempt(part, name, lambda name=name: base(part, engine, name, run, shape, rates))
        memory = card.peak_bytes(scale.device)
        part.add(
            "peak memory allocated",
            [memory["allocated"] / 2**30],
            "GiB",
            note=f"by the driver {memory['used'] / 2**30:.2f} GiB",
        )


def started(part: Part, engine: InferenceEngine, began: float, scale: Scale) -> None:
    card.wait(scale.device)
    part.add(
        "start-up",
        [time.perf_counter() - began],
        "s",
        note="engine built: weights, profile, graphs, kernels compiled or cached",
    )
    began = time.perf_counter()
    engine.generate([[1, 2, 3]], sampling_of(1), progress=False)
    part.add("first request", [time.perf_counter() - began], "s")
    part.add(
        "KV cache",
        [engine.memory_budget.kv_cache / 2**30],
        "GiB",
        table=str(engine.memory_budget),
        numerics=engine.numerics.fingerprint,
    )
    part.add("CUDA graphs", [engine.memory_budget.graphs / 2**20], "MiB")


def sampling_of(tokens: int) -> Any:
    from nano_inference import SamplingParams

    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def decoded(
    part: Part, engine: InferenceEngine, batch: int, run: Run, shape: Shape, rates: Rates
) -> None:
    """Measure a steady decode and its share of the roofline."""
    found = ours.decode(engine, batch, run.scale)
    bound = ours.decode_bound(shape, rates, batch, found.context)
    part.add(
        f"decode, batch {batch}",
        found.rates(batch),
        "tok/s",
        note=f"{found.context / batch:.0f} tokens of context each",
        clocks=found.clocks,
    )
    whole = sum(found.phases.values())
    phases = ", ".join(f"{name} {each:.0f}" for name, each in found.phases.items())
    part.add(f"decode, batch {batch}, host", [whole], "µs a step", note=f"µs by phase: {phases}")
    share = [ratio(bound, each) for each in found.seconds]
    target = 0.8 if batch == 1 and part.name == "engine" else None
    part.add(
        f"decode, batch {batch}, share of roofline",
        share,
        "",
        at_least=target,
        note=f"bound {bound * 1e3:.3f} ms a step",
    )


def arrived(part: Part, engine: InferenceEngine, run: Run, suffix: str = "") -> None:
    """Measure steps with a prompt next to a steady decode."""
    for tokens, seconds in arrivals.measure(engine, run.scale).items():
        name = f"step with a prompt of {tokens}{suffix}"
        part.add(name, [each * 1e3 for each in seconds], "ms", note="next to 8 decodes")


def nano(part: Part, engine: InferenceEngine, run: Run, shape: Shape, rates: Rates) -> None:
    """Measure the nano-vllm workload and its share of the roofline of all its steps."""
    load = run.nano()
    seconds = ours.timed(engine, load, run.scale, run.scale.repeats)
    bound = bound_of(steps_of(load, shape), rates)
    part.add(
        "nano-vllm", [load.output_tokens / each for each in seconds], "output tok/s", note=load.what
    )
    share = [ratio(bound.bound, each) for each in seconds]
    at_bound = f"bound {bound.bound:.3f} s, {load.output_tokens / bound.bound:,.0f} tok/s"
    part.add("nano-vllm, share of roofline", share, "", at_least=0.7, note=at_bound)


def traced(part: Part, engine: InferenceEngine, batch: int, run: Run) -> None:
    """Measure the idle share of the device in a steady decode, with a trace as evidence."""
    steps = min(50, run.scale.steps)
    for size in sorted({1, batch}):
        path = idle.trace_decode(
            engine, size, run.scale, steps, run.out / f"trace-decode-{size}.json.gz"
        )
        share, milliseconds, events = idle.idle_share(path, run.scale.device)
        kept = path.name
        if path.stat().st_size > idle.MOST_BYTES:
            path.unlink()
            kept = "not kept: too large"
        note = (
            f"{events} events in {milliseconds:.1f} ms, {steps} steps under the profiler; "
            f"trace {kept}"
        )
        part.add(f"device idle, batch {size}", [share], "of the time", at_most=0.05, note=note)


def drawn(part: Part, engine: InferenceEngine, rows: int, run: Run, rates: Rates) -> None:
    """Measure the draw without the rest of a step, and bound the cost of logprobs."""
    found = head.measure(engine, rows, run.scale, rates.read)
    for name, seconds in found.items():
        part.add(f"{name}, {rows} rows", [each * 1e3 for each in seconds], "ms")
    step = median_of(run.out, part.name, f"decode, batch {rows}")
    if step:
        beyond = max(
            0.0, statistics.median(found["draw"]) - statistics.median(found["reading the logits"])
        )
        note = (
            "time of the draw beyond one read of the logits, as a share of a step; no kernel of "
            "ours draws without logprobs"
        )
        part.add(
            "logprobs cost at most", [beyond / (rows / step)], "of a step", at_most=0.02, note=note
        )


def trunks(
    part: Part, engine: InferenceEngine, rows: int, run: Run, shape: Shape, rates: Rates
) -> None:
    """Measure captured trunks of few rows with both sets of kernels."""
    found = few_rows.measure(engine, rows, run.scale)
    weights = shape.layers // 2 * getattr(torch, run.scale.dtype).itemsize
    bound = (weights + rows * run.scale.context * shape.kv) / rates.read * 1e6
    plain = statistics.median(found["trunk"])
    for name, seconds in found.items():
        note = (
            f"reading weights (with the head) and KV takes {bound:.0f} µs; "
            f"{plain / statistics.median(seconds):.2f} x"
        )
        part.add(f"{name}, {rows} rows", [each * 1e6 for each in seconds], "µs", note=note)


def asked(part: Part, engine: InferenceEngine, options: dict[str, Any], run: Run) -> None:
    """Measure a steady decode that requests more outputs, and a plain one for comparison."""
    batch = run.scale.batches[-1]
    found = ours.decode(engine, batch, run.scale, options)
    plain = median_of(run.out, part.name, f"decode, batch {batch}") or math.nan
    name = ", ".join(f"{key}={value}" for key, value in options.items())
    part.add(
        f"decode, batch {batch}, {name}", found.rates(batch), "tok/s", note=f"plain: {plain:,.0f}"
    )


def base(
    part: Part, engine: InferenceEngine, name: str, run: Run, shape: Shape, rates: Rates
) -> None:
    """Measure one of W1 to W6 and its share of the roofline."""
    load = run.scale.fit(workload(name))
    seconds = ours.timed(engine, load, run.scale, run.scale.repeats)
    counted, unit = (
        (load.prompt_tokens, "prompt tok/s")
        if name == "W4"
        else (load.output_tokens, "output tok/s")
    )
    share = ratio(bound_of(steps_of(load, shape), rates).bound, statistics.median(seconds))
    part.add(
        name,
        [counted / each for each in seconds],
        unit,
        note=f"{load.what}; {share:.0%} of its roofline",
    )


def measure_variants(run: Run) -> None:
    """Measure the nano-vllm workload and decode with one option changed at a time."""
    scale, part, folder = run.scale, Part(run.out, "variants"), run.small()
    variants: dict[str, dict[str, Any]] = {
        "batch_invariant": {"batch_invariant": True},
        "no graphs": {"cuda_graphs": False},
        "lookahead=0": {"lookahead": 0},
        "fp8 keys": {"kv_cache_dtype": "fp8"},
        "int8 weights": {"quantization": "int8"},
    }
    if availability.problem_with_overlap(torch.device(scale.device)) is None:
        variants["cuda_overlap"] = {"cuda_overlap": True}
    for name, changes in variants.items():
        attempt(
            part, name, lambda name=name, changes=changes: varied(part, name, changes, folder, run)
        )
        card.release(scale.device)


def varied(part: Part, name: str, changes: dict[str, Any], folder: Path, run: Run) -> None:
    with ours.opened(run.scale, folder, **changes) as engine:
        load = run.nano()
        seconds = ours.timed(engine, load, run.scale, 1)  # a run takes ten seconds
        rate = part.add(
            f"nano-vllm, {name}", [load.output_tokens / each for each in seconds], "output tok/s"
        )
        plain = median_of(run.out, "engine", "nano-vllm")
        if plain:
            target = 0.15 if name == "batch_invariant" else None
            part.add(f"cost of {name}", [1 - rate / plain], "of nano-vllm's rate", at_most=target)
        for batch in run.scale.batches:
            found = ours.decode(engine, batch, run.scale)
            part.add(f"decode, batch {batch}, {name}", found.rates(batch), "tok/s")
        attempt(part, f"arrivals, {name}", lambda: arrived(part, engine, run, f", {name}"))


def measure_large(run: Run) -> None:
    """Measure start-up and steady decode at the shape of Qwen3-8B."""
    scale, part, rates = run.scale, Part(run.out, "large"), run.rates()
    began = time.perf_counter()
    folder = run.large()
    part.add("made", [time.perf_counter() - began], "s", note="random weights written to a folder")
    card.release(scale.device)
    began = time.perf_counter()
    with ours.opened(scale, folder) as engine:
        started(part, engine, began, scale)
        for batch in scale.large_batches:
            name = f"decode, batch {batch}"
            attempt(
                part,
                name,
                lambda b=batch: decoded(part, engine, b, run, run.shape(scale.large), rates),
            )


def measure_loop(run: Run) -> None:
    """Measure the plain torch loop on steady decodes and the nano-vllm workload."""
    part = Part(run.out, "torch-loop")
    scale, folder, load = run.scale, run.small(), run.nano()
    for batch in scale.batches:
        attempt(
            part,
            f"decode, batch {batch}",
            lambda b=batch: loop_decode(part, folder, b, scale),
        )
        card.release(scale.device)
    # Batches of similar lengths, which the loop could not know beforehand: an advantage for it.
    requests = sorted(load.requests, key=lambda request: request.max_tokens)
    size = min(LOOP_BATCH, len(requests))
    groups = [requests[i : i + size] for i in range(0, len(requests), size)]
    most = max(len(r.prompt) for r in requests) + max(r.max_tokens for r in requests)

    def whole() -> None:
        loop = TorchLoop(folder, size, most, scale.device, getattr(torch, scale.dtype), TEMPERATURE)
        loop.capture_all(most) if scale.device != "cpu" else None
        loop.prefill([request.prompt for request in groups[0]])
        card.wait(scale.device)
        began = time.perf_counter()
        for group in groups:
            loop.prefill([request.prompt for request in group])
            steps = max(request.max_tokens for request in group) - 1
            loop.decode(steps, max(len(request.prompt) for request in group))
        card.wait(scale.device)
        rate = load.output_tokens / (time.perf_counter() - began)
        part.add(
            "nano-vllm",
            [rate],
            "output tok/s",
            note=f"batches of {size} sorted by length; no logprobs",
        )

    attempt(part, "nano-vllm", whole)
    card.release(scale.device)


def loop_decode(part: Part, folder: Path, batch: int, scale: Scale) -> None:
    longest = scale.context + scale.steps
    loop = TorchLoop(folder, batch, longest, scale.device, getattr(torch, scale.dtype), TEMPERATURE)
    if scale.device != "cpu":
        loop.capture_all(longest)
    loop.prefill([[1 + i % 7] * scale.context for i in range(batch)])
    each = max(1, scale.steps // ours.BLOCKS)
    rates: list[float] = []
    for block in range(ours.BLOCKS):
        card.wait(scale.device)
        began = time.perf_counter()
        loop.decode(each, scale.context + block * each)
        card.wait(scale.device)
        rates.append(batch * each / (time.perf_counter() - began))
    part.add(
        f"decode, batch {batch}",
        rates,
        "tok/s",
        note=f"from {scale.context} tokens of context; no logprobs",
    )


def measure_transformers(run: Run) -> None:
    """Measure `transformers`: continuous batching on the nano-vllm workload, a static cache on the
    shapes of W1 and W2.
    """
    scale, part, load = run.scale, Part(run.out, "transformers"), run.nano()
    began = time.perf_counter()
    model = hf.load(run.small(), scale.device, scale.dtype)

    def static(batch: int, compiled: bool) -> None:
        prompts, tokens = (
            [[1 + i] * scale.context for i in range(batch)],
            max(2, 128 // scale.shrink),
        )
        runs = [
            hf.static_generate(model, prompts, tokens, scale.device, compiled=compiled)
            for _ in range(2)
        ]
        name = f"static cache, batch {batch}, {'compiled' if compiled else 'not compiled'}"
        part.add(
            name,
            [batch * tokens / runs[-1]],
            "output tok/s",
            note=f"{scale.context} -> {tokens}; no logprobs",
        )

    def continuous() -> None:
        left = max(5.0, run.seconds - (time.perf_counter() - began) - 15)
        seconds, tokens, finished = hf.continuous(model, load, left, **scale.continuous)
        note = f"{finished} of {len(load.requests)} requests in {seconds:.1f} s; no logprobs"
        part.add(
            "nano-vllm, continuous batching", [ratio(tokens, seconds)], "output tok/s", note=note
        )

    batches = sorted({1, min(STATIC_BATCH, scale.batches[-1])})
    for batch in batches:
        attempt(part, f"static cache, batch {batch}", lambda batch=batch: static(batch, False))
    attempt(part, "continuous batching", continuous)
    if scale.device != "cpu" and run.seconds - (time.perf_counter() - began) > 60:
        for batch in batches:
            attempt(
                part,
                f"static cache, batch {batch}, compiled",
                lambda batch=batch: static(batch, True),
            )


PARTS: dict[str, Callable[[Run], None]] = {
    "rates": measure_rates,
    "engine": measure_engine,
    "variants": measure_variants,
    "torch-loop": measure_loop,
    "transformers": measure_transformers,
    "large": measure_large,
    "kernels": measure_kernels,
    "pdl": measure_pdl,
    "sweep": measure_sweep,
    "rl": measure_rl,
}
