"""Checkpoints in the formats of quantisation tools, written by plain Python and numpy packers. Each
packer follows its format's specification code by code and returns the dequantised numbers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.models.tiny import Weights, write_model

GROUP = 32  # columns per scale
BLOCK = (24, 40)  # rows and columns per scale; the last block is shorter

# A matrix [rows, columns] -> tensors by name suffix, and the dequantised numbers in float32.
Pack = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


@dataclass(frozen=True)
class Quantiser:
    """A format: its entry in config.json, and its packer of a matrix."""

    fields: dict[str, Any]
    pack: Pack


def write_quantised(
    folder: Path, name: str, config: dict[str, Any], weights: Weights, **fields: Any
) -> Weights:
    """Write a model with quantised projections and return its dequantised weights."""
    quantiser = (QUANTISERS | GROUPED)[name]
    stored, reference = quantised(name, weights)
    write_model(folder, config | {"quantization_config": quantiser.fields | fields}, stored)
    return reference


def quantised(name: str, weights: Weights) -> tuple[Weights, Weights]:
    """Return the tensors of a checkpoint with quantised projections, and the
    dequantised weights.
    """
    stored: Weights = {}
    reference: Weights = {}
    for tensor_name, tensor in weights.items():
        if not tensor_name.endswith("_proj.weight"):
            stored[tensor_name] = reference[tensor_name] = tensor
            continue
        parts, reference[tensor_name] = (QUANTISERS | GROUPED)[name].pack(tensor.float())
        module = tensor_name.removesuffix(".weight")
        stored |= {module + end: part.contiguous() for end, part in parts.items()}
    return stored, reference


def _blocks(weight: Tensor, rows: int, columns: int) -> list[tuple[slice, slice]]:
    """Return the slices of the blocks, row by row."""
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, weight.shape[0], rows)
        for column in range(0, weight.shape[1], columns)
    ]


def _fp8(
    rows: int | None, columns: int | None, end: str, scale_shape: Callable[..., tuple[int, ...]]
) -> Pack:
    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), weight.clone()
        sizes = (rows or weight.shape[0], columns or weight.shape[1])
        scales: list[Tensor] = []
        for block in _blocks(weight, *sizes):
            scale = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scale).to(torch.float8_e4m3fn)
            numbers[block] = codes[block].float() * scale
            scales.append(scale)
        counts = [-(-size // each) for size, each in zip(weight.shape, sizes, strict=True)]
        return {".weight": codes, end: torch.stack(scales).view(scale_shape(*counts))}, numbers

    return pack


def _mxfp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Pack groups of 32 columns that share a power of two."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 448).log2().ceil()
    codes = (groups / exponents.exp2().unsqueeze(-1)).to(torch.float8_e4m3fn)
    numbers = (codes.float() * exponents.exp2().unsqueeze(-1)).flatten(1)
    scales = (exponents + 127).to(torch.uint8)
    return {".weight": codes.flatten(1), ".weight_scale": scales}, numbers


def _rounded(
    weight: Tensor, bits: int, symmetric: bool, group: int, stored: torch.dtype = torch.float16
) -> tuple[Tensor, ...]:
    """Return codes [rows, columns] from 0 to 2^bits - 1, scales and zero points [rows, groups]."""
    groups, top = weight.unflatten(1, (-1, group)), 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(-1) / (2 ** (bits - 1) - 1)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round()
    scales = scales.to(stored).float()
    codes = (groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, top)
    return codes.flatten(1), scales, zeros


def _numbers(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """Dequantise. `groups`: the group of each column."""
    return (codes - zeros[:, groups]) * scales[:, groups]


def _words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [n, m] into words [n, ceil(m * bits / 32)]. `order`: the code at each position."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    values = codes.long().numpy().astype(np.uint64)
    words = np.zeros((len(values), -(-values.shape[1] // per_word)), dtype=np.uint64)
    for word in range(words.shape[1]):
        for index, source in enumerate(order):
            if word * per_word + source < values.shape[1]:
                words[:, word] |= values[:, word * per_word + source] << np.uint64(bits * index)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _int8(symmetric: bool) -> Pack:
    """Pack signed codes with a scale per row, as compressed-tensors does."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros = _rounded(weight, 8, symmetric, weight.shape[1])
        numbers = _numbers(codes, scales, zeros, torch.zeros(weight.shape[1]).long())
        parts = {".weight": (codes - 128).to(torch.int8), ".weight_scale": scales.bfloat16()}
        numbers = (codes - zeros) * scales.bfloat16().float()
        if not symmetric:
            parts[".weight_zero_point"] = (zeros - 128).to(torch.int8)
        return parts, numbers

    return pack


