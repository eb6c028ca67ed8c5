"""Part `pdl`: the gain of programmatic dependent launch for chains of few-row products.

A kernel launched this way starts while its predecessor still runs. It requests its first tile of
the weight, which is constant, and waits for the predecessor only before it reads x. The kernels are
those of the engine (`ops/cuda/few_rows.py`), which launches them this way with `cuda_overlap`.
"""

import statistics
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu.card import seconds_of
from benchmarks.gpu.report import Part, ratio
from nano_inference.device.queues import queue_of
from nano_inference.ops.cuda import availability, few_rows

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Run

LAUNCHES = 112  # products per chain: four in each of 28 layers
CALLS = 20
ROWS = (1, 8)  # one for each way to multiply


def chain(x: Tensor, weights: Tensor, *, overlaps: bool) -> Tensor:
    """Return the last of a chain of products, each of which reads the previous result.

    Args:
        x: Input [rows, K].
        weights: Weights [launches, K, K].
        overlaps: True to launch each kernel before its predecessor has ended.
    """
    for weight in weights:
        x = few_rows.product(x, None, weight, None, few_rows.Launch(overlaps))
    return x


@torch.inference_mode()
def measure_pdl(run: "Run") -> None:
    """Measure captured chains at several widths, plain and overlapping."""
    scale, part, rates = run.scale, Part(run.out, "pdl"), run.rates()
    device = torch.device(scale.device)
    on_card = device.type == "cuda"
    queue, dtype = queue_of(device), getattr(torch, scale.dtype)
    overlapping = availability.problem_with_overlap(device) is None
    for size in (1024, 2048, 4096) if on_card else (16,):
        launches = LAUNCHES if on_card else 3
        weights = (torch.randn(launches, size, size, device=device) * size**-0.5).to(dtype)
        floor = weights[0].nbytes / rates.read * 1e6
        for rows in ROWS:
            x = torch.randn(rows, size, device=device).to(dtype)
            plain = chain(x, weights, overlaps=False).clone()
            for overlaps in (False, True) if overlapping else (False,):
                how = "overlapping" if overlaps else "one after the other"
                name = f"{rows} x {size} wide, {how}"
                if not torch.equal(chain(x, weights, overlaps=overlaps), plain):
                    part.fail(name, "the results differ from those without overlap")
                    continue
                with queue.current():
                    graph = queue.capture(
                        lambda w=weights, x=x, o=overlaps: chain(x, w, overlaps=o),
                        queue.new_pool(),
                    )
                    seconds = seconds_of(graph.replay, scale.device, scale.repeats, CALLS)
                each = [one / launches * 1e6 for one in seconds]
                share = ratio(floor, statistics.median(each))
                note = f"reading takes {floor:.2f} µs: {share:.0%}"
                part.add(name, each, "µs a kernel", note=note)
        del weights
