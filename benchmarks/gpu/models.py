"""Model folders of real shapes with random weights, made on the device, so that no files need
copying to it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.models import STD
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import num_bytes
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.read import spec_from_config

SHARD_BYTES = 4 << 30


def weight_bytes(config: dict[str, Any]) -> int:
    """Return the bytes of a model's weights."""
    return num_bytes(param_table(spec_from_config(config)), getattr(torch, config["torch_dtype"]))


def random_model(folder: Path, config: dict[str, Any], device: str, seed: int = 0) -> Path:
    """Write a model of normal weights into `folder` unless it exists, and return the folder."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_write_shards(folder, config, device, seed))
    total = sum(len(names) for names in shards)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (folder / f"part-{i}.safetensors").rename(folder / file)
    index = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    assert len(index) == total
    metadata = {"total_size": weight_bytes(config)}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": metadata, "weight_map": index})
    )
    # written last: it marks the folder as complete
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def _write_shards(
    folder: Path, config: dict[str, Any], device: str, seed: int
) -> Iterator[list[str]]:
    """Write shards one after another, so that only one is in memory. Yield the names in each."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    weights: dict[str, Tensor] = {}
    size = written = 0
    table = slots(param_table(spec_from_config(config)))
    for place, (name, slot) in enumerate(table.items()):
        if len(slot.shape) == 1:
            weights[name] = torch.ones(slot.shape, dtype=dtype)
        else:
            drawn = torch.randn(slot.shape, generator=generator, device=device, dtype=torch.float32)
            weights[name] = (drawn * STD).to(dtype).cpu()
        size += weights[name].nbytes
        if size >= SHARD_BYTES or place == len(table) - 1:
            save_file(weights, folder / f"part-{written}.safetensors", metadata={"format": "pt"})
            yield list(weights)
            weights, size, written = {}, 0, written + 1