def _pack_quantized(
    bits: int,
    symmetric: bool,
    ordered: bool = False,
    group: int | None = GROUP,
    stored: torch.dtype = torch.float16,
) -> Pack:
    """Pack `pack-quantized` tensors. `group`: columns per scale, None: the row. `stored`: dtype of
    scales.
    """

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        order = _order(weight.shape[1]) if ordered else torch.arange(weight.shape[1])
        size = group or weight.shape[1]
        groups = order // size
        # gather the columns of each group before rounding
        sorted_ = weight[:, order.argsort()]
        codes, scales, zeros = _rounded(sorted_, bits, symmetric, size, stored)
        codes = codes[:, order]
        parts = {
            ".weight_packed": _words(codes, bits),
            ".weight_scale": scales.to(stored),
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts[".weight_zero_point"] = _words(zeros.T, bits).T
        if ordered:
            parts[".weight_g_idx"] = groups.int()
        return parts, _numbers(codes, scales, zeros, groups)

    return pack


def _order(columns: int) -> torch.Tensor:
    return torch.randperm(columns, generator=torch.Generator().manual_seed(columns))


def _gptq(bits: int, symmetric: bool, ordered: bool, first: bool, group: int = GROUP) -> Pack:
    """Pack GPTQ tensors. `first`: the first version, which stores zero points minus 1 with borrow
    across a word.
    """

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        order = _order(weight.shape[1]) if ordered else torch.arange(weight.shape[1])
        groups = order // group
        codes, scales, zeros = _rounded(weight[:, order.argsort()], bits, symmetric, group)
        codes = codes[:, order]
        words = _words(zeros.T, bits).numpy().view(np.uint32)
        every = np.uint32(sum(1 << place for place in range(0, 32, bits)))
        stored = (words - every if first else words).view(np.int32).copy()
        parts = {
            ".qweight": _words(codes, bits).T,
            ".qzeros": torch.from_numpy(stored),
            ".scales": scales.T.half(),
            ".g_idx": groups.int(),
        }
        return parts, _numbers(codes, scales, zeros, groups)

    return pack


def _awq(group: int = GROUP) -> Pack:
    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros = _rounded(weight, 4, False, group)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            ".qweight": _words(codes.T, 4, order),
            ".qzeros": _words(zeros.T, 4, order),
            ".scales": scales.T.half(),
        }
        groups = torch.arange(weight.shape[1]) // group
        return parts, _numbers(codes, scales, zeros, groups)

    return pack


def _bitsandbytes_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    maxima = weight.abs().amax(1)
    codes = (weight / maxima.unsqueeze(1) * 127).round().to(torch.int8)
    parts = {".weight": codes, ".SCB": maxima, ".weight_format": torch.tensor(0).byte()}
    return parts, codes.float() * (maxima / 127).unsqueeze(1)


_NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)


