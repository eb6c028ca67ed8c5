"""The few-row trunk in Triton's interpreter: every kernel, and trunks of every family, compared
with the plain ops.

bfloat16 is left out because the interpreter multiplies it wrongly. tests/gpu tests the compiled
kernels in bfloat16.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.language.extra import cuda as dependencies
from triton.runtime.interpreter import GridExecutor

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.queues import HostQueue
from nano_inference.device.step_buffers import StepInputs, Uploads
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.cuda import few_row_tiles, few_rows
from nano_inference.ops.cuda.backend import cuda_ops
from nano_inference.ops.interface import Ops
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.ops.rowwise import Norm
from tests.models.tiny import FAMILIES, llama_config

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}  # relative: one or two roundings
SHAPES = [(24, 40), (42, 200)]  # weight sizes: one tile, several tiles, ragged tiles


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers with NaN before and after them in memory."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    around = torch.full((values.numel() + 512,), torch.nan, dtype=dtype)
    around[256:-256] = values.flatten()
    return around[256:-256].view(shape)


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    """Use small tiles so that K and a weight's rows span several."""
    with patch.multiple(few_rows, VECTOR_TILE=8192):
        yield


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )


def norms(width: int, dtype: torch.dtype) -> dict[str, Norm | None]:
    weight = 1 + drawn(width, seed=5, dtype=dtype) / 4
    return {
        "no norm": None,
        "norm": Norm(weight, 1e-5, 0.0, dtype),
        "1 + weight": Norm(drawn(width, seed=5) / 4, 1e-2, 1.0, dtype),
        "only rounded": Norm(None, 1e-5, 0.0, dtype),
    }


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("no norm", torch.float16),
        ("norm", torch.float16),
        ("no norm", torch.float32),
        ("norm", torch.float32),
        ("1 + weight", torch.float32),
        ("only rounded", torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize(("shape", "rows"), [(SHAPES[0], 1), (SHAPES[1], 2), (SHAPES[1], 3)])
def test_few_rows_kernel_equals_plain_operations(
    shape: tuple[int, int], rows: int, kind: str, dtype: torch.dtype
) -> None:
    norm, plain = norms(shape[1], dtype)[kind], reference_ops()
    weight, bias = drawn(*shape, seed=1, dtype=dtype) / 8, drawn(shape[0], seed=2, dtype=dtype)
    x = drawn(rows, shape[1], seed=3, dtype=dtype if norm is None else torch.float32)
    residual = drawn(rows, shape[0], seed=4)
    read = x if norm is None else plain.rms_norm(None, x, norm, 1.0)[0]
    for added_bias, activation in ((None, "silu"), (bias, "gelu_tanh"), (bias, "clamped_swiglu")):
        product = plain.linear(read, weight, added_bias)
        close(few_rows.product(x, norm, weight, added_bias), product.to(dtype), dtype)
        added = few_rows.product_added(x, norm, weight, added_bias, residual, 0.3)
        close(added, residual + product.to(dtype).float() * 0.3, dtype)
        gated = few_rows.product_gated(x, norm, weight, added_bias, activation)
        close(gated, plain.gate(product.to(dtype), activation).to(dtype), dtype)


@pytest.mark.parametrize("few", [(1, 2), (3, 8)])
def test_row_is_independent_of_other_rows(few: tuple[int, int]) -> None:
    """Compare within each of the two kinds of product. Other rows may be NaN, as padding is."""
    shape = SHAPES[1]
    weight, norm = drawn(*shape, seed=1), norms(shape[1], torch.float32)["norm"]
    x = drawn(few[1], shape[1], seed=3)
    whole = few_rows.product_gated(x, norm, weight, None, "silu")
    first_rows = x[: few[0]].clone()
    first_rows[1:] = torch.nan
    assert torch.equal(few_rows.product_gated(first_rows, norm, weight, None, "silu")[0], whole[0])


def test_weight_is_split_over_the_whole_card() -> None:
    cut = {
        shape: few_row_tiles.columns_of_vector(shape[0], 2 * shape[1])
        for shape in [(1024, 2048), (4096, 1024), (6144, 1024), (28672, 4096), (64, 32)]
    }
    assert list(cut.values()) == [4, 16, 16, 16, 64]
    assert all(shape[0] / columns >= 256 for shape, columns in cut.items() if shape != (64, 32))


# -- overlapping launches --------------------------------------------------------------------------


class Predecessor:
    """A kernel that ends when its successor waits: only then are its results where they belong."""

    def __init__(self, results: list[Tensor]) -> None:
        self._results = [(result, result.clone()) for result in results]
        self.out: Tensor | None = None  # of the successor, which this kernel may still read
        self.num_starts = self.num_waits = 0
        for result in results:
            result.fill_(torch.nan)

    def start_next(self) -> None:
        assert self.num_starts == self.num_waits, "started before the program had waited"
        self.num_starts += 1

    def wait(self) -> None:
        if not self.num_waits:
            assert self.out is not None
            assert self.out.isnan().all(), "written before the wait"
        self.num_waits += 1
        for result, value in self._results:
            result.copy_(value)


@pytest.mark.parametrize("kind", ["no norm", "norm", "only rounded"])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("finish", ["store", "add", "gate"])
def test_overlapping_product_reads_only_weights_before_it_waits(
    monkeypatch: pytest.MonkeyPatch, kind: str, rows: int, finish: str
) -> None:
    shape = SHAPES[1]
    norm = norms(shape[1], torch.float32)[kind]
    weight, bias = drawn(*shape, seed=1) / 8, drawn(shape[0], seed=2)
    x, residual = drawn(rows, shape[1], seed=3), drawn(rows, shape[0], seed=4)

    def compute(*, overlaps: bool) -> Tensor:
        how = few_rows.Launch(overlaps)
        if finish == "add":
            return few_rows.product_added(x, norm, weight, bias, residual, 0.3, how)
        if finish == "gate":
            return few_rows.product_gated(x, norm, weight, bias, "silu", how)
        return few_rows.product(x, norm, weight, bias, how)

    expected = compute(overlaps=False)
    before = Predecessor([x, residual])
    launch = few_rows._launch

    def poisoned(*args: Any, **options: Any) -> None:
        before.out = args[4].fill_(torch.nan)
        launch(*args, **options)

    monkeypatch.setattr(few_rows, "_launch", poisoned)
    monkeypatch.setattr(dependencies, "gdc_wait", before.wait)
    monkeypatch.setattr(dependencies, "gdc_launch_dependents", before.start_next)
    assert torch.equal(compute(overlaps=True), expected)
    assert before.num_starts == before.num_waits > 0, "every program waits"


# -- trunks ----------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 60}
LAYERS = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
}
BLOCK_SIZE, MAX_BLOCKS = 4, 16
CONTEXTS = (9, 1, 30)  # including the computed row


