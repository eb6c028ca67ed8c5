"""Where the tests of this folder run: on a card, or in a dry run through Triton's interpreter on
the CPU.
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
        device: its name.
        dry: a dry run, in which everything is as small as can be.
    """

    device: str
    dry: bool

    def size(self, real: int, toy: int) -> int:
        """A size on a card, or in a dry run."""
        return toy if self.dry else real

    def config(self, folder: Path, dtype: str = "float32", **changes: Any) -> EngineConfig:
        """An engine with the CUDA backend."""
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
        """A schedule of the property tests, on this device."""
        return replace(schedule, backend="cuda", device=self.device)


def moved(batch: ForwardBatch, device: str) -> ForwardBatch:
    """The same batch with its tensors on a device."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(
        batch,
        **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)},
    )


def numbers(
    seed: int, *shape: int, device: str, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """Normal numbers, drawn on the device: a CPU takes seconds for the head of a large model. They
    are the same whenever they are drawn on the same device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)
