"""Quantized weights of a checkpoint: a table of storage formats, and the reader of a weight.

A weight is read as if it were stored as numbers: each part is dequantized when it is read.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from nano_inference.arrays import Dtype, Tensor, dtype_name, namespace
from nano_inference.checkpoints import dequantise
from nano_inference.checkpoints.stored_weight import (
    Coded,
    Cut,
    Layout,
    Part,
    QuantisedWeight,
    Shape,
    Stored,
    ceil_div,
    require_part,
)
from nano_inference.errors import ModelLoadError, one_line
from nano_inference.models.spec.quantisation import FormatName, Quantisation, Scheme
from nano_inference.ops.formats import FORMATS as CODE_FORMATS
from nano_inference.ops.formats import fitting, groups_of
from nano_inference.ops.quantised import Codes

MOST_BLOCK = 2**16  # limit of bitsandbytes' block size, whose largest value is 4096
_FLOATS = ("BF16", "F16", "F32")
_PLAIN = (*_FLOATS, "F64")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_EXPONENTS = ("U8", "F8_E8M0")


# Parameters of quantized activations and KV caches, which are not supported here.
ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub"),
    *(".output_scale", ".output_zero_point", ".activation_scale"),
    *(".q_scale", ".k_scale", ".v_scale"),
)


def _grid(stored: Stored) -> Part:
    """Return the part that holds a matrix's scales, one for each of its blocks."""
    rows, columns = stored.matrix
    each_row, each_column = stored.scheme.block
    across = stored.groups() if each_row == 1 else ceil_div(columns, each_column or columns)
    if each_row is None:
        return Part(_FLOATS, (1, across))
    return Part(_FLOATS, (ceil_div(rows, each_row), across), 0, Fraction(1, each_row))


def _grouping(stored: Stored, end: str) -> tuple[dict[str, Part], int | Tensor]:
    """Return the part for the tensor that lists each column's group, if any, and the groups.

    Without such a tensor, or if it is unused, return the number of columns that share a scale.
    """
    (_, columns), (_, size) = stored.matrix, stored.block
    if not (stored.scheme.by_column or stored.has(end)):
        return {}, size
    part = {end: Part(("I32", "I64"), (columns,))}
    require_part(stored, end, part[end])
    groups = stored.read(end).long()
    if bool((groups == -1).all()) and not stored.scheme.by_column:  # compressed-tensors: unused
        return part, size
    if not 0 <= int(groups.min()) <= int(groups.max()) < stored.groups():
        raise stored.wrong(end, f"contains a group outside of 0 to {stored.groups() - 1}")
    return part, groups


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _turned(tensor: Tensor) -> Tensor:
    return tensor.T