def model_of(family: str, ops: Ops, dtype: torch.dtype) -> Decoder:
    kv_heads = 1 if family in ("gemma3", "qwen3") else 2
    layer_fields = LAYERS.get(
        family, {"num_hidden_layers": 2 if family in ("llama", "qwen2", "qwen3") else 1}
    )
    config = (
        llama_config() | FAMILIES[family] | SIZES | {"num_key_value_heads": kv_heads} | layer_fields
    )
    spec = spec_from_config({name: value for name, value in config.items() if value is not None})
    params = allocate(param_table(spec), dtype, torch.device("cpu"), ops.allocate)
    for seed, param in enumerate(params.values()):
        values = drawn(*param.shape, seed=seed)
        param.copy_(
            values * param.shape[1] ** -0.5
            if param.dim() == 2
            else 1 + 0.1 * values - spec.norm_offset
        )
    return Decoder(spec, params, ops, 64)


def trunk(model: Decoder, rows: int, size: int, *, few: bool) -> tuple[Tensor, Tensor]:
    """Return hidden rows, keys and values after a captured step, in which `size - rows` rows are
    padding.
    """
    storage = KVStorage(model.spec, 32, BLOCK_SIZE, model.dtype, model.device)
    for seed, part in enumerate((storage.keys, storage.values)):
        part.copy_(drawn(*part.shape, seed=seed))
    chunks = [
        Rows([7 + row], CONTEXTS[row] - 1, range(8 * row, 8 * row + 8)) for row in range(rows)
    ]
    words = torch.zeros(StepInputs.num_words(size, size, MAX_BLOCKS), dtype=torch.int64)
    inputs = StepInputs(words, size, size, MAX_BLOCKS)
    inputs.clear()
    queue = HostQueue()
    with queue.current():
        inputs.write(batch_of_rows(chunks, BLOCK_SIZE), Uploads(queue, model.device))
    if few:
        assert model.ops.few_rows is not None
        hidden = model.ops.few_rows(model.trunk, inputs.batch, storage)
    else:
        hidden = model.trunk(model.ops, inputs.batch, storage)
    return hidden[:rows], torch.stack([storage.keys, storage.values])


