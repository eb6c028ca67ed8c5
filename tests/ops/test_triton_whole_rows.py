"""Fused products of a few rows and weights in 8 bits: every form has the bits of the operations that
it replaces, and a layer takes as few launches as its docstring says.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.cuda import few_rows, few_whole_rows, rows
from nano_inference.ops.cuda.backend import CudaOps, cuda_ops
from nano_inference.ops.cuda.few_rows import Launch
from nano_inference.ops.cuda.quantised import AlignedWeight
from nano_inference.ops.formats import FORMATS, FP8
from nano_inference.ops.interface import FEW_ROWS, Norm, Ops
from nano_inference.ops.reference import backend as reference
from tests.depth import at_depth
from tests.gpu.target import adapted, adapter
from tests.models.tiny import FAMILIES, llama_config

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16]
BOUNDS = {
    "whole": (0, 96),
    "halves": (0, 48, 96),
    "quarters": (0, 24, 48, 72, 96),
    "eighths": tuple(range(0, 97, 12)),
    "uneven": (0, 32, 64, 64, 96),
}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of very different magnitudes, with NaN before and after them in memory."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    values *= 10.0 ** (torch.arange(shape[0]) % 3 - 1).view(-1, *[1] * (len(shape) - 1))
    around = torch.full((values.numel() + 512,), torch.nan, dtype=dtype)
    around[256:-256] = values.flatten()
    return around[256:-256].view(shape)


def stored(
    num_rows: int, columns: int, dtype: torch.dtype, bounds: Any = None, form: Any = None
) -> AlignedWeight:
    weight = AlignedWeight((num_rows, columns), dtype, CPU, form or FORMATS["int8"], bounds)
    weight.write(0, drawn(num_rows, columns, seed=num_rows))
    return weight


def same(one: Tensor, other: Tensor) -> bool:
    """Compare bits, except those of NaN."""
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(one[~nan], other[~nan])


def near(one: Tensor, other: Tensor) -> bool:
    """Compare products of rows whose norms were added up in another order: a code differs by one."""
    nan = other.isnan()
    largest = float(other[~nan].abs().max()) if not nan.all() else 0.0
    close = torch.allclose(one[~nan], other[~nan], rtol=0.02, atol=0.02 * largest)
    return torch.equal(nan, one.isnan()) and close


@pytest.mark.thorough
@settings(deadline=None, max_examples=at_depth(40))
@given(
    bounds=st.sampled_from(sorted(BOUNDS)),
    count=st.integers(1, FEW_ROWS),
    num_rows=st.sampled_from([2, 40, 70]),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["no norm", "norm", "only rounded"]),
    has_bias=st.booleans(),
    bad=st.sampled_from([None, torch.inf, torch.nan]),
    tile=st.sampled_from([512, few_whole_rows.TILE]),
    how=st.sampled_from([Launch(norms=True), Launch(norms=False)]),
    seed=st.integers(0, 99),
)
def test_fused_products_have_the_bits_of_the_definition(
    bounds: str,
    count: int,
    num_rows: int,
    dtype: torch.dtype,
    kind: str,
    has_bias: bool,
    bad: float | None,
    tile: int,
    how: Launch,
    seed: int,
) -> None:
    """A kernel with a norm adds up the squares of each segment first."""
    weight = stored(num_rows, 96, dtype, BOUNDS[bounds])
    norm = {
        "no norm": None,
        "norm": Norm(1 + drawn(96, seed=5, dtype=dtype) / 40, 1e-5, 0.0, dtype),
        "only rounded": Norm(None, 1e-5, 0.0, dtype),
    }[kind]
    x, residual = drawn(count, 96, seed=seed), drawn(count, num_rows, seed=seed + 1)
    if bad is not None:
        x[seed % count, seed % 96] = bad
    bias = drawn(num_rows, 1, seed=seed + 2)[:, 0] if has_bias else None
    read = x if norm is None else rows.rms_norm(None, x, norm)[0]
    plain = reference.linear(read, weight, bias)
    equal = near if how.norms and kind == "norm" and bounds != "whole" else same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_whole_rows, "TILE", tile)
        assert equal(few_rows.product(x, norm, weight, bias, how), plain)
        added = few_rows.product_added(x, norm, weight, bias, residual, 0.3, how)
        assert equal(added, rows.rms_norm(plain, residual, Norm(None, 0, 0, dtype), 0.3)[1])
        gated = few_rows.product_gated(x, norm, weight, bias, "silu", how)
        assert equal(gated, rows.gate(plain).to(dtype))


def test_extreme_codes_do_not_overflow() -> None:
    """Sums of products of the largest codes need more digits than float32 has."""
    weight = AlignedWeight((3, 4096), torch.float32, CPU, FORMATS["int8"])
    weight.write(0, torch.full((3, 4096), -2.0))
    x = torch.full((2, 4096), 3.0)
    x[1, 7] = 2.9
    assert torch.equal(few_rows.product(x, None, weight, None), reference.linear(x, weight))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("finish", ["store", "add", "gate"])
def test_fp8_products_agree_with_the_reference(count: int, finish: str) -> None:
    weight, norm = stored(40, 96, torch.float16, form=FP8), Norm(None, 0.0, 0.0, torch.float16)
    x, bias = drawn(count, 96, seed=1), drawn(40, seed=2)
    plain = reference.linear(x.half(), weight, bias)
    if finish == "store":
        result, expected = few_rows.product(x, norm, weight, bias), plain
    elif finish == "add":
        residual = drawn(count, 40, seed=3)
        result = few_rows.product_added(x, norm, weight, bias, residual, 0.5)
        expected = residual + plain / 2
    else:
        result = few_rows.product_gated(x, norm, weight, bias, "silu").float()
        expected = reference.gate(plain).half().float()
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_plain_product_of_few_rows_takes_one_launch(
    monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    ops, weight = CudaOps(batch_invariant=batch_invariant), stored(40, 96, torch.float16)
    launched = counted_launches(monkeypatch)
    for count, kernels in ((0, 0), (1, 1), (2, 1), (3, 2), (40, 2)):
        x, before = drawn(max(count, 1), 96, seed=count)[:count], launched.total()
        result = ops.linear(x, weight)
        assert launched.total() - before == kernels
        assert result.shape == (count, 40)
        assert not count or torch.equal(result, reference.linear(x, weight))


def test_norm_with_two_readers_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, weight = cuda_ops(batch_invariant=True), stored(40, 96, torch.float16)
    fused, launched = few_rows.FewRows(ops), counted_launches(monkeypatch)
    norm = Norm(torch.ones(96).half(), 1e-5, 0.0, torch.float16)
    normed = fused.rms_norm(None, drawn(2, 96, seed=1), norm)[0]
    first, second = (fused.made(fused.linear(normed, weight)) for _ in range(2))
    assert torch.equal(first, second)
    assert launched == {"_rms_norm_kernel": 1, "_vector_kernel": 2}


def test_product_that_reads_too_much_rounds_before(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = stored(70, 96, torch.float16), drawn(2, 96, seed=1)
    launched = counted_launches(monkeypatch)
    for most, kernels in ((1 << 20, 1), (1000, 2)):
        monkeypatch.setattr(few_whole_rows, "MOST_READ", most)
        before = launched.total()
        assert torch.equal(few_rows.product(x, None, weight, None), reference.linear(x, weight))
        assert launched.total() - before == kernels


@pytest.mark.parametrize("count", [1, 3])
def test_rows_with_adapters_have_the_bits_of_plain_operations(count: int) -> None:
    ops, weight = cuda_ops(batch_invariant=True), stored(40, 96, torch.float16)
    adapters = (adapter("cpu", 8, 96, (20, 20)),)
    batch = adapted(adapters, [row % 2 - 1 for row in range(count)], "cpu")
    stream, norm = drawn(count, 96, seed=1), Norm(torch.ones(96).half(), 1e-5, 0.0, torch.float16)
    fused = few_rows.FewRows(ops)
    deferred = fused.rms_norm(None, stream, norm)[0]
    result = fused.lora(fused.linear(deferred, weight), deferred, "weight", batch)
    read = ops.rms_norm(None, stream, norm, 1.0)[0]
    assert torch.equal(result, ops.lora(ops.linear(read, weight), read, "weight", batch))


# -- trunks ----------------------------------------------------------------------------------------


def counted_launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count launches by kernel from now on."""
    launched: Counter[str] = Counter()
    call = GridExecutor.__call__

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        launched[self.fn.__name__] += 1
        return call(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    return launched


def model_of(family: str, ops: Ops, dtype: torch.dtype, codes: str, layers: int) -> Decoder:
    config = llama_config() | FAMILIES[family]
    config |= {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2}
    config |= {"vocab_size": 60, "num_hidden_layers": layers, "num_key_value_heads": 1}
    if family == "gemma3":
        config["layer_types"] = ["sliding_attention", "full_attention"][:layers]
    spec = spec_from_config({name: value for name, value in config.items() if value is not None})
    params = allocate(param_table(spec), dtype, CPU, ops.allocate, codes)
    for seed, param in enumerate(params.values()):
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        if isinstance(param, AlignedWeight):
            param.write(0, values * param.shape[1] ** -0.5)
        else:
            param.copy_(1 + 0.1 * values - spec.norm_offset)
    return Decoder(spec, params, ops, 64)


def trunk(model: Decoder, count: int, *, few: bool) -> Tensor:
    """Return hidden rows, keys and values after a decode of `count` sequences."""
    storage = KVStorage(model.spec, 40, 4, model.dtype, CPU)
    for seed, part in enumerate((storage.keys, storage.values)):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed)))
    chunks = [Rows([7 + row], 9 + row, range(5 * row, 5 * row + 5)) for row in range(count)]
    batch = batch_of_rows(chunks, 4)
    if few:
        assert model.ops.few_rows is not None
        hidden = model.ops.few_rows(model.trunk, batch, storage)
    else:
        hidden = model.trunk(model.ops, batch, storage)
    parts = (hidden, storage.keys, storage.values)
    return torch.cat([part.float().flatten() for part in parts])