def _bitsandbytes_4bit(nested: bool, storage: torch.dtype = torch.uint8) -> Pack:
    block, nested_block, kind = 64, 16, "nf4"

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        table = torch.tensor(_NF4)
        groups = weight.flatten().view(-1, block)
        maxima = groups.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        parts = {".weight.absmax": maxima}
        if nested:
            offset = float(maxima.mean())
            values = torch.linspace(-1, 1, 256)
            runs = (maxima - offset).split(nested_block)
            outer = torch.stack([run.abs().max() for run in runs])
            scale = outer.repeat_interleave(nested_block)[: len(maxima)]
            near = ((maxima - offset) / scale).unsqueeze(1) - values
            codes = near.abs().argmin(1)
            maxima = values[codes] * scale + offset
            parts = {
                ".weight.absmax": codes.byte(),
                ".weight.nested_absmax": outer,
                ".weight.nested_quant_map": values,
            }
            state |= {
                "nested_blocksize": nested_block,
                "nested_dtype": "float32",
                "nested_offset": offset,
            }
        codes = ((groups / maxima.unsqueeze(1)).unsqueeze(-1) - table).abs().argmin(-1)
        numbers = (table[codes] * maxima.unsqueeze(1)).view(weight.shape)
        first, second = codes.flatten()[::2], codes.flatten()[1::2]
        packed = (first * 16 + second).byte()
        text = json.dumps(state).encode()
        parts |= {
            ".weight": packed.view(storage).unsqueeze(1),
            ".weight.quant_map": table,
            f".weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(text)).byte(),
        }
        return parts, numbers

    return pack


_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _float4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return 4-bit float codes of numbers up to 6, and their decoded values."""
    table = torch.tensor([*_FLOAT4, *(-value for value in _FLOAT4)])
    codes = (values.unsqueeze(-1) - table).abs().argmin(-1)
    return codes, table[codes]


def _bytes(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes per byte, the first in the low half."""
    return (codes[..., ::2] + 16 * codes[..., 1::2]).byte()


def _mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Pack MXFP4 for compressed-tensors: gpt-oss' layout under other names."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    codes, values = _float4(groups / exponents.exp2())
    numbers = (values * exponents.exp2()).flatten(-2)
    scales = (exponents.squeeze(-1) + 127).byte()
    return {".weight_packed": _bytes(codes).flatten(-2), ".weight_scale": scales}, numbers


def _nvfp4(codes_end: str, last_end: str, inverse: bool) -> Pack:
    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.unflatten(1, (-1, 16))
        last = weight.abs().max() / 6 / 448
        scales = (groups.abs().amax(-1) / 6 / last).to(torch.float8_e4m3fn)
        scale = (scales.float() * last).unsqueeze(-1)
        codes, values = _float4(groups / scale)
        parts = {
            codes_end: _bytes(codes).flatten(1),
            ".weight_scale": scales,
            last_end: (1 / last if inverse else last).view(1),
        }
        return parts, (values * scale).flatten(1)

    return pack


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def _gptq_fields(
    bits: int, symmetric: bool, ordered: bool, first: bool, group: int = GROUP
) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": ordered,
        "checkpoint_format": "gptq" if first else "gptq_v2",
    }


def _awq_fields(group: int) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def _packed(bits: int, symmetric: bool, group: int | None, stored: torch.dtype) -> Quantiser:
    sizes: dict[str, Any] = {"strategy": "channel"} if group is None else {"group_size": group}
    fields = {"num_bits": bits, "type": "int", "symmetric": symmetric, **sizes}
    pack = _pack_quantized(bits, symmetric, group=group, stored=stored)
    return Quantiser(_compressed("pack-quantized", **fields), pack)


