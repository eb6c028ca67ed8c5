"""Compile the launches of `ops/cuda` for a GPU that is not here, and print each kernel's resource
usage.

    python -m tests.gpu.compile [--only WORD] [--small] [--arch 90] [--json PATH]

The host functions are called with CPU tensors of real shapes. Nothing reads them, so their memory
is never touched. A stand-in for Triton's driver names the target, and a launch compiles and
returns. The result is therefore exactly what a step on such a GPU would launch, with the same
constants and alignments. You need no GPU and no pytest. Triton's interpreter must be off (`main`
turns it off). If you write a kernel, add its calls to `CALLS`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import argparse
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nano_inference.config import KVCacheDType
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.state_tensors import StateStorage
from nano_inference.models.spec.layers import LayerSpec
from nano_inference.models.spec.states import DeltaNet, ShortConv, StateSpec
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.cuda.availability import MAX_DELTA_BLOCK
from nano_inference.ops.formats import FORMATS, FP8, form_named
from nano_inference.ops.interface import (
    AttentionArgs,
    HeadNorms,
    LatentWeights,
    RopeArgs,
)
from nano_inference.ops.lora import Adapter, LoraPart
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.settings import Latent
from nano_inference.ops.state import DeltaWeights, ShortConvWeights
from tests.gpu.compiled import SHARED_MEMORY, Compiled, compiling, describe, table

BLOCK_SIZE = 16
CONTEXT = 1024  # tokens per sequence in `decode_batch`


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that kernels depend on."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    head_norms: bool  # size of query and key heads
    dtype: torch.dtype = torch.bfloat16
    state: StateSpec | None = None

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def norm(self, width: int) -> Norm:
        return Norm(self.empty(width), 1e-6, 0.0, self.dtype)

    def empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(sizes, dtype=dtype or self.dtype)


QWEN = Shape("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151_936, head_norms=True)
QWEN_8B = Shape("Qwen3-8B", 4096, 32, 8, 128, 12_288, 151_936, head_norms=True)
QWEN_FLOAT32 = replace(QWEN, name="Qwen3-0.6B fp32", dtype=torch.float32)
LLAMA = Shape("Llama-3-8B", 4096, 32, 8, 128, 14_336, 128_256, head_norms=False)
GEMMA_2 = Shape("Gemma-2-27B", 4608, 32, 16, 128, 36_864, 256_000, head_norms=False)
# heads of full layers, and those of layers with a window
GEMMA_4_FULL = Shape("Gemma-4-31B, full", 5376, 32, 4, 512, 21_504, 262_144, head_norms=True)
GEMMA_4 = replace(GEMMA_4_FULL, name="Gemma-4-31B, window", kv_heads=16, head_dim=256)
GEMMA_4_FLOAT32 = replace(GEMMA_4_FULL, name="Gemma-4-31B fp32", dtype=torch.float32)
# heads that share a latent of 512 numbers and 64 rotated ones
DEEPSEEK = Shape("DeepSeek-V3", 7168, 128, 1, 576, 18_432, 129_280, head_norms=False)
DEEPSEEK_LITE = Shape("DeepSeek-V2-Lite", 2048, 16, 1, 576, 10_944, 102_400, head_norms=False)
DEEPSEEK_FLOAT32 = replace(DEEPSEEK, name="DeepSeek-V3 fp32", dtype=torch.float32)
LATENT = Latent(rank=512, rotary=64, plain=128, value=128)
GEMMA_3 = Shape("Gemma-3-270m", 640, 4, 1, 256, 2048, 262_144, head_norms=True)
GEMMA_3_FLOAT32 = replace(GEMMA_3, name="Gemma-3-270m fp32", dtype=torch.float32)
GPT_OSS = Shape("gpt-oss-20b", 2880, 64, 8, 64, 2880, 201_088, head_norms=False)
QWEN_MOE = Shape("Qwen3-30B-A3B", 2048, 32, 4, 128, 768, 151_936, head_norms=True)
QWEN_MOE_FLOAT32 = replace(QWEN_MOE, name="Qwen3-30B-A3B fp32", dtype=torch.float32)
LFM2 = Shape(
    "LFM2-1.2B", 2048, 32, 8, 64, 8192, 65_536, head_norms=True, state=ShortConv((True,), 2048, 3)
)
QWEN_NEXT = Shape(
    *("Qwen3-Next-80B-A3B", 2048, 16, 2, 256, 512, 151_936),
    head_norms=True,
    state=DeltaNet((True,), 16, 32, 128, 128, 4),
)
QWEN_35 = Shape(
    *("Qwen3.5-27B", 5120, 24, 4, 256, 17_408, 248_320),
    head_norms=True,
    state=DeltaNet((True,), 16, 48, 128, 128, 4),
)
LFM2_FLOAT32 = replace(LFM2, name="LFM2-1.2B fp32", dtype=torch.float32)
NEXT_FLOAT32 = replace(QWEN_NEXT, name="Qwen3-Next fp32", dtype=torch.float32)


def kv_view(
    shape: Shape, kept: KVCacheDType = "auto", *, tensors: int = 2, beside: int = 0
) -> KVStorage:
    """Return the KV cache of one layer, as the last one of a unit if `beside` numbers of another
    layer are there too.
    """
    kinds = ()
    if beside:
        kinds = (
            LayerSpec(1, beside, False, 0, 0),
            LayerSpec(shape.kv_heads, shape.head_dim, False, 1, 0),
        )
    spec = SimpleNamespace(
        num_layers=1 + bool(beside),
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        windows=(0,) * (1 + bool(beside)),
        state=None,
        kv_tensors=tensors,
        kinds=kinds,
    )
    cpu: Any = torch.device("cpu")
    return KVStorage(spec, 4096, BLOCK_SIZE, shape.dtype, cpu, kv_cache_dtype=kept)  # type: ignore[arg-type]


def with_units(view: KVStorage) -> KVStorage:
    """Give the cache a map of units."""
    view.unit_map = SimpleNamespace(units=lambda: torch.zeros(1, 64, dtype=torch.int64))  # type: ignore[assignment]
    view.places = [(0, index) for _, index in view.places]
    return view


def decode_batch(num_seqs: int) -> ForwardBatch:
    """Return one row per sequence, each at the end of `CONTEXT` tokens."""
    return batch_of_rows(
        [Rows([0], CONTEXT - 1, range(CONTEXT // BLOCK_SIZE))] * num_seqs, BLOCK_SIZE
    )


def prefill_batch(num_seqs: int) -> ForwardBatch:
    """Return all `CONTEXT` tokens of each sequence."""
    return batch_of_rows(
        [Rows([0] * CONTEXT, 0, range(CONTEXT // BLOCK_SIZE))] * num_seqs, BLOCK_SIZE
    )


# Calls import their modules themselves because this file is also read without Triton.


# row counts for row-wise calls: no count may compile a kernel of its own
ROWS = (1, 2, 7, 4096)


def _embed(shape: Shape) -> None:
    from nano_inference.ops.cuda.rows import embed

    for rows in ROWS:
        embed(torch.zeros(rows, dtype=torch.int64), shape.empty(shape.vocab, shape.hidden))


def _rms_norm(shape: Shape) -> None:
    from nano_inference.ops.cuda.rows import rms_norm

    for rows in ROWS:
        residual = shape.empty(rows, shape.hidden, dtype=torch.float32)
        rms_norm(None, residual, shape.norm(shape.hidden))
        rms_norm(shape.empty(rows, shape.hidden), residual, shape.norm(shape.hidden))
    # an address that is not a multiple of 16
    odd = torch.zeros(shape.hidden + 1, dtype=shape.dtype)[1:]
    rms_norm(
        odd[None],
        shape.empty(1, shape.hidden, dtype=torch.float32),
        shape.norm(shape.hidden)._replace(weight=odd),
    )


def _gate(shape: Shape) -> None:
    from nano_inference.ops.cuda.rows import gate

    for rows in ROWS:
        gate(shape.empty(rows, 2 * shape.inner), "silu")


def _gelu(shape: Shape) -> None:
    from nano_inference.ops.cuda.rows import gate

    gate(shape.empty(8, 2 * shape.inner), "gelu_tanh")


def _inputs(shape: Shape) -> None:
    from nano_inference.ops.cuda.rows import make_noise_keys, relay_tokens

    for rows in ROWS:
        integers = torch.zeros(rows, dtype=torch.int64)
        relay_tokens(integers.clone(), integers, integers)
        make_noise_keys(integers, integers, torch.zeros(rows, 2, dtype=torch.int64))


def _rope(
    shape: Shape,
    *,
    full: bool = False,
    units: bool = False,
    overlaps: bool = False,
    kept: KVCacheDType = "auto",
) -> None:
    from nano_inference.ops.cuda.rows import rope_and_store

    angles = shape.empty(2 * CONTEXT, shape.head_dim // 2, dtype=torch.float32)
    widths = (
        (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim)
        if full
        else (shape.head_dim,) * 2
    )
    norms = (shape.norm(widths[0]), shape.norm(widths[1])) if full or shape.head_norms else None
    for batch in (decode_batch(1), decode_batch(2), prefill_batch(4)):
        view, qkv = kv_view(shape, kept), shape.empty(len(batch.input_ids), shape.qkv)
        view = with_units(view) if units else view
        rope = RopeArgs(angles, angles, shape.heads, shape.kv_heads, HeadNorms(*(norms or ())))
        places = (batch.positions, batch.slot_mapping)
        rope_and_store(qkv, rope, *places, view, 0, overlaps=overlaps)


def _rope_kinds(shape: Shape) -> None:
    """Store joint keys and values with their norms, and no keys at all."""
    from nano_inference.ops.cuda.rows import rope_and_store

    angles = shape.empty(2 * CONTEXT, shape.head_dim // 2, dtype=torch.float32)
    norm, view = shape.norm(shape.head_dim), with_units(kv_view(shape, beside=1024))
    for batch in (decode_batch(1), prefill_batch(4)):
        for kept in (0, shape.kv_heads):
            norms = HeadNorms(norm, norm if kept else None, norm if kept else None)
            rope = RopeArgs(angles, angles, shape.heads, kept, norms, joint=True)
            columns = (shape.heads + kept) * shape.head_dim
            qkv, places = shape.empty(len(batch.input_ids), columns), batch.slot_mapping
            rope_and_store(qkv, rope, batch.positions, places, view, 1)


def _attention_kinds(shape: Shape) -> None:
    view = with_units(kv_view(shape, beside=1024))
    for batch_invariant in (False, True):
        for batch in (decode_batch(2), prefill_batch(4)):
            _attention(shape, batch, batch_invariant=batch_invariant, view=view, layer=1)


def _latents(shape: Shape) -> None:
    from nano_inference.ops.cuda.latent import store, values

    rows_of_kv = shape.heads * (LATENT.plain + LATENT.value)
    norm = shape.norm(LATENT.rank)
    weights = LatentWeights(shape.empty(rows_of_kv, LATENT.rank), norm, LATENT)
    angles = shape.empty(2 * CONTEXT, LATENT.rotary // 2, dtype=torch.float32)
    rope = RopeArgs(angles, angles, shape.heads, 1, interleaved=True)
    for batch in (decode_batch(1), decode_batch(2), prefill_batch(4)):
        rows = len(batch.input_ids)
        q = shape.empty(rows, shape.heads * (LATENT.plain + LATENT.rotary))
        c, view = shape.empty(rows, LATENT.key), kv_view(shape, tensors=1)
        store(q, c, weights, rope, batch.positions, batch.slot_mapping, view, 0)
        values(shape.empty(rows, shape.heads * LATENT.key), weights)


def _attention_latents(shape: Shape) -> None:
    for view in (kv_view(shape, tensors=1), with_units(kv_view(shape, tensors=1))):
        for batch_invariant in (False, True):
            for batch in (decode_batch(2), prefill_batch(4)):
                how = {"batch_invariant": batch_invariant, "view": view}
                _attention(shape, batch, unread=LATENT.rotary, **how)


def _attention_latents_decode(shape: Shape) -> None:
    _attention(shape, decode_batch(2), unread=LATENT.rotary, view=kv_view(shape, tensors=1))


def _experts_recorded(shape: Shape) -> None:
    from nano_inference.ops.cuda.moe import record_experts

    record = torch.zeros(4097, 8, dtype=torch.int16)
    for rows in ROWS:
        record_experts(record, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 8).long())


def _rope_full(shape: Shape) -> None:
    _rope(shape, full=True)


def _attention(
    shape: Shape,
    batch: ForwardBatch,
    *,
    batch_invariant: bool = False,
    window: int = 0,
    has_sinks: bool = False,
    cap: float = 0.0,
    overlaps: bool = False,
    kept: KVCacheDType = "auto",
    unread: int = 0,
    view: KVStorage | None = None,
    layer: int = 0,
) -> None:
    from triton.runtime import driver

    from nano_inference.ops.cuda.attention import Attention

    architecture = driver.active.get_current_target().arch
    attention = Attention(
        batch_invariant=batch_invariant, architecture=architecture, overlaps=overlaps
    )
    plan = attention.plan(batch, BLOCK_SIZE, window)
    q = shape.empty(len(batch.positions), shape.heads, shape.head_dim)
    sinks = shape.empty(shape.heads, dtype=torch.float32) if has_sinks else None
    scores = AttentionArgs(shape.head_dim**-0.5, sinks, cap, unread)
    attention.attend(q, view or kv_view(shape, kept), layer, plan, scores)


def _attention_decode(shape: Shape) -> None:
    for num_seqs in ROWS[:3]:
        _attention(shape, decode_batch(num_seqs))


def _attention_any(shape: Shape) -> None:
    _attention(shape, prefill_batch(4))


def _attention_window(shape: Shape) -> None:
    _attention(shape, prefill_batch(4), window=512)


def _attention_invariant(shape: Shape) -> None:
    _attention(shape, decode_batch(2), batch_invariant=True)
    _attention(shape, prefill_batch(4), batch_invariant=True)


def _attention_cap(shape: Shape) -> None:
    for batch_invariant in (False, True):
        _attention(shape, decode_batch(2), batch_invariant=batch_invariant, cap=50.0)
        _attention(shape, prefill_batch(4), batch_invariant=batch_invariant, cap=50.0)


def _attention_sinks(shape: Shape) -> None:
    for batch_invariant in (False, True):
        _attention(shape, decode_batch(2), batch_invariant=batch_invariant, has_sinks=True)
        _attention(shape, prefill_batch(4), batch_invariant=batch_invariant, has_sinks=True)


def _attention_codes(shape: Shape, kept: KVCacheDType) -> None:
    for batch_invariant in (False, True):
        _attention(shape, decode_batch(2), batch_invariant=batch_invariant, kept=kept)
        _attention(shape, prefill_batch(4), batch_invariant=batch_invariant, kept=kept)


def _attention_fp8(shape: Shape) -> None:
    _attention_codes(shape, "fp8")


def _attention_int8(shape: Shape) -> None:
    _attention_codes(shape, "int8")


def _attention_fp8_decode(shape: Shape) -> None:
    _attention(shape, decode_batch(2), kept="fp8")


def _rope_codes(shape: Shape) -> None:
    _rope(shape, kept="fp8")
    _rope(shape, kept="int8", units=True)


def _rope_units(shape: Shape) -> None:
    _rope(shape, units=True)


def _states(shape: Shape, block_size: int = BLOCK_SIZE, *, decodes: bool = False) -> None:
    """Run a layer with a state, with and without a map of units, eagerly and captured."""
    from nano_inference.ops.cuda.delta import delta_net
    from nano_inference.ops.cuda.state import short_conv

    spec, batches = shape.state, [decode_batch(1)] if decodes else [decode_batch(2)]
    assert spec is not None
    batches += [] if decodes else [prefill_batch(4)]
    floats: dict[str, Any] = {"dtype": torch.float32}
    for batch, mapped, captured in product(batches, (False, True), (False, True)):
        view: Any = StateStorage(spec, 64, block_size, shape.dtype, torch.device("cpu"))
        if mapped:
            view.unit_map = SimpleNamespace(units=lambda: torch.zeros(1, 64, dtype=torch.int64))
        if captured:
            batch = replace(batch, table_stride=torch.zeros(1, dtype=torch.int64))
        rows, conv = len(batch.input_ids), shape.empty(spec.widths[0], 1, spec.taps)
        if isinstance(spec, ShortConv):
            bias = shape.empty(spec.channels) if mapped else None
            weights = ShortConvWeights(conv, bias)
            short_conv(shape.empty(rows, 3 * spec.channels), weights, batch, view, 0)
            continue
        weights = DeltaWeights(
            conv,
            shape.empty(spec.value_heads, **floats),
            shape.empty(spec.value_heads, **floats),
            shape.empty(spec.value_dim),
            1e-6,
            spec.key_heads,
            spec.value_heads,
            spec.key_dim,
            spec.value_dim,
            spec.in_tiles,
        )
        width = spec.channels + spec.value_width + 2 * spec.value_heads
        delta_net(shape.empty(rows, width), weights, batch, view, 0)


def _states_of_long_blocks(shape: Shape) -> None:
    _states(shape, MAX_DELTA_BLOCK)


def _states_small(shape: Shape) -> None:
    _states(shape, decodes=True)


def _sigmoid_gate(shape: Shape) -> None:
    from nano_inference.ops.cuda.state import sigmoid_gate

    width = shape.heads * shape.head_dim
    for rows in ROWS:
        sigmoid_gate(shape.empty(rows, width), shape.empty(rows, width + shape.qkv)[:, :width])


def _draw(shape: Shape, samples: Iterable[int] = (1, 7, 256), **options: Any) -> None:
    from nano_inference import SamplingParams
    from nano_inference.ops.cuda.sampling import draw
    from nano_inference.sampling.tensors import DrawRequest, sampling_batch

    for num in samples:
        requests = [
            DrawRequest(SamplingParams(**options), row, completion=[1]) for row in range(num)
        ]
        draw(shape.empty(num, shape.vocab, dtype=torch.float32), sampling_batch(requests))


def _draw_raw(shape: Shape) -> None:
    _draw(shape, (1,), raw_logprobs=True)
    _draw(shape, (1,), temperature=0.0)


def _draw_filtered(shape: Shape) -> None:
    _draw(shape, top_k=50, top_p=0.9)


def _draw_all(shape: Shape) -> None:
    """Draw with every option that costs extra passes."""
    options = {
        "top_k": 50,
        "sampling_mask": True,
        "top_logprobs": 5,
        "logit_bias": {1: 1.0},
        "presence_penalty": 1.0,
    }
    _draw(shape, (1, 2), **options, raw_logprobs=True, allowed_token_ids=frozenset({1, 2}))


def _score(shape: Shape) -> None:
    from nano_inference.ops.cuda.sampling import score

    for num in (1, 7, 256):
        logits = shape.empty(num, shape.vocab, dtype=torch.float32)
        score(logits, torch.zeros(num, dtype=torch.int64), torch.ones(num, dtype=torch.float64))


def _product(shape: Shape) -> None:
    _products(shape, (8, 128, 1024))  # few; more; so many that segments share programs


def _product_of_few(shape: Shape) -> None:
    _products(shape, (8,))


def _products(shape: Shape, num_rows: tuple[int, ...]) -> None:
    from nano_inference.ops.cuda.matmul import invariant_product

    for rows in num_rows:
        x, weight = shape.empty(rows, shape.inner), shape.empty(shape.hidden, shape.inner)
        invariant_product(x, weight, None if rows > 8 else shape.empty(shape.hidden), shape.dtype)


def _quantised(shape: Shape, num_rows: tuple[int, ...] = (1, 16, 64, 1024)) -> None:
    from nano_inference.ops.cuda.quantised import (
        AlignedWeight,
        quantised_embedding,
        quantised_product,
    )

    cpu, form, inner = torch.device("cpu"), FORMATS["int8"], shape.inner
    eighths = tuple(inner // 8 * part for part in range(9))
    up = AlignedWeight((2 * inner, shape.hidden), shape.dtype, cpu, form)
    down = AlignedWeight((shape.hidden, inner), shape.dtype, cpu, form, eighths)
    for rows in num_rows:
        quantised_product(shape.empty(rows, shape.hidden), up, shape.empty(2 * inner))
        quantised_product(shape.empty(rows, inner, dtype=torch.float32), down)
        quantised_embedding(torch.zeros(rows, dtype=torch.int64), up, 1.0)


def _quantised_small(shape: Shape) -> None:
    _quantised(shape, (16, 1024))


def _quantised_experts(shape: Shape, form: str = "int8", activation: str = "silu") -> None:
    from nano_inference.ops.cuda.backend import CudaOps
    from nano_inference.ops.cuda.moe import products
    from nano_inference.ops.moe import Biases, Experts
    from nano_inference.ops.settings import Routing

    cpu, count, inner, hidden = torch.device("cpu"), 8, shape.inner, shape.hidden
    sizes = ((count * 2 * inner, hidden), (count * hidden, inner))
    allocate, stored = CudaOps(batch_invariant=True).allocate, FORMATS[form]
    gate_up, down = (allocate(size, shape.dtype, cpu, form=stored) for size in sizes)
    router, numbers = shape.empty(count, hidden), shape.empty(count, dtype=torch.float32)
    biases = Biases(numbers, *(shape.empty(size) for size, _ in sizes))
    for added in (None, biases):
        experts = Experts(router, gate_up, down, count, Routing(2, True), activation, biases=added)
        rows = torch.arange(4).repeat_interleave(2)
        products(shape.empty(4, hidden), rows, rows % count, experts)


def _microscaled_experts(shape: Shape) -> None:
    _quantised_experts(shape, "mxfp4-32", "clamped_swiglu")


def _fp8_product(shape: Shape, num_rows: tuple[int, ...] = (8, 128, 1024)) -> None:
    from nano_inference.ops.cuda.matmul import invariant_product
    from nano_inference.ops.cuda.quantised import AlignedWeight, quantised_embedding

    cpu = torch.device("cpu")
    down = AlignedWeight((shape.hidden, shape.inner), shape.dtype, cpu, FP8)
    for rows in num_rows:
        bias = None if rows > 8 else shape.empty(shape.hidden)
        invariant_product(shape.empty(rows, shape.inner), down, bias, torch.float32)
    quantised_embedding(torch.zeros(8, dtype=torch.int64), down, 1.0)


def _fp8_product_small(shape: Shape) -> None:
    _fp8_product(shape, (8,))


def _few_rows(
    shape: Shape, num_rows: tuple[int, ...] = (1, 2, 3, 8), *, overlaps: bool = False
) -> None:
    from nano_inference.ops.cuda import few_rows as kernels

    how = kernels.Launch(overlaps)
    for rows in num_rows:
        stream, norm = (
            shape.empty(rows, shape.hidden, dtype=torch.float32),
            shape.norm(shape.hidden),
        )
        kernels.product(stream, norm, shape.empty(shape.qkv, shape.hidden), None, how)
        attended, inner = (
            shape.empty(rows, shape.heads * shape.head_dim),
            shape.empty(rows, shape.inner),
        )
        kernels.product_added(
            attended, None, shape.empty(shape.hidden, attended.shape[1]), None, stream, 1.0, how
        )
        kernels.product_gated(
            stream, norm, shape.empty(2 * shape.inner, shape.hidden), None, "silu", how
        )
        kernels.product_added(
            inner, None, shape.empty(shape.hidden, shape.inner), None, stream, 1.0, how
        )


def _few_coded_rows(
    shape: Shape,
    form: str = "int8",
    num_rows: tuple[int, ...] = (1, 2, 3, 8),
    *,
    overlaps: bool = False,
) -> None:
    """Multiply by weights in 8 bits, cut into the segments of ranks, with norms in the kernels and
    before them.
    """
    from nano_inference.ops.cuda import few_rows as kernels
    from nano_inference.ops.cuda.quantised import AlignedWeight

    def weight(rows: int, columns: int, parts: int = 1) -> AlignedWeight:
        bounds = tuple(columns // parts * part for part in range(parts + 1))
        cpu = torch.device("cpu")
        return AlignedWeight((rows, columns), shape.dtype, cpu, form_named(form), bounds)

    attended = shape.heads * shape.head_dim
    qkv, up = weight(shape.qkv, shape.hidden), weight(2 * shape.inner, shape.hidden)
    o, down = weight(shape.hidden, attended, 8), weight(shape.hidden, shape.inner, 8)
    norm = shape.norm(shape.hidden)
    for rows, norms in product(num_rows, (True, False)):
        how = kernels.Launch(overlaps, norms)
        stream = shape.empty(rows, shape.hidden, dtype=torch.float32)
        kernels.product(stream, norm, qkv, shape.empty(shape.qkv), how)
        kernels.product_added(shape.empty(rows, attended), None, o, None, stream, 1.0, how)
        kernels.product_gated(stream, norm, up, None, "silu", how)
        kernels.product_added(shape.empty(rows, shape.inner), None, down, None, stream, 1.0, how)


def _few_fp8_rows(shape: Shape) -> None:
    _few_coded_rows(shape, "fp8")


def _few_coded_rows_small(shape: Shape) -> None:
    _few_coded_rows(shape, num_rows=(1, 8))


def _few_rows_overlapping(shape: Shape) -> None:
    from triton.runtime import driver

    if driver.active.get_current_target().arch >= 90:  # older ones cannot
        _few_rows(shape, overlaps=True)
        for form in ("int8", "fp8"):
            _few_coded_rows(shape, form, overlaps=True)
        _rope(shape, overlaps=True)
        for batch in (decode_batch(2), prefill_batch(4)):
            _attention(shape, batch, overlaps=True)


def _lora(shape: Shape, num_rows: tuple[int, ...] = (1, 7, 300), rank: int = 64) -> None:
    """Add adapters to the products of a layer and to the head."""
    from nano_inference.ops.cuda.lora import GroupedLora

    ops, attended = GroupedLora(), shape.heads * shape.head_dim
    kept = shape.kv_heads * shape.head_dim
    sites = {
        "qkv": (shape.hidden, (attended, kept, kept)),
        "o": (attended, (shape.hidden,)),
        "gate_up": (shape.hidden, (shape.inner, shape.inner)),
        "down": (shape.inner, (shape.hidden,)),
        "head": (shape.hidden, (shape.vocab,)),
    }
    parts: dict[str, tuple[LoraPart, ...]] = {}
    for name, (width, columns) in sites.items():
        pairs = (
            (shape.empty(rank, size, dtype=torch.float32) for size in (width, part))
            for part in columns
        )
        starts = accumulate((0, *columns))
        parts[name] = tuple(
            LoraPart(start, a, b, 1.0) for start, (a, b) in zip(starts, pairs, strict=False)
        )
    for rows in num_rows:
        batch = batch_of_rows([Rows([0] * rows, 0, range(rows))], 1)
        adapter = Adapter(f"of rank {rank}", 1, parts)
        batch = replace(
            batch, adapters=(adapter,), row_adapters=torch.zeros(rows, dtype=torch.int64)
        )
        batch = ops.group(batch)
        for name, (width, columns) in sites.items():
            y = shape.empty(rows, sum(columns), dtype=torch.float32 if name == "head" else None)
            ops.lora(y, shape.empty(rows, width), name, batch)


def _lora_ranks(shape: Shape) -> None:
    """Ranks compile no kernels of their own."""
    for rank in (8, 16, 17, 32):
        _lora(shape, (7,), rank)


def _lora_small(shape: Shape) -> None:
    _lora(shape, (7,))


def _few_rows_small(shape: Shape) -> None:
    _few_rows(shape, (1, 8))


TRAINED = 512  # rows of a micro-batch


def _gradients(shape: Shape) -> Any:
    from nano_inference.ops.cuda.gradients import CudaGradients

    return CudaGradients(shape.dtype, torch.device("cpu"))


def _gradient_products(shape: Shape) -> None:
    """Multiply forward and backward, with a bias, and add to a weight's gradient."""
    side, weight = _gradients(shape), shape.empty(shape.hidden, shape.inner)
    exact, a = side.exact(), shape.empty(16, shape.hidden, dtype=torch.float32)
    for rows in (1, 7, TRAINED):
        x = shape.empty(rows, shape.inner)
        out = side.product(x, side.packed(weight), shape.empty(shape.hidden))
        side.add_product(x, side.packed(weight), out)
        side.add_product(side.rounded(out), side.packed_turned(weight), x.float())
        side.add_outer(out, x, shape.empty(*weight.shape, dtype=torch.float32))
        inner = exact.product(out, exact.packed(a))
        exact.add_product(inner, exact.packed_turned(a), out)
        exact.add_outer(inner, out, a)


