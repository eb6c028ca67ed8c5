"""Checkpoints whose weights are codes of a quantisation: refused by the method's name, or by their
dtype.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import ModelLoadError, WeightUpdateError
from nano_inference.engine.weights.sources import read_folder
from nano_inference.models.loading import load_params, load_spec
from nano_inference.models.spec import spec_from_config
from tests.models.tiny import llama_config, llama_weights, tiny_llama, write_model

# As the tools write them.
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "fp8",
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
        r"gptq \(4 bits\)",
    ),
    "auto-gptq": ({"bits": 4, "group_size": 128, "desc_act": False}, r"gptq \(4 bits\)"),
    "mlx": ({"bits": 4, "group_size": 64}, r"mlx \(4 bits\)"),
    "awq": ({"quant_method": "awq", "bits": 4, "zero_point": True}, r"awq \(4 bits\)"),
    "bitsandbytes-4": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        r"bitsandbytes \(4 bits\)",
    ),
    "bitsandbytes-8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        r"bitsandbytes \(8 bits\)",
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
        },
        r"compressed-tensors \(8 bits\)",
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
    "torchao": (
        {"quant_method": "torchao", "quant_type": "int4_weight_only"},
        r"torchao \(int4_weight_only\)",
    ),
    "quanto": ({"quant_method": "quanto", "weights": "int8"}, r"quanto \(int8\)"),
    "a method to come": ({"quant_method": "newquant"}, "newquant"),
    "no name": ({"something": 1}, "an unnamed method"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "wrap",
    [lambda q: {"quantization_config": q}, lambda q: {"text_config": {"quantization_config": q}}],
)
def test_a_quantised_checkpoint_is_refused_by_the_methods_name(
    name: str, wrap: Callable[[Any], Any]
) -> None:
    fields, told = METHODS[name]
    with pytest.raises(
        ModelLoadError, match=f"quantised with ({told}), as config.json says.*unquantised.*GGUF"
    ):
        spec_from_config(llama_config() | wrap(fields))


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, r"modelopt \(NVFP4\)"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, r"gptq \(4 bits\)"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, r"awq \(4 bits\)"),
    ],
)
def test_a_file_beside_the_config_says_it_too(
    tmp_path: Path, file: str, content: Any, told: str
) -> None:
    folder = tiny_llama(tmp_path)
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=rf"quantised with {told}, as .*{file} says"):
        load_spec(folder)
    with pytest.raises(WeightUpdateError, match=f"quantised with {told}"):
        list(read_folder(folder))


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {"quant_method": None},
        {"quant_method": "none"},
        {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_a_config_that_says_nothing_of_the_weights_is_read(fields: Any) -> None:
    assert spec_from_config(llama_config() | {"quantization_config": fields}).num_layers == 2


def test_an_update_from_a_quantised_folder_names_the_method(tmp_path: Path) -> None:
    config = llama_config()
    write_model(
        tmp_path, config | {"quantization_config": METHODS["fp8"][0]}, llama_weights(config)
    )
    with pytest.raises(WeightUpdateError, match="quantised with fp8"):
        list(read_folder(tmp_path))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn]
)
def test_a_weight_of_another_kind_of_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Such weights were cast to floating point, and the model answered garbage."""
    config = llama_config()
    weights = llama_weights(config)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(dtype)
    folder = write_model(tmp_path, config, weights)
    with pytest.raises(
        ModelLoadError, match=rf"{name}.*has dtype (I8|U8|I32|BOOL|F8_E4M3).*quantised"
    ):
        load_params(folder, load_spec(folder), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_floating_point_weights_are_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tiny_llama(tmp_path, dtype=dtype)
    params = load_params(folder, load_spec(folder), torch.float32, torch.device("cpu"))
    assert all(tensor.dtype == torch.float32 for tensor in params.values())