_BLOCKED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
_GPTQ = {  # bits, symmetric, column order, first version
    "gptq": (4, True, False, True),
    "gptq-8bit": (8, False, False, True),
    "gptq-2bit": (2, False, False, True),
    "gptq-ordered": (4, False, True, True),
    "gptq-v2": (4, False, True, False),
}
QUANTISERS: dict[str, Quantiser] = {
    "fp8-blocks": Quantiser(_BLOCKED, _fp8(*BLOCK, ".weight_scale_inv", lambda *counts: counts)),
    "fp8-tensor": Quantiser(
        {"quant_method": "fp8", "activation_scheme": "static"},
        _fp8(None, None, ".weight_scale", lambda *_: ()),
    ),
    "fbgemm": Quantiser(
        {"quant_method": "fbgemm_fp8"}, _fp8(1, None, ".weight_scale", lambda rows, _: (rows, 1))
    ),
    "modelopt-fp8": Quantiser(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        _fp8(None, None, ".weight_scale", lambda *_: ()),
    ),
    "modelopt-nvfp4": Quantiser(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        _nvfp4(".weight", ".weight_scale_2", inverse=False),
    ),
    "compressed-fp8": Quantiser(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        _fp8(1, None, ".weight_scale", lambda rows, _: (rows, 1)),
    ),
    "compressed-fp8-blocks": Quantiser(
        _compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=BLOCK
        ),
        _fp8(*BLOCK, ".weight_scale", lambda *counts: counts),
    ),
    "compressed-mxfp8": Quantiser(
        _compressed("mxfp8-quantized", num_bits=8, type="float", group_size=32), _mxfp8
    ),
    "compressed-int8": Quantiser(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"), _int8(True)
    ),
    "compressed-int8-zeros": Quantiser(
        _compressed("naive-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        _int8(False),
    ),
    "compressed-int4": Quantiser(
        _compressed("pack-quantized", num_bits=4, type="int", group_size=GROUP),
        _pack_quantized(4, True),
    ),
    "compressed-int4-zeros": Quantiser(
        _compressed("pack-quantized", num_bits=4, type="int", group_size=GROUP, symmetric=False),
        _pack_quantized(4, False),
    ),
    "compressed-int4-ordered": Quantiser(
        _compressed(
            "pack-quantized",
            num_bits=4,
            type="int",
            group_size=GROUP,
            symmetric=False,
            actorder="group",
        ),
        _pack_quantized(4, False, ordered=True),
    ),
    "compressed-int8-packed": Quantiser(
        _compressed("pack-quantized", num_bits=8, type="int", group_size=GROUP),
        _pack_quantized(8, True),
    ),
    "compressed-mxfp4": Quantiser(
        _compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), _mxfp4
    ),
    "compressed-nvfp4": Quantiser(
        _compressed(
            "nvfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
        ),
        _nvfp4(".weight_packed", ".weight_global_scale", inverse=True),
    ),
    **{name: Quantiser(_gptq_fields(*options), _gptq(*options)) for name, options in _GPTQ.items()},
    "awq": Quantiser(_awq_fields(GROUP), _awq()),
    "bitsandbytes-int8": Quantiser(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, _bitsandbytes_int8
    ),
    "bitsandbytes-nf4": Quantiser(
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, _bitsandbytes_4bit(False)
    ),
    "bitsandbytes-nested": Quantiser(
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, _bitsandbytes_4bit(True)
    ),
    "bitsandbytes-bfloat16": Quantiser(
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        _bitsandbytes_4bit(True, torch.bfloat16),
    ),
}
# The same formats with other groups and scales, for matrices with a multiple of 128 columns.
GROUPED: dict[str, Quantiser] = {
    "compressed-int4-64": _packed(4, True, 64, torch.bfloat16),
    "compressed-int4-32-bfloat16": _packed(4, True, 32, torch.bfloat16),
    "compressed-int4-128-zeros": _packed(4, False, 128, torch.bfloat16),
    "compressed-int4-rows": _packed(4, True, None, torch.bfloat16),
    "compressed-int4-48": _packed(4, True, 48, torch.float16),
    "compressed-int4-float32": _packed(4, True, 128, torch.float32),
    "compressed-int4-float32-zeros": _packed(4, False, 128, torch.float32),
    "compressed-int8-128": _packed(8, True, 128, torch.bfloat16),
    "compressed-int8-rows": _packed(8, True, None, torch.float16),
    # config.json names an order, but the tensors have the default order
    "gptq-128": Quantiser(_gptq_fields(4, True, True, True, 128), _gptq(4, True, False, True, 128)),
    "gptq-8bit-128": Quantiser(
        _gptq_fields(8, True, False, False, 128), _gptq(8, True, False, False, 128)
    ),
    "awq-64": Quantiser(_awq_fields(64), _awq(64)),
    "awq-128": Quantiser(_awq_fields(128), _awq(128)),
}
