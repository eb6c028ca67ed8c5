"""Weight panels: every instruction set writes the same bits, equal to torch's own cast, for all row
and column counts.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.cpu.memory import Arena
from nano_inference.ops.cpu.weights import PackedWeight
from tests.depth import at_depth
from tests.ops.cpu_kernels import available, kernels

DTYPES = [torch.bfloat16, torch.float32]
ODD = torch.tensor(
    [torch.nan, torch.inf, -torch.inf, -0.0, 1e-39, -3e-41, 3.39e38, 1.00390625, 1.01171875]
)


def numbers(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random numbers that include all edge cases of a cast."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows, columns, generator=generator)
    which = torch.randint(5 * len(ODD), (rows, columns), generator=generator)
    return torch.where(which < len(ODD), ODD[which % len(ODD)], drawn).to(dtype)


def same(actual: Tensor, expected: Tensor) -> bool:
    """True if bits are equal, ignoring NaN payloads."""
    integers = torch.int16 if actual.dtype == torch.bfloat16 else torch.int32
    return bool(
        (
            (actual.view(integers) == expected.view(integers)) | (actual.isnan() & expected.isnan())
        ).all()
    )


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=at_depth(15), deadline=None)
@given(
    st.integers(1, 70), st.integers(1, 100), st.integers(0, 40), st.booleans(), st.integers(0, 9)
)
def test_rows_come_back_as_torch_casts_them(
    name: str,
    source: torch.dtype,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    start: int,
    aligned: bool,
    seed: int,
) -> None:
    c = kernels(name)
    weight = PackedWeight(start + rows + 3, columns, dtype, 2)
    if not aligned:
        room = torch.zeros(weight.data.numel() + 1, dtype=dtype)
        weight.data = room[1:].view(weight.data.shape)
        weight.data_ptr = weight.data.data_ptr
    given_rows, is_bf16 = numbers(rows, columns, source, seed), dtype == torch.bfloat16
    c.nano_pack(
        given_rows.data_ptr(),
        source == torch.bfloat16,
        weight.data_ptr(),
        is_bf16,
        start,
        rows,
        columns,
        2,
    )
    out = torch.empty(start + rows + 3, columns, dtype=dtype)
    c.nano_unpack(weight.data_ptr(), out.data_ptr(), is_bf16, 0, len(out), columns)
    assert same(out[start : start + rows], given_rows.to(dtype))
    assert not out[:start].any()
    assert not out[start + rows :].any()
    assert weight.data.count_nonzero() == out.count_nonzero(), "the padding was written"
    other = torch.empty(rows, columns, dtype=dtype)
    c.nano_unpack(weight.data_ptr(), other.data_ptr(), is_bf16, start, rows, columns)
    assert same(other, out[start : start + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=at_depth(20), deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.data())
def test_patch_is_written_where_it_belongs(
    dtype: torch.dtype, rows: int, columns: int, data: st.DataObject
) -> None:
    kernels()
    start = data.draw(st.integers(0, 20))
    weight = PackedWeight(start + rows, columns, dtype, 1, Arena())
    weight.write(0, torch.arange((start + rows) * columns).view(-1, columns) % 100)
    expected = weight.read()
    places = torch.tensor(
        sorted(data.draw(st.sets(st.integers(0, rows * columns - 1), max_size=20))),
        dtype=torch.int64,
    )
    values = torch.randn(len(places), dtype=torch.float64)
    weight.patch(start, places, values)
    expected[start:].view(-1)[places] = values.to(dtype)
    assert torch.equal(weight.read(), expected)
    with pytest.raises(ValueError, match="not within"):
        weight.patch(start, torch.tensor([rows * columns]), torch.ones(1))