@pytest.mark.thorough(cases=["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trunk_of_every_family(family: str) -> None:
    dtype = torch.float16 if family in ("qwen3", "granite") else torch.float32
    model = model_of(family, cuda_ops(batch_invariant=False), dtype)
    sizes = {"llama": {1: 1, 3: 4}, "qwen3": {1: 2, 2: 2}, "gemma3": {2: 3}}.get(family, {1: 2})
    for rows, size in sizes.items():
        hidden, stored = trunk(model, rows, size, few=True)
        expected, kept = trunk(model, rows, size, few=False)
        tolerance = 1e-2 if dtype == torch.float16 else 1e-4
        torch.testing.assert_close(hidden, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(stored, kept, rtol=tolerance, atol=tolerance)


@pytest.mark.thorough(cases=["gemma3-1-2"])
@pytest.mark.parametrize(("family", "rows", "size"), [("gemma3", 1, 2), ("qwen3", 3, 4)])
def test_overlapping_trunk_equals_one_kernel_after_the_other(
    monkeypatch: pytest.MonkeyPatch, family: str, rows: int, size: int
) -> None:
    """Everything but weights is lost at an overlapping launch and appears at the first wait."""
    expected = trunk(
        model_of(family, cuda_ops(batch_invariant=False), torch.float32), rows, size, few=True
    )
    model = model_of(family, cuda_ops(batch_invariant=False, overlaps=True), torch.float32)
    weights = {param.data_ptr() for param in model.params.values()}
    launched: Counter[str] = Counter()
    lost: list[tuple[Tensor, Tensor]] = []
    call = GridExecutor.__call__

    def overlapped(self: Any, *args: Any, **options: Any) -> Any:
        if options.get("launch_pdl"):
            launched[self.fn.__name__] += 1
            tensors = [each for each in args if isinstance(each, Tensor)]
            tensors = [each for each in tensors if each.data_ptr() not in weights]
            lost.extend((each, each.clone()) for each in tensors)
            for tensor in tensors:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        result = call(self, *args, **options)
        assert not lost, "no program has waited"
        return result

    def wait() -> None:
        for tensor, value in lost:
            tensor.copy_(value)
        lost.clear()

    monkeypatch.setattr(GridExecutor, "__call__", overlapped)
    monkeypatch.setattr(dependencies, "gdc_wait", wait)
    monkeypatch.setattr(dependencies, "gdc_launch_dependents", lambda: None)
    for mine, theirs in zip(trunk(model, rows, size, few=True), expected, strict=True):
        assert torch.equal(mine, theirs)
    layers = model.spec.num_layers
    assert len(launched) == 3
    assert sum(launched.values()) == 6 * layers


def test_layer_is_six_kernels() -> None:
    """Fused kernels: four products. Plain kernels: rotary and attention. Outside layers: embedding
    and last norm.
    """
    called: Counter[str] = Counter()

    def counted(name: str, kernel: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called[name] += 1
            return kernel(*args, **kwargs)

        return call

    plain = cuda_ops(batch_invariant=False)
    names = ("embed", "linear", "rms_norm", "rope_and_store", "attention", "gate")
    ops = replace(plain, **{name: counted(name, getattr(plain, name)) for name in names})
    model = model_of("qwen3", replace(ops, few_rows=partial(few_rows.few_rows, ops)), torch.float32)
    launch = few_rows._launch
    with patch.object(few_rows, "_launch", counted("fused", launch)):
        trunk(model, 1, 1, few=True)
    layers = model.spec.num_layers
    assert called == {
        "fused": 4 * layers,
        "rope_and_store": layers,
        "attention": layers,
        "embed": 1,
        "rms_norm": 1,
    }


def test_larger_batches_use_plain_operations() -> None:
    fused = few_rows.FewRows(reference_ops())
    weight, norm = drawn(16, 8, seed=1), Norm(None, 1e-5, 0.0, torch.float32)
    x, residual = drawn(9, 8, seed=2), drawn(9, 16, seed=3)
    with patch.object(few_rows, "_launch", side_effect=AssertionError):
        product = fused.linear(fused.rms_norm(None, x, norm)[0], weight)
        assert torch.equal(fused.gate(product), reference_ops().gate(x @ weight.t(), "silu"))
        assert torch.equal(
            fused.rms_norm(product, residual, norm, 2.0)[1], residual + 2 * (x @ weight.t())
        )


def test_invariant_trunk_fuses_no_plain_product() -> None:
    model = model_of("llama", cuda_ops(batch_invariant=True), torch.float32)
    with patch.object(few_rows, "_launch", side_effect=AssertionError):
        results, expected = trunk(model, 1, 1, few=True), trunk(model, 1, 1, few=False)
    assert all(map(torch.equal, results, expected))
    assert reference_ops().few_rows is None
