"""Each operation at the widths of real models, compared with double precision on the
same device.
"""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import SamplingParams
from nano_inference.config import KVCacheDType
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.cuda import few_rows, moe
from nano_inference.ops.cuda.backend import CudaOps
from nano_inference.ops.formats import FORMATS
from nano_inference.ops.interface import FEW_ROWS, AttentionArgs, HeadNorms, RopeArgs
from nano_inference.ops.moe import Experts
from nano_inference.ops.quantised import product
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.settings import Routing
from nano_inference.sampling.logit_scale import UNSCALED, LogitScale
from nano_inference.sampling.sample import sample
from nano_inference.sampling.tensors import DrawRequest, sampling_batch, to_device
from tests.gpu.latents import LATENT, TOY_LATENT, Latents
from tests.gpu.target import Target, adapted, adapter, moved, numbers
from tests.models.tiny import llama_config

pytestmark = pytest.mark.gpu

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SHAPES = {  # hidden, inner, heads, kv heads, head_dim, vocabulary
    "qwen3-0.6b": (1024, 3072, 16, 8, 128, 151_936),
    "8b": (4096, 14_336, 32, 8, 128, 128_256),
    "gemma3-270m": (640, 2048, 4, 1, 256, 262_144),
}
TOY = (32, 48, 4, 2, 16, 300)
ROWS = (1, 3, 16, 64, 200)
BLOCK = 16


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, target: Target) -> tuple[int, ...]:
    if target.dry and request.param != "8b":
        pytest.skip("a dry run has one shape")
    return TOY if target.dry else SHAPES[request.param]


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest, target: Target) -> torch.dtype:
    if target.dry and request.param == "bfloat16":
        pytest.skip("the interpreter multiplies matrices of bfloat16 wrongly")
    return getattr(torch, request.param)


@pytest.fixture(params=[False, True], ids=["fast", "invariant"])
def ops(request: pytest.FixtureRequest) -> CudaOps:
    return CudaOps(batch_invariant=request.param)


def rows_of(target: Target) -> tuple[int, ...]:
    return (3,) if target.dry else ROWS


def require_near(got: Tensor, exact: Tensor, ulps: float, floor: float | Tensor = 0.0) -> None:
    allowed = ulps * ULP[got.dtype] * exact.abs() + floor
    error = (got.double() - exact).abs()
    assert bool((error <= allowed).all()), (
        f"{(error / (allowed + 1e-300)).max():.3g} times the allowed error"
    )


def test_products(target: Target, shape: tuple[int, ...], dtype: torch.dtype, ops: CudaOps) -> None:
    """A float32 sum of k products errs by at most a few roundings of the sum of their
    magnitudes.
    """
    hidden, inner = shape[:2]
    for out, columns in ((2 * inner, hidden), (hidden, inner)):
        weight = numbers(1, out, columns, device=target.device, dtype=dtype, scale=0.05)
        bias = numbers(2, out, device=target.device, dtype=dtype)
        exactly = weight.double()
        for rows in rows_of(target):
            x = numbers(rows, rows, columns, device=target.device, dtype=dtype)
            floor = 4 * 2.0**-24 * math.sqrt(columns) * (x.double().abs() @ exactly.abs().T + 1)
            exact = x.double() @ exactly.T
            require_near(ops.linear(x, weight), exact, 1, floor)
            require_near(ops.linear(x, weight, bias), exact + bias.double(), 2, floor)


def test_logits(target: Target, shape: tuple[int, ...], dtype: torch.dtype, ops: CudaOps) -> None:
    """The whole head is multiplied, but only its last rows (the highest addresses) are compared.
    Double precision of all rows would take gigabytes.
    """
    hidden, vocab = shape[0], shape[5]
    part = slice(vocab - min(vocab, 5000), vocab)
    weight = torch.zeros(vocab, hidden, dtype=dtype, device=target.device)
    weight[part] = numbers(
        1, vocab - part.start, hidden, device=target.device, dtype=dtype, scale=0.05
    )
    exactly = weight[part].double()
    for rows in rows_of(target)[:4]:
        x = numbers(rows, rows, hidden, device=target.device, dtype=dtype)
        got = ops.logits(x, weight, LogitScale(2.0))
        assert got.dtype == torch.float32
        assert not got[:, : part.start].any()
        floor = 4 * 2.0**-24 * math.sqrt(hidden) * (x.double().abs() @ exactly.abs().T + 1)
        require_near(got[:, part], x.double() @ exactly.T / 2, 1, floor)


