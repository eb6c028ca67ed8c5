"""The tensors of a GGUF file, written as a safetensors file: Hugging Face's names, order of rows
and shapes.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nano_inference.errors import ModelLoadError
from nano_inference.models.gguf_families import GLOBAL_NAMES, OPTIONAL_NAMES, Config, Family
from nano_inference.models.gguf_header import StoredTensor
from nano_inference.models.spec import spec_from_config

Stored = Mapping[str, StoredTensor]

CHUNK = 2**22  # numbers that are dequantised at a time
# Types that are kept as they are: safetensors has them too, with their bytes of a number.
_KEPT = {"F32": 4, "F16": 2, "BF16": 2}


def _names(family: Family, config: Config) -> dict[str, tuple[str, ...]]:
    """GGUF name -> Hugging Face's of every tensor that a file of this configuration may hold.

    Where it has several, it is cut along its first dimension.
    """
    names: dict[str, tuple[str, ...]] = {key: (hf_name,) for key, hf_name in GLOBAL_NAMES.items()}
    for layer in range(config["num_hidden_layers"]):
        for key, hf_name in family.layer_names.items():
            full = f"model.layers.{layer}.{hf_name}"
            names[f"blk.{layer}.{key}"] = (
                tuple(full.format(expert=i) for i in range(config[family.experts_key]))
                if "{expert}" in full
                else (full,)
            )
    return names


def _kind_of(name: str) -> str:
    """A tensor's name without its layer: `blk.7.attn_q.weight` -> `attn_q.weight`."""
    return re.sub(r"^blk\.\d+\.", "", name)


def require_names(family: Family, config: Config, stored: Stored) -> None:
    """Raise `ModelLoadError` for a tensor that is not known, or is missing."""
    names = _names(family, config)
    if unknown := sorted(stored.keys() - names.keys() - family.rope_factors):
        raise ModelLoadError(
            f"the GGUF tensor {unknown[0]} is not mapped for {family.architecture}"
        )
    optional = OPTIONAL_NAMES | family.optional_names
    if missing := sorted(
        name for name in names.keys() - stored.keys() if _kind_of(name) not in optional
    ):
        raise ModelLoadError(
            f"the GGUF file has no tensor {missing[0]}, which {family.architecture} needs"
        )


def write_safetensors(path: Path, family: Family, config: Config, stored: Stored) -> None:
    """Write the tensors one at a time: the header follows from the shapes, so no two are ever in
    memory at once.

    Raises `ModelLoadError` where shapes contradict the config, or the disk has no room, before
    anything is written.
    """
    names = _names(family, config)
    weights = {name: tensor for name, tensor in stored.items() if name in names}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        dtype, width = _stored_as(tensor, family)
        for hf_name, shape in _hf_shapes(tensor, names[name]).items():
            begin, end = end, end + width * prod(shape)
            header[hf_name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    _require_shapes(config, header)
    _require_room(path, end)
    encoded = json.dumps(header).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)  # the tensors start at a multiple of 8
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in weights.values():
            for chunk in _chunks(tensor, family, config):
                file.write(chunk.data)
        file.flush()
        # the rename that publishes the folder must not reach the disk before its contents
        os.fsync(file.fileno())


def _stored_as(tensor: StoredTensor, family: Family) -> tuple[str, int]:
    """safetensors' dtype of what is written of a tensor, and its bytes."""
    if _kind_of(tensor.name) in family.plus_one:
        return "F32", 4  # 1 + w - 1 in 16 bits would lose the digits of a small w
    name = tensor.kind.name if tensor.kind.name in _KEPT else "BF16"
    return name, _KEPT[name]


def _hf_shapes(tensor: StoredTensor, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name -> shape, of what one tensor is cut into."""
    if len(names) == 1:
        return {names[0]: tensor.shape}
    if tensor.shape[0] != len(names):
        raise ModelLoadError(
            f"the GGUF tensor {tensor.name} holds {tensor.shape[0]} experts, and expert_count is "
            f"{len(names)}"
        )
    return dict.fromkeys(names, tensor.shape[1:])


def _require_shapes(config: Config, header: Mapping[str, Any]) -> None:
    from nano_inference.models.weights import named_slots, param_table  # brings in torch

    slots = named_slots(param_table(spec_from_config(config)))
    for name, slot in slots.items():
        if name not in header and slot.tied_to is None:
            raise ModelLoadError(f"the GGUF file has nothing for the tensor {name}")
    for name in header.keys() - {"__metadata__"}:
        if name not in slots:
            raise ModelLoadError(f"the GGUF file holds {name}, which its metadata has no place for")
        shape = tuple(header[name]["shape"])
        if shape != slots[name].shape:
            raise ModelLoadError(
                f"the GGUF file has shape {shape} for the tensor {name}; its metadata asks for "
                f"{slots[name].shape}"
            )


def _require_room(path: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise ModelLoadError(
            f"the converted model takes {num_bytes / 2**30:.1f} GiB, and {path.parent.parent} has "
            f"{free / 2**30:.1f} GiB free; XDG_CACHE_HOME moves the cache elsewhere"
        )


def _chunks(tensor: StoredTensor, family: Family, config: Config) -> Iterator[np.ndarray]:
    """A tensor in Hugging Face's order of rows, piece by piece, as it is written."""
    kind = _kind_of(tensor.name)
    rows, order = tensor.rows(), None
    if kind in family.row_orders:
        order = family.row_orders[kind](config)
        if len(order) != tensor.shape[0]:
            raise ModelLoadError(
                f"the GGUF tensor {tensor.name} has {tensor.shape[0]} rows, and its metadata asks "
                f"for {len(order)}"
            )
        rows = rows.reshape(len(order), -1)
    step = max(1, CHUNK * len(rows) // prod(tensor.shape))
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        yield _written(rows[some] if order is None else rows[order[some]], tensor, family)


def _written(rows: np.ndarray, tensor: StoredTensor, family: Family) -> np.ndarray:
    """Stored rows as they are written, contiguous."""
    if _kind_of(tensor.name) in family.plus_one:
        return np.ascontiguousarray(tensor.numbers(rows) - np.float32(1))
    if tensor.kind.name in _KEPT:
        return np.ascontiguousarray(rows)
    from torch import bfloat16, from_numpy, int16  # rounds to the nearest, ties to even

    return from_numpy(tensor.numbers(rows)).to(bfloat16).view(int16).numpy()
