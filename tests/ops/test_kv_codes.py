"""Keys and values as 8-bit codes: the definition, and the storage and attention of
every backend.
"""

import math

import pytest
import torch
from torch import Tensor

from nano_inference.config import KVCacheDType
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.interface import AttentionArgs, Ops, RopeArgs
from nano_inference.ops.kv_codes import KvCodes, KvFormat
from tests.invariance.scenario import spoil
from tests.ops.test_partial_attention import backend
from tests.ops.test_reference import Shape

CPU = torch.device("cpu")
BLOCK = 16


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_row_is_encoded_in_steps_of_a_127th_of_its_maximum() -> None:
    form = KvFormat(torch.float32, codes="int8")
    row = torch.tensor([127.0, -2.5, 3.5, 0.4, -0.5, 1.5, -126.6, 0.0])
    decoded = form.decode(form.encode(row[None]))[0]
    assert decoded.tolist() == [127.0, -2.0, 4.0, 0.0, 0.0, 2.0, -127.0, 0.0]  # ties to even
    many = rows(50, 3, 64)
    step = many.abs().amax(dim=-1, keepdim=True) / 127
    kept = form.encode(many)
    assert (kept.dtype, kept.shape) == (torch.int8, (50, 3, 68))
    assert kept.element_size() * kept.shape[-1] == form.width(64) * form.stored.itemsize == 68
    assert ((form.decode(kept) - many).abs() <= step * 0.5001).all()
    assert torch.equal(form.decode(kept)[7:9, 1:], form.decode(form.encode(many[7:9, 1:])))


def test_fp8_rounds_to_the_nearest_of_all_e4m3_numbers() -> None:
    """The numbers are listed by the format's definition, for rows whose scale is 1."""
    listed = [
        (8 + m) * 2.0 ** (e - 10) if e else m * 2.0**-9
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)  # not a number
    ]
    numbers = torch.tensor([-each for each in reversed(listed)] + listed[1:])
    form, most = KvFormat(torch.float32, codes="fp8"), max(listed)
    assert most == 448

    def encoded(row: Tensor) -> Tensor:
        """Return the codes next to the largest number, in a row of whole words."""
        padded = torch.nn.functional.pad(row, (0, -len(row) % 4 + 4), value=most)
        return form.encode(padded[None])

    def rounded(row: Tensor) -> Tensor:
        return form.decode(encoded(row))[0, : len(row)]

    assert torch.equal(rounded(numbers), numbers)
    between = (numbers[1:] + numbers[:-1]) / 2
    for sides in (numbers[1:], numbers[:-1]):
        assert torch.equal(rounded(torch.nextafter(between, sides)), sides)
    assert not (encoded(between)[0, : len(between)] & 1).any()  # ties to even mantissas


@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_blocks_hold_codes_and_then_scales(codes: KvCodes) -> None:
    shape, values = Shape(2, 3, 16), rows(5, 2, 16)
    storage = KVStorage(shape.spec(), 6, BLOCK, shape.dtype, CPU, kv_cache_dtype=codes)
    spoil(storage, slice(None))
    slots = torch.tensor([40, 3, 17, 16, 79])
    storage.write(1, slots, values, -values)
    kept = KvFormat(shape.dtype, codes).encode(values)
    block, token = 79 // BLOCK, 79 % BLOCK
    unit = storage.lie(1)[0][1, block].flatten()
    assert torch.equal(unit[token * 16 : (token + 1) * 16], kept[4, 1, :16])
    scales = unit[BLOCK * 16 :].view(torch.float32)
    assert scales[token] == kept[4, 1, 16:].view(torch.float32)
    assert scales.isnan().sum() == BLOCK - 1
    keys, negated = storage.gather(1, slots)
    assert torch.equal(keys.swapaxes(0, 1), KvFormat(shape.dtype, codes).decode(kept))
    assert torch.equal(keys, -negated)


@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_zero_rows_stay_zero_and_nonfinite_rows_become_nan(codes: KvCodes) -> None:
    form = KvFormat(torch.bfloat16, codes=codes)
    values = torch.zeros(4, 16)
    values[1, 3], values[2, 5], values[3] = math.inf, math.nan, 1e-35
    decoded = form.decode(form.encode(values))
    assert decoded[[0, 3]].eq(0).all()
    assert decoded[1:3].isnan().all()


def test_plain_format_only_rounds() -> None:
    form, values = KvFormat(torch.bfloat16), rows(5, 16)
    assert torch.equal(form.decode(form.encode(values)), values.bfloat16().float())
    assert form.width(64) * form.stored.itemsize == 128
    assert form.rounded(values) is values


def test_gradients_pass_through_rounding_unchanged() -> None:
    form, values = KvFormat(torch.float32, codes="int8"), rows(5, 2, 16).requires_grad_(True)
    factors = rows(2, 16)
    rounded = form.rounded(values)
    (rounded * factors).sum().backward()
    assert torch.equal(values.grad, factors.expand(5, 2, 16))  # pyright: ignore[reportArgumentType]
    expected = form.decode(form.encode(values.detach()))
    assert torch.allclose(rounded, expected, atol=1e-6)
    assert not torch.equal(rounded, values)


def attended(ops: Ops, shape: Shape, kept: KVCacheDType, q: Tensor, *new_kv: Tensor) -> Tensor:
    """Attend rows of one chunk over themselves, in a separate cache filled with NaN."""
    count = len(q)
    storage = KVStorage(shape.spec(), 6, BLOCK, shape.dtype, CPU, kv_cache_dtype=kept)
    spoil(storage, slice(None))
    batch = batch_of_rows([Rows([0] * count, 0, range(1, 2 + count // BLOCK))], BLOCK)
    still = torch.ones(count, shape.head_dim // 2), torch.zeros(count, shape.head_dim // 2)
    qkv = torch.cat([q, *new_kv], dim=1).flatten(1)
    rope = RopeArgs(*still, shape.num_heads, shape.num_kv_heads)
    turned = ops.rope_and_store(qkv, rope, batch.positions, batch.slot_mapping, storage, 1)
    plan = ops.plan_attention(batch, BLOCK, 0)
    return ops.attention(turned, storage, 1, plan, AttentionArgs(0.3))


@pytest.mark.parametrize(
    ("name", "codes"), [("reference", "int8"), ("cpu", "int8"), ("reference", "fp8")]
)
def test_attention_uses_decoded_values(name: str, codes: KvCodes) -> None:
    """Attention equals that of a plain cache of the decoded numbers, including rows of the same
    step.
    """
    ops, shape, form = backend(name, 2), Shape(2, 3, 16), KvFormat(torch.float32, codes=codes)
    q, k, v = rows(70, 6, 16), rows(70, 2, 16) * 2, rows(70, 2, 16) * 3
    actual = attended(ops, shape, codes, q, k, v)
    exact = attended(ops, shape, "auto", q, *(form.decode(form.encode(each)) for each in (k, v)))
    if name == "reference":
        assert torch.equal(actual, exact)
    else:  # this backend multiplies sums by scales instead
        assert torch.allclose(actual, exact, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(actual, attended(ops, shape, "auto", q, k, v), atol=1e-3)
