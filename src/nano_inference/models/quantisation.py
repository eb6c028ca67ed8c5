"""Checkpoints whose weights are codes of a quantisation method: told by name, for none is read
yet.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nano_inference.errors import ModelLoadError
from nano_inference.regular_files import read_json

Config = Mapping[str, Any]

# Where a config.json says it: transformers' key, compressed-tensors' old one, MLX's; each also
# inside `text_config`.
_KEYS = ("quantization_config", "compression_config", "quantization")
# Files that say it beside config.json -> the method.
SIDE_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
# Of a description that names no method: a field that this method writes, the most telling first.
_TRACES = {
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "config_groups": "compressed-tensors",
    "quant_algo": "modelopt",
    "w_bit": "awq",
    "desc_act": "gptq",
    "bits": "mlx",
}
_NONE = (None, "", "none", "no_quant")


def refuse_quantised(config: Config) -> None:
    """Raise `ModelLoadError`, naming the method, where a config.json says that the weights are
    quantised.
    """
    inner = config.get("text_config")
    for source in (config, inner if isinstance(inner, Mapping) else {}):
        for key in _KEYS:
            if source.get(key):
                _refuse("config.json", source[key], None)


def refuse_side_files(folder: Path) -> None:
    """The same by the files that some tools write beside config.json."""
    for name, method in SIDE_FILES.items():
        if (folder / name).exists():
            told = read_json(folder / name)
            inner = told.get("quantization")
            _refuse(f"{folder / name}", inner if isinstance(inner, Mapping) else told, method)


def _refuse(where: str, fields: Any, default: str | None) -> None:
    method, detail = (
        (_method(fields, default), _detail(fields))
        if isinstance(fields, Mapping)
        else (str(fields), "")
    )
    if method is None:
        return
    told = f" ({detail})" if detail else ""
    raise ModelLoadError(
        f"the checkpoint is quantised with {method}{told}, as {where} says, and that is not "
        "supported yet; use the "
        "unquantised checkpoint, or a GGUF file of the model."
    )


def _method(fields: Config, default: str | None) -> str | None:
    """None: the description says that nothing is quantised."""
    for key in ("quant_method", "quant_algo"):
        if key in fields and _is_none(fields[key]):
            return None
    if named := fields.get("quant_method"):
        return str(named)
    return default or next(
        (method for field, method in _TRACES.items() if field in fields), "an unnamed method"
    )


def _detail(fields: Config) -> str:
    """Of how many bits, or of which kind, its codes are; empty: it does not say."""
    bits = next(
        (fields[key] for key in ("bits", "w_bit", "wbits") if isinstance(fields.get(key), int)),
        None,
    )
    bits = 4 if fields.get("load_in_4bit") else 8 if fields.get("load_in_8bit") else bits
    groups = fields.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if (
            bits is None
            and isinstance(weights, Mapping)
            and isinstance(weights.get("num_bits"), int)
        ):
            bits = weights["num_bits"]
    if bits is not None:
        return f"{bits} bits"
    kinds = (fields.get(key) for key in ("quant_algo", "quant_type", "weights", "format"))
    return next((kind for kind in kinds if isinstance(kind, str)), "")


def _is_none(value: Any) -> bool:
    return (value.lower() if isinstance(value, str) else value) in _NONE
