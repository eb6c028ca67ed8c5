"""Flex attention against the reference's, on the shapes of SmolLM2-135M: `python
benchmarks/attention.py --log FILE`.

Each figure is the median CPU time of one thread for one layer's attention, or for the plan of a
step, which all layers share. The KV cache has 100,000 slots. Compilation is wall-clock time from an
empty cache. The first compilation also warms up the compiler.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nano_inference.ops import flex
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.interface import AttentionArgs
from nano_inference.ops.reference import attention as reference_attention

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
BLOCK_SIZE, NUM_BLOCKS = 16, 6250
SHAPES = {"decode, 16 sequences at 512": (16, 512, 1), "prefill, 512 tokens": (1, 512, 512)}


class View:
    """Keys and values of one layer."""

    block_size = BLOCK_SIZE

    def __init__(self, dtype: torch.dtype) -> None:
        self.keys, self.values = torch.randn(2, KV_HEADS, NUM_BLOCKS * BLOCK_SIZE, HEAD_DIM).to(
            dtype
        )

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys.index_copy_(1, slots, keys.transpose(0, 1))
        self.values.index_copy_(1, slots, values.transpose(0, 1))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        shape = (KV_HEADS, *slots.shape, HEAD_DIM)
        keys, values = (
            part.index_select(1, slots.flatten()).float().view(shape)
            for part in (self.keys, self.values)
        )
        return keys, values

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


def batch(sequences: int, context: int, rows: int) -> ForwardBatch:
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(NUM_BLOCKS)[: sequences * blocks].view(sequences, blocks).tolist()
    return batch_of_rows([Rows([0] * rows, context - rows, table) for table in tables], BLOCK_SIZE)


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return round(statistics.median(times) * 1e3, 3)


@torch.inference_mode()
def measure(name: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    sequences, context, rows = SHAPES[name]
    step, view, scale = batch(sequences, context, rows), View(dtype), HEAD_DIM**-0.5
    q = torch.randn(sequences * rows, HEADS, HEAD_DIM).to(dtype)
    plan, tiles = (
        flex.plan_attention(NUM_BLOCKS, step, BLOCK_SIZE),
        reference_attention.plan_attention(step, BLOCK_SIZE),
    )
    began = time.perf_counter()
    flex.attention(q, view, 0, plan, AttentionArgs(scale))
    compile_s = time.perf_counter() - began
    return {
        "what": name,
        "dtype": str(dtype).removeprefix("torch."),
        "reference_ms": milliseconds(
            lambda: reference_attention.attention(q, view, 0, tiles, AttentionArgs(scale)), repeats
        ),
        "flex_ms": milliseconds(
            lambda: flex.attention(q, view, 0, plan, AttentionArgs(scale)), repeats
        ),
        "reference_plan_ms": milliseconds(
            lambda: reference_attention.plan_attention(step, BLOCK_SIZE), repeats
        ),
        "flex_plan_ms": milliseconds(
            lambda: flex.plan_attention(NUM_BLOCKS, step, BLOCK_SIZE), repeats
        ),
        "compile_s": round(compile_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--log", type=Path, default=None, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache, torch._inductor.utils.fresh_cache(dir=cache):
        for dtype in (torch.float32, torch.bfloat16):
            for name in SHAPES:
                figures.append(measure(name, dtype, arguments.repeats))
                print(figures[-1])
    if arguments.log is not None:
        report = {"torch": torch.__version__, "figures": figures}
        arguments.log.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
