"""The device for the tests of this folder: a card, or a dry run in Triton's interpreter
on the CPU.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nano_inference import EngineConfig
from nano_inference.ops.batches import ForwardBatch
from tests.invariance.scenario import Schedule


@dataclass(frozen=True)
class Target:
    """A device.

    Attributes:
        device: Name of the device.
        dry: True in a dry run, in which every size is minimal.
    """

    device: str
    dry: bool

    def size(self, real: int, toy: int) -> int:
        """Return the size for a card, or the one for a dry run."""
        return toy if self.dry else real

    def config(self, folder: Path, dtype: str = "float32", **changes: Any) -> EngineConfig:
        """Return an engine config with the CUDA backend."""
        values: dict[str, Any] = {
            "model_path": str(folder),
            "dtype": dtype,
            "device": self.device,
            "backend": "cuda",
            "batch_invariant": True,
            "kv_cache_memory": 1 << 20 if self.dry else 64 << 20,
            "max_batch_size": 4 if self.dry else 64,
        }
        return EngineConfig(**values | changes)

    def on(self, schedule: Schedule) -> Schedule:
        """Move a schedule of the property tests to this device."""
        return replace(schedule, backend="cuda", device=self.device)


def moved(batch: ForwardBatch, device: str) -> ForwardBatch:
    """Return the same batch with its tensors on a device."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(
        batch,
        **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)},
    )


def numbers(
    seed: int, *shape: int, device: str, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """Return normal numbers, drawn on the device because a CPU takes seconds for the head of a
    large model. The numbers are reproducible on the same device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)
