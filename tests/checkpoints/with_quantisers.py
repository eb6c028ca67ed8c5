"""Matrices quantised and dequantised by the tools themselves, in an environment that has them.

Run `python -m tests.checkpoints.with_quantisers FOLDER` from the repository's root. It writes one
folder per case with a module's tensors, the numbers that the tool reads from them, and the
quantisation config.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb  # pyright: ignore[reportMissingImports]
import compressed_tensors.compressors as compressors  # pyright: ignore[reportMissingImports]
import torch
from compressed_tensors.entrypoints.convert.converters import (  # pyright: ignore[reportMissingImports]
    AutoAWQConverter,
)
from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
    QuantizationArgs,
    QuantizationScheme,
)
from safetensors.torch import save_file
from torch import Tensor

ROWS, COLUMNS, GROUP = 96, 256, 64
Case = tuple[str, dict[str, Tensor], Tensor, dict[str, Any]]  # name, tensors, numbers, config


def matrix() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def compressed() -> Iterator[Case]:
    """Yield the compressors of compressed-tensors by format."""
    four = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "int4": ("pack-quantized", "PackedQuantizationCompressor", four),
        "int4-zeros": (
            "pack-quantized",
            "PackedQuantizationCompressor",
            four | {"symmetric": False},
        ),
        "int8-packed": (
            "pack-quantized",
            "PackedQuantizationCompressor",
            {"num_bits": 8, "strategy": "channel"},
        ),
        "int8": ("int-quantized", "IntQuantizationCompressor", {"strategy": "channel"}),
        "int8-zeros": (
            "int-quantized",
            "IntQuantizationCompressor",
            {"strategy": "channel", "symmetric": False},
        ),
        "fp8": (
            "float-quantized",
            "FloatQuantizationCompressor",
            {"type": "float", "strategy": "tensor"},
        ),
        "fp8-channel": (
            "float-quantized",
            "FloatQuantizationCompressor",
            {"type": "float", "strategy": "channel"},
        ),
        "fp8-blocks": (
            "float-quantized",
            "FloatQuantizationCompressor",
            {"type": "float", "strategy": "block", "block_structure": [32, 64]},
        ),
    }
    for name, (layout, compressor, fields) in kinds.items():
        args = QuantizationArgs(**fields)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
        state = {"weight": matrix()} | _statistics(matrix(), args)
        made = getattr(compressors, compressor)
        stored = made.compress(state, scheme)
        numbers = made.decompress(dict(stored), scheme)["weight"]
        tensors = {f".{end}": tensor for end, tensor in stored.items()}
        yield f"compressed-{name}", tensors, numbers, _compressed_fields(layout, fields)


def _compressed_fields(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": layout}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def _statistics(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Return scales and zero points in the strategy's shapes."""
    groups = {
        "tensor": lambda: weight.reshape(1, -1),
        "channel": lambda: weight.unsqueeze(1),
        "group": lambda: weight.unflatten(1, (-1, GROUP)),
        "block": lambda: (
            weight.unflatten(1, (-1, 64)).unflatten(0, (-1, 32)).transpose(1, 2).flatten(2)
        ),
    }[str(args.strategy)]()
    top = 448.0 if args.type == "float" else 2.0 ** (args.num_bits - 1) - 1
    if args.symmetric:
        return {"weight_scale": groups.abs().amax(-1) / top}
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (high - low) / (2**args.num_bits - 1)
    zero = (-low / scale).round() - 2 ** (args.num_bits - 1)
    return {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}


def awq() -> Iterator[Case]:
    """Yield AutoAWQ's layout as compressed-tensors reads it."""
    generator = torch.Generator().manual_seed(1)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    tensors = {
        ".qweight": words(COLUMNS, ROWS // 8),
        ".qzeros": words(COLUMNS // GROUP, ROWS // 8),
        ".scales": torch.rand(COLUMNS // GROUP, ROWS, generator=generator) + 0.5,
    }
    fields = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    converter = AutoAWQConverter(group_size=GROUP)
    named = {f"m{end}": tensor.clone() for end, tensor in tensors.items()}
    state = {name.removeprefix("m."): each for name, each in converter.process(named).items()}
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    numbers = compressors.PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    yield "awq", tensors, numbers, fields


def bitsandbytes() -> Iterator[Case]:
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            packed, state = bnb.quantize_4bit(
                matrix(), blocksize=64, quant_type=kind, compress_statistics=nested
            )
            tensors = {f".weight.{end}": each for end, each in state.as_dict(packed=True).items()}
            numbers = bnb.dequantize_4bit(packed, state)
            fields = {"quant_method": "bitsandbytes", "load_in_4bit": True}
            yield f"bitsandbytes-{kind}-{nested}", tensors | {".weight": packed}, numbers, fields
    codes, maxima, _ = bnb.int8_vectorwise_quant(matrix().half())
    numbers = bnb.int8_vectorwise_dequant(codes, maxima)
    fields = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    yield "bitsandbytes-int8", {".weight": codes, ".SCB": maxima}, numbers, fields


def gptq() -> Iterator[Case]:
    """Yield gptqmodel's layers with random codes."""
    from gptqmodel.nn_modules.qlinear.torch import (  # pyright: ignore[reportMissingImports]
        TorchLinear,
    )
    from gptqmodel.utils.model import (  # pyright: ignore[reportMissingImports]
        convert_gptq_v1_to_v2_format_module,
    )

    generator = torch.Generator().manual_seed(2)
    for bits in (2, 4, 8):
        for ordered, first in ((False, True), (True, True), (True, False)):
            layer = TorchLinear(
                bits=bits,
                group_size=GROUP,
                sym=False,
                desc_act=ordered,
                in_features=COLUMNS,
                out_features=ROWS,
                bias=False,
                register_buffers=True,
            )
            for tensor in (layer.qweight, layer.qzeros):
                drawn = torch.randint(-(2**31), 2**31, tensor.shape, generator=generator)
                tensor.copy_(drawn)
            layer.scales.copy_(torch.rand(layer.scales.shape, generator=generator) + 0.5)
            if ordered:
                order = torch.randperm(COLUMNS, generator=generator)
                layer.g_idx.copy_(order // GROUP)
            names = ("qweight", "qzeros", "scales", "g_idx")
            tensors = {f".{name}": getattr(layer, name).clone() for name in names}
            if first:
                convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
            layer.scales = layer.scales.float()
            numbers = layer.dequantize_weight().T
            fields = {
                "quant_method": "gptq",
                "bits": bits,
                "group_size": GROUP,
                "desc_act": ordered,
                "sym": False,
                "checkpoint_format": "gptq" if first else "gptq_v2",
            }
            yield f"gptq-{bits}-{ordered}-{first}", tensors, numbers, fields


CASES: tuple[Callable[[], Iterator[Case]], ...] = (compressed, awq, bitsandbytes, gptq)

if __name__ == "__main__":
    for cases in CASES:
        for name, tensors, numbers, fields in cases():
            folder = Path(sys.argv[1]) / name
            folder.mkdir()
            stored = {f"m{end}": tensor.contiguous() for end, tensor in tensors.items()}
            save_file(stored, folder / "model.safetensors")
            save_file({"m.weight": numbers.contiguous()}, folder / "numbers.safetensors")
            config = json.dumps({"quantization_config": fields})
            (folder / "config.json").write_text(config, encoding="utf-8")
