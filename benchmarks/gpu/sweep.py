"""Part `sweep`: the constants of the fast kernels, varied one at a time, and together if they
interact.

Only fast mode is swept, because its bits are not guaranteed. Constants of `batch_invariant` are
part of the arithmetic: they change with `VERSION`, never by a measurement alone.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.card import seconds_of
from benchmarks.gpu.head import batch_of
from benchmarks.gpu.report import Part
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.queues import queue_of
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.cuda import attention, few_row_tiles, few_rows, filters, sampling, softmax
from nano_inference.ops.interface import AttentionArgs
from nano_inference.ops.rowwise import Norm
from nano_inference.sampling.tensors import to_device

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Run

REPEATS, CALLS = 3, 10
BLOCK_SIZE = 16
BEST = 3  # settings per case that get a row, including the engine's


# Applies a setting. Within its context, the yielded function runs the timed code.
Opened = Callable[[], contextlib.AbstractContextManager[Callable[[], Any]]]


class _Tuned(attention.Attention):
    """Attention with another launch of decodes."""

    def __init__(self, tile: int, warps: int, buffers: int, split: int) -> None:
        super().__init__(batch_invariant=False, key_tile=tile, split=split)
        self._warps, self._buffers = warps, buffers

    def _tilings(self, *args: Any, **options: Any) -> list[attention.Launch]:
        short, *others = super()._tilings(*args, **options)
        stages = attention._stages(self._buffers, indirect=options["indirect"])
        return [attention.Launch(short.lanes, self._warps, stages), *others]


class Sweep:
    """Times the settings of a case and keeps the best."""

    def __init__(self, run: "Run", part: Part) -> None:
        self.device, self.part = torch.device(run.scale.device), part
        self.end = time.monotonic() + run.seconds - 15
        self.on_card = self.device.type == "cuda"
        self.queue = queue_of(self.device)

    def case(
        self,
        name: str,
        settings: Mapping[str, Opened],
    ) -> None:
        """Time each setting by its captured run. The first setting is the engine's."""
        found: dict[str, list[float]] = {}
        for label, opened in settings.items():
            if time.monotonic() > self.end and found:
                self.part.fail(f"{name}, {label} and those after it", "no time is left")
                break
            try:
                with opened() as run, self.queue.current():
                    graph = self.queue.capture(run, self.queue.new_pool())
                    seconds = seconds_of(
                        graph.replay, self.device.type, REPEATS, CALLS if self.on_card else 1
                    )
                    found[label] = [each * 1e6 for each in seconds]
            except Exception as error:  # a setting that does not fit is a result too
                print(f"  {name}, {label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        ranked = sorted(found, key=lambda label: statistics.median(found[label]))
        own = next(iter(settings))
        for label in dict.fromkeys([own, *ranked[:BEST]]):
            if label in found:
                note = f"rank {ranked.index(label) + 1} of {len(ranked)}{', the engine has it' if label == own else ''}"
                self.part.add(f"{name}, {label}", found[label], "µs", note=note)


@torch.inference_mode()
def measure_sweep(run: "Run") -> None:
    """Sweep decode attention, products of few rows, and the draw."""
    sweep = Sweep(run, Part(run.out, "sweep"))
    for rows, context in (
        ((1, 1024), (1, 8192), (1, 32_768), (256, 1024)) if sweep.on_card else ((1, 20),)
    ):
        decode_attention(sweep, run, rows, context)
    for rows in (1, 2, 8) if sweep.on_card else (1,):
        products(sweep, run, rows)
    for rows in (1, 256) if sweep.on_card else (2,):
        draws(sweep, run, rows)


def decode_attention(sweep: Sweep, run: "Run", rows: int, context: int) -> None:
    """Sweep KEY_TILE, warps, buffers, SPLIT and programs per processor."""
    spec, dtype = spec_from_config(run.scale.small), getattr(torch, run.scale.dtype)
    blocks = -(-context // BLOCK_SIZE)
    storage = KVStorage(spec, rows * blocks, BLOCK_SIZE, dtype, sweep.device)
    storage.keys.normal_()
    storage.values.normal_()
    tables = [range(row * blocks, (row + 1) * blocks) for row in range(rows)]
    batch = to_device(
        batch_of_rows([Rows([1], context - 1, each) for each in tables], BLOCK_SIZE), sweep.device
    )
    q = torch.randn(rows, spec.num_heads, spec.head_dim, device=sweep.device).to(dtype)
    grid = itertools.product((64, 32, 128), (4, 2, 8), (2, 3, 4), (256, 64, 128), (4, 2, 8))
    chosen = [
        each
        for each in grid
        if each[3] % each[0] == 0
        and sum(a != b for a, b in zip(each, (64, 4, 2, 256, 4), strict=True)) <= 2
    ]

    @contextlib.contextmanager
    def opened(
        tile: int, warps: int, buffers: int, split: int, programs: int
    ) -> Iterator[Callable[[], Tensor]]:
        with patch.object(attention, "PROGRAMS_A_PROCESSOR", programs):
            tuned = _Tuned(tile, warps, buffers, split)
            yield lambda: tuned.attend(
                q, storage, 0, tuned.plan(batch, BLOCK_SIZE), AttentionArgs(spec.head_dim**-0.5)
            )

    names = "tile {}, warps {}, buffers {}, split {}, programs {}"
    settings = {
        names.format(*each): (lambda each=each: opened(*each))
        for each in chosen[: None if sweep.on_card else 2]
    }
    sweep.case(f"attention, {rows} x {context}", settings)


def products(sweep: Sweep, run: "Run", rows: int) -> None:
    """Sweep PROGRAMS, VECTOR_TILE and VECTOR_ROWS in the products of a layer."""
    spec, dtype = spec_from_config(run.scale.small), getattr(torch, run.scale.dtype)
    hidden, inner = spec.hidden_size, run.scale.small["intermediate_size"]
    norm = Norm(torch.ones(hidden, device=sweep.device, dtype=dtype), 1e-6, 0.0, dtype)
    layers = 8 if sweep.on_card else 1  # different weights, so that none is in the L2 cache
    up = torch.randn(layers, 2 * inner, hidden, device=sweep.device).to(dtype)
    down = torch.randn(layers, hidden, inner, device=sweep.device).to(dtype)
    stream = torch.randn(rows, hidden, device=sweep.device)

    def layer_by_layer() -> Tensor:
        x = stream
        for one, other in zip(up, down, strict=True):
            gated = few_rows.product_gated(x, norm, one, None, "silu")
            x = few_rows.product_added(gated, None, other, None, stream, 1e-3)
        return x

    @contextlib.contextmanager
    def opened(programs: int, tile: int, vector_rows: int) -> Iterator[Callable[[], Tensor]]:
        with (
            patch.object(few_row_tiles, "PROGRAMS", programs),
            patch.object(few_rows, "VECTOR_TILE", tile),
            patch.object(few_row_tiles, "VECTOR_ROWS", vector_rows),
        ):
            yield layer_by_layer

    grid = list(itertools.product((256, 132, 512), (32 << 10, 16 << 10, 64 << 10), (2, 1)))
    settings = {
        f"programs {p}, tile {t >> 10} KB, vector rows {v}": (lambda p=p, t=t, v=v: opened(p, t, v))
        for p, t, v in grid[: None if sweep.on_card else 2]
    }
    sweep.case(f"{layers} MLPs, {rows} rows", settings)


def draws(sweep: Sweep, run: "Run", rows: int) -> None:
    """Sweep BLOCK, the logits per program."""
    logits = torch.randn(rows, run.scale.small["vocab_size"], device=sweep.device)
    batch = batch_of(rows, run.scale.device)

    @contextlib.contextmanager
    def opened(block: int) -> Iterator[Callable[[], Any]]:
        with contextlib.ExitStack() as stack:
            for module in (softmax, sampling, filters):
                if hasattr(module, "BLOCK"):
                    stack.enter_context(patch.object(module, "BLOCK", block))
            yield lambda: sampling.draw(logits, batch).token_ids

    sizes = (2048, 1024, 4096) if sweep.on_card else (2048,)
    sweep.case(
        f"draw, {rows} rows", {f"block {size}": (lambda s=size: opened(s)) for size in sizes}
    )
