"""Codes in registers have the bits of their definition, with and without instructions for e4m3."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.kv_codes import KvCodes, KvFormat
from tests.depth import at_depth

pytest.importorskip("triton")

import triton
import triton.language as tl

from nano_inference.ops.cuda.codes import (
    FP8,
    FP8_SHIFTED,
    decoded,
    encoded,
    is_finite,
    kind_of,
    scale_and_inverse,
    scale_of,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 16


@triton.jit
def _encode_kernel(x, codes, scales, kind: tl.constexpr, width: tl.constexpr):
    at = tl.arange(0, width)
    row = tl.load(x + tl.program_id(0) * width + at)
    finite = tl.min(is_finite(row), axis=0)
    scale, inverse = scale_and_inverse(tl.max(tl.abs(row), axis=0), finite, kind)
    tl.store(scales + tl.program_id(0), scale)
    tl.store(codes + tl.program_id(0) * width + at, encoded(row, inverse, finite, kind))


@triton.jit
def _decode_kernel(codes, scales, out, kind: tl.constexpr, width: tl.constexpr):
    at = tl.program_id(0) * width + tl.arange(0, width)
    number = decoded(tl.load(codes + at), out.dtype.element_ty, kind).to(tl.float32)
    scale = scale_of(tl.load(scales + tl.program_id(0)), kind)
    tl.store(out + at, (number * scale).to(out.dtype.element_ty))


def in_registers(rows: Tensor, codes: KvCodes) -> Tensor:
    """Return the codes and scales of rows, as `KvFormat.encode` does."""
    made = torch.empty(rows.shape, dtype=torch.int8, device=DEVICE)
    scales = torch.empty((len(rows), 1), device=DEVICE)
    _encode_kernel[(len(rows),)](rows.to(DEVICE), made, scales, kind_of(codes), WIDTH)
    return torch.cat([made, scales.view(torch.int8)], dim=1).cpu()


def listed() -> Tensor:
    """Return rows whose scale is 1 with all e4m3 numbers, all middles of two, and numbers next to
    these.
    """
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[1:] + every[:-1]) / 2
    near = [torch.nextafter(middles, middles + way) for way in (-1, 1)]
    numbers = torch.cat([every, middles, *near])
    numbers = torch.cat([numbers, -numbers])
    rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % (WIDTH - 1))).view(-1, WIDTH - 1)
    return torch.cat([rows, torch.full((len(rows), 1), 448.0)], dim=1)


def test_fp8_ties_are_rounded_as_defined() -> None:
    form = KvFormat(torch.float32, "fp8")
    assert torch.equal(in_registers(listed(), "fp8"), form.encode(listed()))


@settings(deadline=None, max_examples=at_depth(60))
@given(
    codes=st.sampled_from(["int8", "fp8"]),
    numbers=st.lists(
        st.floats(width=32) | st.floats(-3, 3, width=32), min_size=WIDTH, max_size=WIDTH
    ),
)
def test_rows_are_encoded_as_defined(codes: KvCodes, numbers: list[float]) -> None:
    rows = torch.tensor(numbers)[None]
    made, expected = in_registers(rows, codes), KvFormat(torch.float32, codes).encode(rows)
    if not rows.isfinite().all():
        assert made[0, WIDTH:].view(torch.float32).isnan()
        made, expected = made[:, :WIDTH], expected[:, :WIDTH]
    assert torch.equal(made, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [FP8, FP8_SHIFTED])
def test_fp8_codes_are_all_decoded_exactly(kind: tl.constexpr, dtype: torch.dtype) -> None:
    if DEVICE.type == "cuda" and kind == FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no instruction for e4m3")
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[codes % 128 != 127].view(torch.int8)  # two are not numbers
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % WIDTH))
    scales = torch.ones(len(codes) // WIDTH)
    out = torch.empty(len(codes), dtype=dtype, device=DEVICE)
    grid = (len(scales),)
    _decode_kernel[grid](codes.to(DEVICE), scales.to(DEVICE), out, kind.value, WIDTH)
    assert torch.equal(out.cpu().float(), codes.view(torch.float8_e4m3fn).float())