def test_quantised_products(
    target: Target, shape: tuple[int, ...], dtype: torch.dtype, ops: CudaOps
) -> None:
    """Sums of whole numbers have the bits of the definition, for any number of rows."""
    hidden, inner = shape[:2]
    eighths = tuple(inner // 8 * part for part in range(9))
    for out, columns, segments in ((2 * inner, hidden, None), (hidden, inner, eighths)):
        weight: Any = ops.allocate(
            (out, columns), dtype, torch.device(target.device), None, FORMATS["int8"], segments
        )
        weight.write(0, numbers(1, out, columns, device=target.device, dtype=dtype, scale=0.05))
        bias = numbers(2, out, device=target.device, dtype=dtype)
        for rows in (2, 17) if target.dry else (1, 3, 16, 17, 64, 65, 300):
            x = numbers(rows, rows, columns, device=target.device, dtype=dtype)
            exact = product(x, weight.codes())
            assert torch.equal(ops.linear(x, weight), exact)
            assert torch.equal(ops.linear(x, weight, bias), exact + bias.float())


def test_microscaled_experts(target: Target, dtype: torch.dtype) -> None:
    """Rows through experts in MXFP4 at gpt-oss-20b's widths, with and without other rows."""
    hidden, inner, count = (64, 96, 3) if target.dry else (2880, 2880, 8)
    allocate, device = CudaOps(batch_invariant=True).allocate, torch.device(target.device)
    weights: list[Any] = []
    for seed, size in enumerate(((count * 2 * inner, hidden), (count * hidden, inner))):
        weights.append(allocate(size, dtype, device, form=FORMATS["mxfp4-32"]))
        weights[-1].write(0, numbers(seed, *size, device=target.device, scale=0.05))
    router = torch.zeros(count, hidden, device=device)
    gate_up, down = weights
    experts = Experts(router, gate_up, down, count, Routing(2, True), "silu")
    rows = target.size(200, 5)
    x = numbers(3, rows, hidden, device=target.device, dtype=dtype)
    which = torch.arange(rows, device=device)
    held = which * 5 % count
    result = moe.products(x, which, held, experts)
    expected = reference.products(x, which, held, experts)
    assert float((result - expected).norm() / expected.norm()) < 1e-3
    for few in (slice(0, 1), slice(rows // 2, rows // 2 + 3)):
        assert torch.equal(moe.products(x, which[few], held[few], experts), result[few])


def test_rows(target: Target, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Cover the embedding, the norm with the residual stream, and the gate."""
    hidden, inner, vocab = shape[0], shape[1], min(shape[5], 5000)
    ops = CudaOps(batch_invariant=False)
    table = numbers(3, vocab, hidden, device=target.device, dtype=dtype)
    for rows in rows_of(target):
        ids = torch.arange(rows, device=target.device) * 7 % vocab
        require_near(ops.embed(ids, table, 1.5), table[ids].double() * 1.5, 1)
        x, residual = (numbers(seed, rows, hidden, device=target.device) for seed in (4, 5))
        norm = Norm(numbers(6, hidden, device=target.device, dtype=dtype), 1e-6, 0.0, dtype)
        normed, after = ops.rms_norm(x.to(dtype), residual, norm, 1.0)
        total = residual.double() + x.to(dtype).double()
        require_near(after, total, 1)
        assert norm.weight is not None
        scale = (after.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        require_near(normed, after.double() * scale * norm.weight.double(), 2, 1e-6)
        both = numbers(7, rows, 2 * inner, device=target.device, dtype=dtype, scale=3.0)
        one, two = both.double().chunk(2, dim=-1)
        require_near(ops.gate(both, "silu"), torch.nn.functional.silu(one) * two, 2, 1e-6)
        gelu = torch.nn.functional.gelu(one, approximate="tanh")
        require_near(ops.gate(both, "gelu_tanh"), gelu * two, 2, 1e-6)


def test_few_rows(target: Target, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Compare few-row products between a norm and a gate or the residual stream with the plain
    kernels.
    """
    hidden, inner = shape[:2]
    ops = CudaOps(batch_invariant=False)
    gate_up = numbers(1, 2 * inner, hidden, device=target.device, dtype=dtype, scale=0.05)
    down = numbers(2, hidden, inner, device=target.device, dtype=dtype, scale=0.05)
    bias = numbers(3, 2 * inner, device=target.device, dtype=dtype)
    norm = Norm(1 + numbers(4, hidden, device=target.device, dtype=dtype) / 4, 1e-6, 0.0, dtype)
    for rows in (2, 3) if target.dry else range(1, FEW_ROWS + 1):
        stream = numbers(rows, rows, hidden, device=target.device)
        plain = ops.linear(ops.rms_norm(None, stream, norm, 1.0)[0], gate_up, bias)
        gated = ops.gate(plain, "silu")
        # Sums in another order sometimes round differently, and the gate multiplies two of them.
        pairs = [(few_rows.product(stream, norm, gate_up, bias), plain)]
        pairs.append((few_rows.product_gated(stream, norm, gate_up, bias, "silu"), gated))
        added = few_rows.product_added(gated, None, down, None, stream, 0.5)
        pairs.append((added.to(dtype), (stream + ops.linear(gated, down).float() * 0.5).to(dtype)))
        for got, expected in pairs:
            require_near(got, expected.double(), 4, 8 * ULP[dtype] + 1e-4)


def test_adapters(target: Target, shape: tuple[int, ...], dtype: torch.dtype, ops: CudaOps) -> None:
    """Adapters of ranks 8 to 64 and rows without one, compared with double precision."""
    hidden, inner, heads, kv_heads, width = shape[:5]
    kept = kv_heads * width
    for depth, columns in ((hidden, (heads * width, kept, kept)), (inner, (hidden,))):
        adapters = tuple(adapter(target.device, rank, depth, columns) for rank in (8, 16, 40, 64))
        for rows in (1, 3, target.size(64, 20), target.size(300, 33)):
            adapter_of = [(7 * row) % 5 - 1 for row in range(rows)]
            x = numbers(rows, rows, depth, device=target.device, dtype=dtype)
            y = numbers(rows + 1, rows, sum(columns), device=target.device, dtype=dtype)
            exact = y.double()
            for row, index in enumerate(adapter_of):
                for start, a, b, scale in adapters[index].parts["weight"] if index >= 0 else ():
                    added = (x[row].double() @ a.double().T) * scale @ b.double()
                    exact[row, start : start + b.shape[1]] += added
            batch = adapted(adapters, adapter_of, target.device)
            got = ops.lora(y.clone(), x, "weight", batch)
            # TF32 twice keeps 22 bits of a number
            require_near(got, exact, 1, 2.0**-20 * math.sqrt(depth))


def spec_of(shape: tuple[int, ...]) -> ModelSpec:
    heads = {"num_attention_heads": shape[2], "num_key_value_heads": shape[3], "head_dim": shape[4]}
    return spec_from_config(llama_config(hidden=64) | heads | {"num_hidden_layers": 1})


def chunks_of(target: Target) -> list[Rows]:
    """Return decodes at various lengths, a whole prompt and a middle chunk, with
    shuffled blocks.
    """
    spans = (
        [(4, 5), (0, 9), (20, 23)]
        if target.dry
        else [(0, 1), (16, 17), (700, 701), (4095, 4096), (0, 300), (1000, 1064)]
    )
    counts = [-(-end // BLOCK) for _, end in spans]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    blocks = iter(order)
    return [
        Rows([1] * (end - start), start, [next(blocks) for _ in range(count)])
        for (start, end), count in zip(spans, counts, strict=True)
    ]


@pytest.mark.parametrize(("window", "kept"), [(0, "auto"), (37, "auto"), (0, "fp8"), (37, "int8")])
def test_attention(
    target: Target,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    ops: CudaOps,
    window: int,
    kept: KVCacheDType,
) -> None:
    check_attention(target, (*shape[2:5], 0), dtype, ops, window, kept)


# of Gemma 4, and of DeepSeek-V3, whose values are keys without 64 numbers
WIDE = {"512": (32, 4, 512, 0), "latents": (128, 1, 576, 64), "20 heads": (20, 1, 576, 64)}


@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("heads", WIDE)
def test_attention_of_wide_heads(
    target: Target, dtype: torch.dtype, ops: CudaOps, heads: str, window: int
) -> None:
    shape = (4, 1, 48, WIDE[heads][3] // 4) if target.dry else WIDE[heads]
    check_attention(target, shape, dtype, ops, window, "auto")


def check_attention(
    target: Target,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    ops: CudaOps,
    window: int,
    kept: KVCacheDType,
) -> None:
    """For any mix of chunks, compare with a double-precision softmax over the visible keys of each
    row, as the cache holds them.
    """
    heads, kv_heads, width, unread = shape
    chunks = chunks_of(target)
    spec: Any = SimpleNamespace(
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=width,
        windows=(0,),
        state=None,
        kv_tensors=1 if unread else 2,
        kinds=(),
    )
    storage = KVStorage(
        spec,
        sum(len(c.block_ids) for c in chunks),
        BLOCK,
        dtype,
        torch.device(target.device),
        kv_cache_dtype=kept,
    )
    for cache in (storage.keys, storage.values):  # unwritten slots must not be read
        cache.fill_(-1 if storage.format.coded else torch.nan)
    batch = moved(batch_of_rows(chunks, BLOCK), target.device)
    texts: list[tuple[Tensor, Tensor]] = []
    for index, chunk in enumerate(chunks):
        length = chunk.start + len(chunk.token_ids)
        at = torch.arange(length, device=target.device)
        slots = (
            torch.tensor(list(chunk.block_ids), device=target.device)[at // BLOCK] * BLOCK
            + at % BLOCK
        )
        keys, values = (
            numbers(10 * index + i, length, kv_heads, width, device=target.device, dtype=dtype)
            for i in (1, 2)
        )
        storage.write(0, slots, keys, values)
        values, form = keys if unread else values, storage.format
        texts.append((form.decode(form.encode(keys)), form.decode(form.encode(values))))
    q = numbers(9, len(batch.input_ids), heads, width, device=target.device, dtype=dtype)
    scale = width**-0.5
    got = ops.attention(
        *(q, storage, 0, ops.plan_attention(batch, BLOCK, window)),
        AttentionArgs(scale, unread=unread),
    )
    got = got.unflatten(1, (heads, -1))[:, :, unread:].flatten(1)
    for chunk, (keys, values), rows in zip(chunks, texts, rows_of_chunks(batch), strict=True):
        exact = attention_of(
            q[rows].double(), keys.double(), values.double(), chunk.start, window, scale
        )
        # rounding error of the weights, which are rounded like the values
        floor = 4 * ULP[dtype] * values.double().abs().max()
        require_near(got[rows].float(), exact[:, :, unread:].flatten(1), 4, floor)


@pytest.mark.parametrize("heads", [128, 20])
def test_latents(target: Target, dtype: torch.dtype, heads: int) -> None:
    """Compare queries, stored keys and outputs of latents with double precision."""
    sizes = TOY_LATENT if target.dry else LATENT
    case = Latents(target, dtype, target.size(heads, 2), sizes, target.size(200, 5))
    for got, exact in zip(case.made(range(case.rows)), case.exact(), strict=True):
        require_near(got, exact, 2, 2.0**-20 * math.sqrt(sizes.rank))


def rows_of_chunks(batch: ForwardBatch) -> list[slice]:
    ends = batch.cu_seqlens_q.tolist()
    return [slice(start, end) for start, end in pairwise(ends)]


def attention_of(
    q: Tensor, keys: Tensor, values: Tensor, start: int, window: int, scale: float
) -> Tensor:
    """Attend: [rows, heads, D] and [length, kv heads, D] -> [rows, heads, D]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("rhd,khd->hrk", q, keys) * scale
    row = start + torch.arange(len(q), device=q.device)[:, None]
    key = torch.arange(len(keys), device=q.device)[None]
    seen = (key <= row) & ((key > row - window) if window else True)
    return torch.einsum(
        "hrk,khd->rhd", scores.masked_fill(~seen, -math.inf).softmax(dim=-1), values
    )


@pytest.mark.parametrize("kept", ["auto", "int8", "fp8"])
def test_rope_and_store(
    target: Target, shape: tuple[int, ...], dtype: torch.dtype, kept: KVCacheDType
) -> None:
    """Compare with the reference in float32, including stored keys and values. A negative slot
    stores nothing.
    """
    heads, kv_heads, width = shape[2:5]
    ops, device = CudaOps(batch_invariant=False), torch.device(target.device)
    rows = target.size(65, 5)
    cos, sin = (
        numbers(seed, 512, width // 2, device=target.device).clamp(-1, 1) for seed in (1, 2)
    )
    positions = torch.arange(rows, device=device) * 3 % 512
    slots = torch.randperm(8 * BLOCK, generator=torch.Generator().manual_seed(1))[:rows].to(device)
    slots[-1] = -1
    norms = tuple(
        Norm(numbers(i, width, device=target.device, dtype=dtype), 1e-6, 0.0, dtype) for i in (3, 4)
    )
    qkv = numbers(5, rows, (heads + 2 * kv_heads) * width, device=target.device, dtype=dtype)
    results: list[Any] = []
    # a sum of a rotation that differs in its last bit may be rounded to the next code
    step = {"auto": 0.0, "int8": 1 / 127, "fp8": 1 / 14}[kept]
    every = torch.arange(8 * BLOCK, device=device)
    for run, rope in ((ops, ops.rope_and_store), (None, reference.rope_and_store)):
        storage = KVStorage(spec_of(shape), 8, BLOCK, dtype, device, kv_cache_dtype=kept)
        storage.keys.zero_()
        storage.values.zero_()
        some = slice(None) if run else slice(0, rows - 1)  # the reference does not support padding
        q = rope(
            qkv[some],
            RopeArgs(cos, sin, heads, kv_heads, HeadNorms(*norms)),
            positions[some],
            slots[some],
            storage,
            0,
        )
        stored = (each.double() for each in storage.gather(0, every))
        results.append((q[: rows - 1].double(), *stored))
    for part, (got, exact) in enumerate(zip(*results, strict=True)):
        most = 4 * ULP[dtype] * exact.abs() + 8 * ULP[dtype]
        if part == 1:
            most = most + step * exact.abs().amax(dim=-1, keepdim=True)
        assert bool(((got - exact).abs() <= most).all())


DRAWS = {
    "plain": {},
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "more": {
        "raw_logprobs": True,
        "top_logprobs": 4,
        "logit_bias": {5: 3.0},
        "repetition_penalty": 1.3,
    },
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("options", DRAWS.values(), ids=list(DRAWS))
def test_draw(target: Target, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Tokens equal those of the CPU reference unless two are within rounding. Logprobs equal the
    reference's.
    """
    vocab, rows = shape[5], target.size(48, 3)
    logits = numbers(1, rows, vocab, device="cpu", scale=3.0)
    params = SamplingParams(**{"temperature": 0.7, **options})
    batch = sampling_batch(
        [DrawRequest(params, i, (i, 0, 7), prompt=[1, 2, 5], completion=[9]) for i in range(rows)]
    )
    expected = sample(logits, batch)
    ops = CudaOps(batch_invariant=False)
    got = ops.sample_logits(logits.to(target.device), to_device(batch, torch.device(target.device)))
    same = got.token_ids.cpu() == expected.token_ids
    assert same.sum() >= rows - rows // 24
    assert (got.logprobs.cpu() - expected.logprobs)[same].abs().max() <= 2e-5
    assert (got.log_kept_mass.cpu() - expected.log_kept_mass)[same].abs().max() <= 2e-5
    assert torch.equal(got.top_ids.cpu()[same], expected.top_ids[same])
    if params.temperature:
        temperatures = torch.full((rows,), params.temperature, dtype=torch.float64)
        # a head of 32 columns, so the logits are these products
        hidden = logits[:, :32].contiguous().to(target.device)
        weight = numbers(2, vocab, 32, device=target.device, scale=0.1)
        exact = (
            ((hidden.double() @ weight.double().T) / params.temperature).log_softmax(dim=-1).cpu()
        )
        ids = got.token_ids.to(target.device)
        scores = ops.gather_logprobs(
            hidden, weight, UNSCALED, ids, temperatures.to(target.device)
        ).cpu()
        assert (scores - exact.gather(1, ids.cpu()[:, None])[:, 0]).abs().max() <= 2e-4
