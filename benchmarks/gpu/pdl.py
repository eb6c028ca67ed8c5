"""Part `pdl`: the gain of programmatic dependent launch for a chain of one-row products.

A kernel launched this way starts while its predecessor still runs. It loads its tile of the weight,
which is constant, and waits for the predecessor only before it reads x. The kernels here are those
of `ops/cuda/few_rows.py` without norm and gate. The engine does not launch its kernels this way
yet.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false

import statistics
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.card import seconds_of
from benchmarks.gpu.report import Part, ratio
from nano_inference.device.queues import queue_of

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Run

LAUNCHES = 112  # products per chain: four in each of 28 layers
CALLS = 20
BLOCK = 128  # elements of k per iteration


@triton.jit
def _row_product_kernel(
    x_ptr, weight_ptr, out_ptr, K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the weight's rows,): out [M] = weight [M, K] @ x [K]."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ks = tl.arange(0, BLOCK)
    weights = weight_ptr + columns.to(tl.int64)[:, None] * K + ks[None, :]
    tile = tl.load(weights)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((COLUMNS,), tl.float32)
    for k in range(0, K, BLOCK):
        following = tile
        if BLOCK < K:
            following = tl.load(weights + k + BLOCK, mask=(ks < K - k - BLOCK)[None, :], other=0.0)
        x = tl.load(x_ptr + k + ks).to(tl.float32)
        sums += tl.sum(tile.to(tl.float32) * x[None, :], axis=1)
        tile = following
    tl.store(out_ptr + columns, (sums / K).to(out_ptr.dtype.element_ty))


def chain(x: Tensor, weights: Tensor, columns: int, *, overlaps: bool) -> Tensor:
    """Return the last of a chain of products, each of which reads the previous result.

    Args:
        x: Input [K].
        weights: Weights [launches, K, K]. K is a multiple of `columns` and of `BLOCK`.
        columns: Rows of a weight that a program multiplies.
        overlaps: True to launch each kernel before its predecessor has ended.
    """
    places = torch.empty((2, len(x)), dtype=x.dtype, device=x.device)
    options = {"launch_pdl": True} if overlaps else {}
    for turn, weight in enumerate(weights):
        out = places[turn % 2]
        _row_product_kernel[(len(weight) // columns,)](
            x, weight, out, len(x), columns, min(BLOCK, len(x)), overlaps, num_warps=4, **options
        )
        x = out
    return x


@torch.inference_mode()
def measure_pdl(run: "Run") -> None:
    """Measure captured chains at two widths, plain and overlapping."""
    scale, part, rates = run.scale, Part(run.out, "pdl"), run.rates()
    device = torch.device(scale.device)
    on_card = device.type == "cuda"
    sizes = (1024, 2048, 4096) if on_card else (16,)
    queue, dtype = queue_of(device), getattr(torch, scale.dtype)
    overlapping = on_card and torch.cuda.get_device_capability(device)[0] >= 9
    for size in sizes:
        launches = LAUNCHES if on_card else 3
        weights = torch.randn(launches, size, size, device=device).to(dtype)
        x = torch.ones(size, device=device, dtype=dtype)
        columns = max(4, size // 256)
        plain = chain(x, weights, columns, overlaps=False).clone()
        floor = weights[0].nbytes / rates.read * 1e6
        for overlaps in (False, True) if overlapping else (False,):
            found = chain(x, weights, columns, overlaps=overlaps)
            if not torch.equal(found, plain):
                part.fail(
                    f"{size} wide, overlapping", "the results differ from those without overlap"
                )
                continue
            with queue.current():
                graph = queue.capture(
                    lambda w=weights, x=x, c=columns, o=overlaps: chain(x, w, c, overlaps=o),
                    queue.new_pool(),
                )
                seconds = seconds_of(graph.replay, scale.device, scale.repeats, CALLS)
            each = [one / launches * 1e6 for one in seconds]
            name = f"{size} wide, {'overlapping' if overlaps else 'one after the other'}"
            share = ratio(floor, statistics.median(each))
            part.add(name, each, "µs a kernel", note=f"reading takes {floor:.2f} µs: {share:.0%}")
        del weights
