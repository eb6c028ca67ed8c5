"""Dequantised numbers of every format, compared with other implementations."""

import torch

from nano_inference.checkpoints.dequantise import float4, float8_exponents, mxfp4, scaled


def test_mxfp4_agrees_with_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator).byte()
    scales = torch.randint(100, 140, (3, 10, 4), generator=generator).byte()
    # transformers stores experts as [experts, columns, rows]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(mxfp4(blocks, scales), expected)


def test_float4_values_follow_their_bit_fields() -> None:
    """The fields are a sign, two exponent bits with a bias of 1, and one fraction bit."""
    for code in range(16):
        sign, exponent, fraction = code >> 3, code >> 1 & 3, code & 1
        size = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
        pair = float4(torch.tensor([code | 3 << 4], dtype=torch.uint8)).tolist()
        assert pair == [-size if sign else size, 1.5]


def test_exponents_cover_the_full_range() -> None:
    ends = float8_exponents(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert ends[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert ends[4].isnan()


def test_fp8_blocks_agree_with_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(48, 96, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(6, 4, generator=generator)
    expected = Fp8Dequantize(None).convert(
        {"weight": codes, "weight_scale_inv": scales}, full_layer_name="weight"
    )
    assert torch.equal(scaled(codes, scales, 8, 24), expected["weight"])