@pytest.mark.thorough(but=["int8-True-1-qwen3", "int8-True-3-qwen3", "fp8-False-3-qwen3"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen2", "olmo2"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_trunk_of_few_rows_has_the_bits_of_plain_operations(
    codes: str, batch_invariant: bool, count: int, family: str
) -> None:
    """Without invariance, norms and FP8 products may add up in another order."""
    ops = cuda_ops(batch_invariant=batch_invariant)
    model = model_of(family, ops, torch.float16, codes, 2)
    result, expected = trunk(model, count, few=True), trunk(model, count, few=False)
    if batch_invariant or codes == "int8":
        assert torch.equal(result, expected)
    else:
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("codes", "batch_invariant", "count", "kernels"),
    [
        *(("int8", False, 1, 6), ("int8", False, 3, 10), ("int8", True, 2, 8)),
        *(("int8", True, 3, 10), ("fp8", False, 1, 6), ("fp8", False, 8, 6)),
    ],
)
def test_layer_takes_this_many_launches(
    monkeypatch: pytest.MonkeyPatch, codes: str, batch_invariant: bool, count: int, kernels: int
) -> None:
    ops, launched = cuda_ops(batch_invariant=batch_invariant), counted_launches(monkeypatch)
    totals: list[int] = []
    for layers in (1, 2):
        trunk(model_of("qwen3", ops, torch.float16, codes, layers), count, few=True)
        totals.append(launched.total())
    assert totals[1] - 2 * totals[0] == kernels, launched
