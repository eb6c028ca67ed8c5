"""The device for the tests of this folder: a card, or a dry run in Triton's interpreter
on the CPU.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nano_inference import EngineConfig
from nano_inference.checkpoints.loading import load_spec
from nano_inference.checkpoints.lora import targets_of
from nano_inference.models.spec.states import DeltaNet, ShortConv, StateSpec
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.lora import Adapter, LoraPart
from tests.invariance.scenario import Schedule
from tests.ops.state_cases import CONV, DELTA, UNEVEN, Texts

# layers with a state at the widths of LFM2-1.2B, Qwen3-Next-80B-A3B and Qwen3.5-27B
STATES: dict[str, StateSpec] = {
    "lfm2": ShortConv((True,), 2048, 3),
    "qwen3-next": DeltaNet((True,), 16, 32, 128, 128, 4),
    "qwen3.5": DeltaNet((True,), 16, 48, 128, 128, 4),
}
TOY_STATES: dict[str, StateSpec] = {"lfm2": CONV, "qwen3-next": DELTA, "qwen3.5": UNEVEN}
TEXTS = Texts(16, (tuple(range(20)), tuple(range(39, 19, -1)), (40, 41)), (311, 160, 20))


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


def adapter(device: str, rank: int, width: int, columns: tuple[int, ...]) -> Adapter:
    """Return an adapter of the product "weight" with parts side by side."""
    parts, start = list[LoraPart](), 0
    for index, size in enumerate(columns):
        a = numbers(rank + index, rank, width, device=device, scale=width**-0.5)
        b = numbers(rank - index, rank, size, device=device, scale=0.5)
        parts.append(LoraPart(start, a, b, 2.0 / rank))
        start += size
    return Adapter(f"rank {rank}", 1, {"weight": tuple(parts)})


def adapted(adapters: tuple[Adapter, ...], adapter_of: list[int], device: str) -> ForwardBatch:
    """Return rows with these adapters by index, -1 for none."""
    batch = batch_of_rows([Rows([0] * len(adapter_of), 0, range(len(adapter_of)))], 1)
    rows = torch.tensor(adapter_of, dtype=torch.int64)
    return moved(replace(batch, adapters=adapters, row_adapters=rows), device)


def adapter_tensors(model: Path, seed: int) -> dict[str, Tensor]:
    """Return random matrices of rank 4 or 12 for all modules of a model."""
    generator, rank = torch.Generator().manual_seed(seed), 4 + seed % 2 * 8
    tensors: dict[str, Tensor] = {}
    for module in targets_of(load_spec(model)).values():
        out, width = module.slot.shape
        for half, shape in (("A", (rank, width)), ("B", (out, rank))):
            name = f"base_model.model.{module.module}.lora_{half}.weight"
            tensors[name] = torch.randn(shape, generator=generator) * 0.2
    return tensors