def _gradient_rows(shape: Shape) -> None:
    """Differentiate norms, of heads too, rotations and gates, and add rows up."""
    from nano_inference.ops.gradients import HeadShape, Rotary

    side, heads = _gradients(shape), HeadShape(shape.heads, shape.kv_heads, shape.head_dim)
    angles = shape.empty(CONTEXT, shape.head_dim // 2, dtype=torch.float32)
    total = shape.empty(shape.hidden, dtype=torch.float32)
    norm = shape.norm(shape.head_dim) if shape.head_norms else None
    for rows in (1, 2, 7, TRAINED):
        x = shape.empty(rows, shape.hidden, dtype=torch.float32)
        side.norm(x, shape.norm(shape.hidden))
        side.norm_gradient(x, shape.norm(shape.hidden), x, x, total)
        side.norm_gradient(x, shape.norm(shape.hidden), x.clone(), x, None, adds=True)
        positions = torch.zeros(rows, dtype=torch.int64)
        rotary = Rotary(angles, angles, False, None, positions)
        qkv = shape.empty(rows, heads.columns, dtype=torch.float32)
        parts = side.rotate(qkv, heads, rotary, (norm, norm))
        side.rotate_gradient(type(parts)(*(part.float() for part in parts)), heads, rotary)
        if norm is not None:
            queries = qkv[:, : heads.heads * heads.head_dim]
            side.norm_gradient(queries, norm, queries, queries, total[: heads.head_dim])
        gate_up = shape.empty(rows, 2 * shape.inner, dtype=torch.float32)
        d_out = shape.empty(rows, shape.inner, dtype=torch.float32)
        side.gate(gate_up, "silu")
        for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
            side.gate_gradient(gate_up, activation, d_out)
        side.add_columns(x, total)
        embedding = shape.empty(shape.vocab, shape.hidden, dtype=torch.float32)
        side.add_rows(x, positions, embedding, 1.0)


def _gradient_experts(shape: Shape) -> None:
    """Route, multiply and differentiate the experts of some rows."""
    from nano_inference.ops.gradients import RouteShape
    from nano_inference.ops.settings import Routing

    side, count, hidden, inner = _gradients(shape), 128, shape.hidden, shape.inner
    sizes = ((2 * inner, hidden), (hidden, inner))
    kinds = ("softmax", "none"), ("sigmoid", "plain"), ("softmax", "gated")
    for (scores, kind), renormalized in product(kinds, (True, False)):
        route = RouteShape(count, Routing(8, renormalized, scores), kind)  # type: ignore[arg-type]
        logits = shape.empty(16, count + (kind == "gated"), dtype=torch.float32)
        ids = torch.arange(8).expand(16, 8).contiguous()
        weights = side.route_weights(logits, ids, route)
        side.route_gradient(logits, ids, route, weights)
    for rows in (1, 2, 7, TRAINED):
        choices = side.choices(torch.arange(8).expand(rows, 8).contiguous(), count)
        for height, width in sizes:
            x, bias = shape.empty(8 * rows, width), shape.empty(count * height)
            stack = shape.empty(count * height, width)
            weights = side.packed_experts(stack, count)
            out = side.expert_products(x, weights, choices)
            side.expert_products(x, weights, choices, bias)
            turned = side.packed_experts_turned(stack, count)
            d_x = side.expert_products(side.rounded(out), turned, choices)
            side.row_products(d_x, d_x)
            side.sum_experts(d_x, choices, None)
            side.sum_experts(d_x, choices, shape.empty(rows, 9, dtype=torch.float32))
            side.add_expert_outers(out, x, choices, shape.empty(*stack.shape, dtype=torch.float32))
            side.add_expert_columns(out, choices, shape.empty(len(bias), dtype=torch.float32))


def _gradient_head(shape: Shape) -> None:
    from nano_inference.ops.gradients import LogitRule

    side, mask_rows = _gradients(shape), torch.zeros(16, dtype=torch.int64)
    words = torch.zeros(1, -(-shape.vocab // 32), dtype=torch.int32)
    targets = torch.arange(17), torch.zeros(16, dtype=torch.int64), torch.zeros(16)
    for cap in (0.0, 30.0):
        for mask in (words, words[:0]):
            logits = shape.empty(16, shape.vocab, dtype=torch.float32)
            side.logit_gradient(logits, targets, (mask_rows, mask), LogitRule(1.0, cap, 1.0))


def _gradient_attention(
    shape: Shape, *, window: int = 0, cap: float = 0.0, has_sinks: bool = False
) -> None:
    """Attend and differentiate: a prompt, and two samples that continue it."""
    from nano_inference.ops.gradients import AttentionRule, HeadShape, PathRows, Rotated

    side, heads = _gradients(shape), HeadShape(shape.heads, shape.kv_heads, shape.head_dim)
    prompt, rest = torch.arange(200), torch.arange(100)
    samples = (torch.cat((prompt, rest + first)) for first in (200, 300))
    paths = side.paths([PathRows(prompt, 200), *(PathRows(path, 100) for path in samples)])
    widths = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    parts = Rotated(*(shape.empty(400, width) for width in widths))
    sinks = torch.zeros(shape.heads) if has_sinks else None
    rule = AttentionRule(window, shape.head_dim**-0.5, cap, sinks)
    attended = side.attend(parts, heads, paths, rule)
    d_out = torch.empty_like(attended.out)
    side.attend_gradient(parts, heads, paths, rule, attended, d_out, sinks)


def _gradient_attention_window(shape: Shape) -> None:
    _gradient_attention(shape, window=512)


def _gradient_attention_rules(shape: Shape) -> None:
    _gradient_attention(shape, cap=50.0)
    _gradient_attention(shape, window=128, has_sinks=True)


@dataclass(frozen=True)
class Call:
    """A call that launches kernels.

    Attributes:
        name: Name in the table.
        run: Calls a host function of `ops/cuda` with tensors of this shape. The results are not
            used.
        small: Also compiled in ordinary CI, at the first shape, for sm_90. At most one or two per
            module.
        shapes: Shapes of models.
    """

    name: str
    run: Callable[[Shape], None]
    small: bool = False
    shapes: tuple[Shape, ...] = (QWEN, LLAMA)


CALLS = [
    Call("embed", _embed),
    Call("rms_norm", _rms_norm, small=True),
    Call("gate", _gate, small=True),
    Call("gate, GELU", _gelu),
    Call("rope_and_store", _rope, small=True),
    Call("rope_and_store, full norms", _rope_full, shapes=(LLAMA,)),
    Call("rope_and_store, units", _rope_units, shapes=(QWEN,)),
    Call("relay, keys", _inputs, shapes=(QWEN,)),
    Call("attention, decode", _attention_decode, small=True),
    Call("attention, any chunks", _attention_any),
    Call("attention, sliding window", _attention_window, shapes=(QWEN,)),
    Call("attention, invariant", _attention_invariant),
    Call("attention, a cap", _attention_cap, shapes=(GEMMA_2,)),
    Call("attention, sinks", _attention_sinks, shapes=(GPT_OSS,)),
    Call("attention, float32", _attention_any, shapes=(QWEN_FLOAT32, GEMMA_3_FLOAT32)),
    Call("attention, kinds", _attention_kinds, shapes=(GEMMA_4, GEMMA_4_FULL)),
    Call("attention, latents", _attention_latents, shapes=(DEEPSEEK, DEEPSEEK_LITE)),
    Call("attention, latents, decode", _attention_latents_decode, small=True, shapes=(DEEPSEEK,)),
    Call("attention, kinds, float32", _attention_kinds, shapes=(GEMMA_4_FLOAT32,)),
    Call("attention, latents, float32", _attention_latents, shapes=(DEEPSEEK_FLOAT32,)),
    Call("latents", _latents, small=True, shapes=(DEEPSEEK, DEEPSEEK_LITE, DEEPSEEK_FLOAT32)),
    Call("rope_and_store, kinds", _rope_kinds, shapes=(GEMMA_4_FULL, GEMMA_4)),
    Call("experts, recorded", _experts_recorded, shapes=(QWEN,)),
    Call("attention, FP8", _attention_fp8),
    Call("attention, FP8, decode", _attention_fp8_decode, small=True),
    Call("attention, int8", _attention_int8),
    Call("rope_and_store, codes", _rope_codes, small=True),
    Call("convolution", _states, small=True, shapes=(LFM2, LFM2_FLOAT32)),
    Call("delta rule", _states, shapes=(QWEN_NEXT, QWEN_35, NEXT_FLOAT32)),
    Call("delta rule, long blocks", _states_of_long_blocks, shapes=(QWEN_NEXT,)),
    Call("delta rule of a decode", _states_small, small=True, shapes=(QWEN_NEXT,)),
    Call("gate of attention", _sigmoid_gate, small=True, shapes=(QWEN_NEXT, NEXT_FLOAT32)),
    Call("draw", _draw, small=True),
    Call("draw, raw", _draw_raw),
    Call("draw, filtered", _draw_filtered, shapes=(QWEN,)),
    Call("draw, edits, mask, best", _draw_all, shapes=(QWEN,)),
    Call("score", _score, small=True),
    Call("product", _product),
    Call("product, few rows", _product_of_few, small=True),
    Call("int8 product", _quantised),
    Call("int8 product, 16 or 1,024 rows", _quantised_small, small=True, shapes=(QWEN,)),
    Call("int8 experts", _quantised_experts, shapes=(QWEN,)),
    Call("MXFP4 experts", _microscaled_experts, small=True, shapes=(GPT_OSS,)),
    Call("FP8 product", _fp8_product),
    Call("FP8 product, few rows", _fp8_product_small, small=True, shapes=(QWEN,)),
    Call("trunk of few rows", _few_rows),
    Call("trunk of few rows, overlapping", _few_rows_overlapping),
    Call("trunk of few rows, int8", _few_coded_rows, shapes=(QWEN, QWEN_8B, LLAMA)),
    Call("trunk of few rows, FP8", _few_fp8_rows, shapes=(QWEN, LLAMA)),
    Call("trunk of 1 or 8 rows, int8", _few_coded_rows_small, small=True, shapes=(QWEN,)),
    Call("adapters", _lora, shapes=(QWEN, QWEN_8B, LLAMA, QWEN_FLOAT32)),
    Call("adapters, ranks", _lora_ranks, shapes=(QWEN_8B,)),
    Call("adapters of a step", _lora_small, small=True, shapes=(QWEN,)),
    Call("trunk of 1 or 8 rows", _few_rows_small, small=True, shapes=(QWEN,)),
    Call("gradients of products", _gradient_products, small=True, shapes=(LLAMA, QWEN_FLOAT32)),
    Call("gradients of rows", _gradient_rows, small=True, shapes=(QWEN_8B, LLAMA, GEMMA_3)),
    Call(
        "gradients of experts",
        _gradient_experts,
        small=True,
        shapes=(QWEN_MOE, GPT_OSS, QWEN_MOE_FLOAT32),
    ),
    Call("gradients of logits", _gradient_head, shapes=(QWEN, GEMMA_2)),
    Call(
        "gradients of attention",
        _gradient_attention,
        small=True,
        shapes=(QWEN_8B, QWEN, GEMMA_3, GPT_OSS),
    ),
    Call(
        "gradients of attention, sliding window",
        _gradient_attention_window,
        shapes=(QWEN_8B, GEMMA_3),
    ),
    Call(
        "gradients of attention, cap and sinks",
        _gradient_attention_rules,
        shapes=(GEMMA_2, GPT_OSS),
    ),
    Call("gradients of attention, float32", _gradient_attention, shapes=(QWEN_FLOAT32,)),
]


def compile_calls(
    calls: Iterable[Call], archs: Iterable[int], *, one_shape: bool = False
) -> list[Compiled]:
    """Compile all launches of these calls, and each distinct kernel of a call once."""
    compiled: dict[tuple[str, str, str], Compiled] = {}
    for arch in archs:
        for call in calls:
            for shape in call.shapes[:1] if one_shape else call.shapes:
                with compiling(arch) as made:
                    call.run(shape)
                for kernel in made:
                    key = (call.name, shape.name, kernel.hash)
                    if key not in compiled:
                        compiled[key] = describe(kernel, call.name, shape.name, arch)
    return list(compiled.values())


def main() -> None:
    """Print the table and optionally write JSON."""
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help="calls whose names contain it")
    parser.add_argument("--small", action="store_true", help="what ordinary CI compiles")
    parser.add_argument(
        "--arch", type=int, nargs="+", default=[100, 90, 80], choices=list(SHARED_MEMORY)
    )
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    calls = [
        call for call in CALLS if options.only in call.name and (call.small or not options.small)
    ]
    kernels = compile_calls(calls, options.arch, one_shape=options.small)
    print(table(kernels))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1))


if __name__ == "__main__":
    main()
