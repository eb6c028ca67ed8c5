"""Folders of adapters of tiny models in PEFT's format."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nano_inference.checkpoints.loading import load_spec
from nano_inference.checkpoints.lora import CONFIG, WEIGHTS, targets_of

RANK = 4


def adapter_folder(model: Path, folder: Path, seed: int, *, width: int = 0) -> Path:
    """Write a random adapter that changes samples. Another `width` fits another base model only."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for target in targets_of(load_spec(model)).values():
        out, own = target.slot.shape
        for half, shape in (("A", (RANK, own + width)), ("B", (out, RANK))):
            numbers = torch.randn(shape, generator=generator) * 0.3
            tensors[f"base_model.model.{target.module}.lora_{half}.weight"] = numbers
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(fields))
    return folder