def _in_order(groups: Tensor, size: int) -> bool:
    """Return True if each group is the next `size` columns."""
    xp = namespace(groups)
    return xp.equal(groups, xp.arange(len(groups)) // size)


def _whole_numbers(
    stored: Stored,
    parts: Mapping[str, Part],
    values: Callable[[Cut], Tensor],
    scales: str,
    *,
    bits: int,
    middle: int,
    groups: int | Tensor,
    grid: Callable[[Tensor], Tensor] = _same,
    zeros: tuple[str, Callable[[Tensor], Tensor]] | None = None,
) -> Layout:
    """Return the layout of integers minus a zero point, times a scale.

    Args:
        stored: Tensors of the weight.
        parts: Parts that hold the weight.
        values: Function from the parts to the integers [rows, columns].
        scales: Suffix of the tensor of scales.
        bits: Bits per integer.
        middle: Zero point if none are stored.
        groups: Columns that share a scale, or the group of each column.
        grid: Conversion of the tensor of scales to the layout of `_grid`.
        zeros: Suffix and conversion of the zero points, in units of the integers. Excess rows are
            ignored.
    """
    (each_row, group_size), (_, columns) = stored.block, stored.matrix

    def points(cut: Cut, rows: int) -> Tensor | None:
        end, made = zeros if zeros is not None else ("", _same)
        return made(cut[end])[:rows] if end in cut else None

    def decode(cut: Cut, _: Shape) -> Tensor:
        codes, factors = values(cut), grid(cut[scales])
        least = points(cut, len(codes))
        if least is None:
            xp = namespace(factors)
            least = xp.full_like(factors, middle, dtype=xp.float32)
        return dequantise.scaled(codes, factors, each_row, groups, least)

    def coded() -> Coded | str:
        if not isinstance(groups, int) and not _in_order(groups, group_size):
            return "its columns are reordered (act-order)"
        dtype = stored.tensor(scales).get_dtype()
        small = {end: stored.read(end) for end in parts if zeros is not None and end == zeros[0]}
        all_points = points(small, stored.matrix[0])
        mins = all_points is not None and bool((all_points != middle).any())
        if mins and dtype == "F32":
            return "products of its zero points and 32-bit scales have too many digits"
        held = max(bits, 4)
        form = fitting(
            held, 0 if stored.scheme.block[1] is None else group_size, dtype != "F16", mins
        )
        if form is None:
            return f"no format has codes of {held} bits in groups of {group_size} columns"
        # 8-bit codes are signed, and so are 4-bit codes without minima
        moved = middle if held == 8 or not mins else 0
        bounds = (0, columns)
        at = [first // group_size for first, _ in groups_of(bounds, form)]

        def read(cut: Cut, shape: Shape) -> Codes:
            codes = values(cut)
            xp = namespace(codes)
            rows = xp.arange(shape[0]) // each_row
            factors, least = grid(cut[scales]).float()[rows][:, at], None
            if mins and (each_points := points(cut, shape[0])) is not None:
                least = (each_points.float() - moved)[rows][:, at] * factors
            return Codes((codes - moved).to(xp.int8), factors, form, bounds, least)

        return Coded(form, read)

    return Layout(parts, decode, coded)


def _fp8(stored: Stored) -> Layout:
    ends = (".weight_scale", ".weight_scale_inv")
    usual = ends[stored.method == "fp8"]
    end = next((each for each in (usual, *ends) if stored.has(each)), usual)
    scales = replace(_grid(stored), dtypes=_FLOATS + _EXPONENTS)
    rows, columns = stored.block

    def decode(parts: Cut, _: Shape) -> Tensor:
        grid = parts[end]
        if dtype_name(grid.dtype) in ("uint8", "float8_e8m0fnu"):
            grid = dequantise.float8_exponents(grid)
        return dequantise.scaled(parts[".weight"], grid, rows, columns)

    return Layout({".weight": Part(_FLOAT8, stored.matrix, 0), end: scales}, decode)


def _int8(stored: Stored) -> Layout:
    end = ".weight_zero_point"
    parts = {".weight": Part(("I8",), stored.matrix, 0), ".weight_scale": _grid(stored)}
    if not stored.scheme.symmetric:
        parts[end] = replace(_grid(stored), dtypes=("I8",))
    return _whole_numbers(
        *(stored, parts, lambda cut: cut[".weight"], ".weight_scale"),
        bits=8,
        middle=0,
        groups=stored.block[1],
        zeros=(end, _same),
    )


def _packed_int(stored: Stored) -> Layout:
    rows, columns = stored.matrix
    bits = stored.scheme.bits
    codes = 32 // bits
    ordering, groups = _grouping(stored, ".weight_g_idx")
    scales = _grid(stored)
    parts = {
        ".weight_packed": Part(("I32",), (rows, ceil_div(columns, codes)), 0),
        ".weight_scale": scales,
        ".weight_shape": Part(("I64", "I32"), (2,)),
        **ordering,
    }
    if not stored.scheme.symmetric:
        shape = (ceil_div(rows, codes), scales.shape[1])
        parts[".weight_zero_point"] = Part(("I32",), shape, 0, Fraction(1, codes))
    require_part(stored, ".weight_shape", parts[".weight_shape"])
    if (stored_shape := tuple(stored.read(".weight_shape").tolist())) != stored.shape:
        raise stored.wrong(".weight_shape", f"is {stored_shape}, expected {stored.shape}")

    def values(cut: Cut) -> Tensor:
        return dequantise.unpacked(cut[".weight_packed"], bits)[:, :columns]

    return _whole_numbers(
        *(stored, parts, values, ".weight_scale"),
        bits=bits,
        middle=1 << (bits - 1),
        groups=groups,
        zeros=(".weight_zero_point", lambda words: dequantise.unpacked(words.T, bits).T),
    )


def _gptq(stored: Stored) -> Layout:
    """Return the layout of AutoGPTQ and gptqmodel."""
    rows, columns = stored.matrix
    scheme, count = stored.scheme, stored.groups()
    bits, offset = scheme.bits, scheme.zero_offset
    codes = 32 // bits
    ordering, groups = _grouping(stored, ".g_idx")
    parts = {
        ".qweight": Part(("I32",), (stored.words(columns, codes, "columns"), rows), 1),
        ".scales": Part(_FLOATS, (count, rows), 1),
        **ordering,
    }
    if stored.has(".qzeros") or not scheme.symmetric:
        words = stored.words(rows, codes, "rows")
        parts[".qzeros"] = Part(("I32",), (count, words), 1, Fraction(1, codes))
    return _whole_numbers(
        *(stored, parts, lambda cut: dequantise.unpacked(cut[".qweight"].T, bits), ".scales"),
        bits=bits,
        middle=1 << (bits - 1),
        groups=groups,
        grid=_turned,
        zeros=(".qzeros", lambda words: dequantise.gptq_zeros(words, bits, offset).T),
    )


def _awq(stored: Stored) -> Layout:
    """Return the layout of AutoAWQ's 4-bit format "gemm"."""
    rows, columns = stored.matrix
    count, words = stored.groups(), stored.words(rows, 8, "rows")
    parts = {
        ".qweight": Part(("I32",), (columns, words), 1, Fraction(1, 8)),
        ".scales": Part(_FLOATS, (count, rows), 1),
    }
    if stored.has(".qzeros") or not stored.scheme.symmetric:
        parts[".qzeros"] = Part(("I32",), (count, words), 1, Fraction(1, 8))
    return _whole_numbers(
        *(stored, parts, lambda cut: dequantise.awq(cut[".qweight"]).T, ".scales"),
        bits=4,
        middle=8,
        groups=stored.block[1],
        grid=_turned,
        zeros=(".qzeros", lambda words: dequantise.awq(words).T),
    )


def _bitsandbytes_int8(stored: Stored) -> Layout:
    parts = {
        ".weight": Part(("I8",), stored.matrix, 0),
        ".SCB": Part(("F32",), (stored.matrix[0],), 0),
    }
    if stored.has(end := ".weight_format"):
        parts[end] = Part(("U8",), ())
        require_part(stored, end, parts[end])
        if (kind := stored.read(end).item()) != 0:
            raise stored.wrong(end, f"is {kind}, a tiled layout; only 0, row-major, is supported")
    return _whole_numbers(
        *(stored, parts, lambda cut: cut[".weight"], ".SCB"),
        bits=8,
        middle=0,
        groups=stored.block[1],
        grid=dequantise.bitsandbytes_scales,
    )


_STATE = ".weight.quant_state.bitsandbytes__"
_STORAGES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}  # storage dtype -> bytes per element


def _bitsandbytes_4bit(stored: Stored) -> Layout:
    rows, columns = stored.matrix
    end = next(each for each in (_STATE + "nf4", _STATE + "fp4") if stored.has(each))
    state = _read_state(stored, end)
    block, nested = state["blocksize"], "nested_blocksize" in state
    width = _STORAGES.get(str(stored.tensor(".weight").get_dtype()), 1)
    blocks = ceil_div(rows * columns, block)
    parts = {
        ".weight": Part(
            tuple(_STORAGES),
            (ceil_div(rows * columns, 2 * width), 1),
            0,
            Fraction(columns, 2 * width),
        ),
        ".weight.absmax": Part(
            ("U8",) if nested else ("F32",), (blocks,), 0, Fraction(columns, block)
        ),
        ".weight.quant_map": Part(("F32",), (16,)),
        end: Part(("U8",), tuple(stored.tensor(end).get_shape())),
    }
    if nested:
        outer = block * state["nested_blocksize"]
        parts |= {
            ".weight.nested_absmax": Part(
                ("F32",), (ceil_div(rows * columns, outer),), 0, Fraction(columns, outer)
            ),
            ".weight.nested_quant_map": Part(("F32",), (256,)),
        }

    def decode(cut: Cut, shape: Shape) -> Tensor:
        maxima = cut[".weight.absmax"]
        if nested:
            maxima = dequantise.bitsandbytes_maxima(
                maxima,
                cut[".weight.nested_quant_map"],
                cut[".weight.nested_absmax"],
                float(state["nested_offset"]),
                state["nested_blocksize"],
            )
        weight = cut[".weight"].flatten()
        packed = weight.view(namespace(weight).uint8)
        numbers = dequantise.bitsandbytes_4bit(packed, cut[".weight.quant_map"], maxima, block)
        return numbers[: math.prod(shape)].reshape(shape)

    return Layout(parts, decode)


def _read_state(stored: Stored, end: str) -> dict[str, Any]:
    """Return the JSON that bitsandbytes stores with a weight. Raises `ModelLoadError`."""
    try:
        state = json.loads(bytes(stored.read(end).tolist()))
        sizes = [state[key] for key in ("blocksize", "nested_blocksize") if key in state]
        if not sizes or not all(type(size) is int and 0 < size <= MOST_BLOCK for size in sizes):
            raise ValueError(f"blocks of {sizes}")
        float(state["nested_offset"] if len(sizes) > 1 else 0)
        shape = tuple(state["shape"])
    except (ValueError, KeyError, TypeError) as problem:
        raise stored.wrong(end, f"does not describe its weight: {one_line(problem)}") from problem
    if shape != stored.shape:
        raise stored.wrong(end, f"has shape {shape} for its weight, expected {stored.shape}")
    return state


def _mxfp4(stored: Stored) -> Layout:
    """Return the layout of gpt-oss: the matrices of all experts in one tensor."""
    rows, columns = stored.shape[-2:]
    groups = stored.words(columns, 32, "columns")
    parts = {
        "_blocks": Part(("U8",), (rows, groups, 16), 0),
        "_scales": Part(_EXPONENTS, (rows, groups), 0),
    }
    return Layout(
        parts,
        lambda cut, _: dequantise.mxfp4(cut["_blocks"], cut["_scales"]),
        lambda: _microscaled("_blocks", "_scales"),
    )


def _microscaled(codes: str, scales: str) -> Coded:
    """Return the access to codes in MXFP4: twice the numbers, and half of the scales."""
    form = CODE_FORMATS["mxfp4-32"]

    def read(cut: Cut, shape: Shape) -> Codes:
        numbers = dequantise.float4(cut[codes]).reshape(shape) * 2
        halves = dequantise.float8_exponents(cut[scales]) / 2
        return Codes(numbers.to(namespace(numbers).int8), halves, form, (0, shape[1]))

    return Coded(form, read)


def _mxfp4_packed(stored: Stored) -> Layout:
    rows, columns = stored.matrix
    groups = stored.words(columns, 32, "columns")
    parts = {
        ".weight_packed": Part(("U8",), (rows, columns // 2), 0),
        ".weight_scale": Part(_EXPONENTS, (rows, groups), 0),
    }

    def decode(cut: Cut, _: Shape) -> Tensor:
        blocks = cut[".weight_packed"].unflatten(1, (groups, 16))
        return dequantise.mxfp4(blocks, cut[".weight_scale"])

    return Layout(parts, decode, lambda: _microscaled(".weight_packed", ".weight_scale"))


def _nvfp4(stored: Stored, codes: str, last: str, inverse: bool) -> Layout:
    """Return the layout of NVIDIA's 4-bit floats.

    16 numbers share an 8-bit float, and all share a final scale. This scale divides in
    compressed-tensors and multiplies in modelopt.
    """
    rows, columns = stored.matrix
    parts = {
        codes: Part(("U8",), (rows, stored.words(columns, 16, "columns") * 8), 0),
        ".weight_scale": Part(("F8_E4M3",), (rows, columns // 16), 0),
        last: Part(("F32",), (1,)),
    }

    def decode(cut: Cut, _: Shape) -> Tensor:
        scales, whole = cut[".weight_scale"].float(), cut[last]
        scales = scales / whole if inverse else scales * whole
        return dequantise.scaled(dequantise.float4(cut[codes]), scales, 1, 16)

    return Layout(parts, decode)


@dataclass(frozen=True, slots=True)
class Format:
    """Storage format of a weight.

    Attributes:
        codes: Suffix of the tensor of codes.
        layout: Function from a weight's tensors to their layout. Raises `ModelLoadError`.
        weight: Suffix of the weight's name.
    """

    codes: str
    layout: Callable[[Stored], Layout]
    weight: str = ".weight"


FORMATS: dict[FormatName, Format] = {
    "awq": Format(".qweight", _awq),
    "bitsandbytes-4bit": Format(_STATE, _bitsandbytes_4bit),
    "bitsandbytes-int8": Format(".weight", _bitsandbytes_int8),
    "fp8": Format(".weight", _fp8),
    "gptq": Format(".qweight", _gptq),
    "int8": Format(".weight", _int8),
    "mxfp4": Format("_blocks", _mxfp4, weight="_blocks"),
    "mxfp4-packed": Format(".weight_packed", _mxfp4_packed),
    "nvfp4": Format(
        ".weight_packed",
        partial(_nvfp4, codes=".weight_packed", last=".weight_global_scale", inverse=True),
    ),
    "nvfp4-modelopt": Format(
        ".weight", partial(_nvfp4, codes=".weight", last=".weight_scale_2", inverse=False)
    ),
    "packed-int": Format(".weight_packed", _packed_int),
}


def quantised_weight(
    name: str, shape: Shape, tensors: Mapping[str, Any], said: Quantisation, dtype: Dtype
) -> QuantisedWeight | None:
    """Return a weight that is stored as codes, or None if it is stored plain.

    Args:
        name: Name of the weight.
        shape: Expected shape.
        tensors: Tensors of the checkpoint by name, read by slices with safetensors' methods.
        said: Quantization declared by the checkpoint.
        dtype: Dtype of the numbers that are read.

    Raises `ModelLoadError` with the name of an invalid tensor.
    """
    module = name.removesuffix(".weight").removesuffix("_blocks")
    scheme = said.scheme_of(module)
    if scheme is None:
        _require_plain(module, tensors, said)
        return None
    made = FORMATS[scheme.format]
    if name != module + made.weight or _codes_of(module, tensors, scheme) is None:
        return None
    stored = Stored(name, module, shape, scheme, said.method, said.where, tensors)
    return QuantisedWeight(stored, made.layout(stored), dtype)


def _codes_of(module: str, tensors: Mapping[str, Any], scheme: Scheme) -> str | None:
    """Return the name of the tensor that holds a module's codes, or None."""
    codes = FORMATS[scheme.format].codes
    if codes == _STATE:  # the dtype of the codes' tensor is arbitrary
        kinds = (f"{module}{codes}{kind}" for kind in ("nf4", "fp4"))
        return next((each for each in kinds if each in tensors), None)
    name = module + codes
    if name not in tensors or (codes == ".weight" and tensors[name].get_dtype() in _PLAIN):
        return None
    return name


def _require_plain(module: str, tensors: Mapping[str, Any], said: Quantisation) -> None:
    """Raise `ModelLoadError` if a module has codes although it is excluded from quantization."""
    for _, scheme in said.schemes:
        if name := _codes_of(module, tensors, scheme):
            raise ModelLoadError(
                f"tensor {name!r} holds codes ({said.method}), but {said.where} excludes "
                f"{module!r} from quantization."
            )
