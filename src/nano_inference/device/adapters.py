"""Adapters of a model as steps on a GPU need them in advance: bounds, memory, and a blank one."""

from collections import Counter
from dataclasses import replace

import torch

from nano_inference.checkpoints.lora import targets_of
from nano_inference.config import EngineConfig
from nano_inference.core.sequence import POLICY
from nano_inference.models.decoder import Decoder
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.lora import Adapter, LoraPart


def most_parts(spec: ModelSpec) -> int:
    """Return the maximum number of parts that an adapter can have at one product."""
    return max(Counter(target.param for target in targets_of(spec).values()).values())


def columns_of(spec: ModelSpec) -> list[int]:
    """Return the first columns and the numbers of columns of all parts."""
    slots = [target.slot for target in targets_of(spec).values()]
    return [column for slot in slots for column in (slot.start, slot.local_shape[0])]


def reserved_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the bytes of the largest adapters that an engine can load, and of one more: a new
    version is written before the old one is released.
    """
    if not config.most_loras:
        return 0
    sizes = sum(sum(target.slot.local_shape) for target in targets_of(spec).values())
    return 4 * config.max_lora_rank * sizes * (config.most_loras + 1)


def blank_adapter(spec: ModelSpec, rank: int, device: torch.device) -> Adapter:
    """Return an adapter of zeros for all products of a model. Its matrices share memory."""
    targets = targets_of(spec).values()
    widest = max(max(target.slot.local_shape) for target in targets)
    zeros, parts = torch.zeros(rank * widest, device=device), dict[str, list[LoraPart]]()
    for target in targets:
        b, a = (zeros[: rank * size].view(rank, size) for size in target.slot.local_shape)
        parts.setdefault(target.param, []).append(LoraPart(target.slot.start, a, b, 1.0))
    ordered = {k: tuple(sorted(group, key=lambda part: part.first)) for k, group in parts.items()}
    return Adapter("blank", 0, ordered)


def with_and_without_adapters(
    config: EngineConfig, model: Decoder, batch: ForwardBatch
) -> list[ForwardBatch]:
    """Return a batch, and if the engine has adapters for these weights, the batch with one."""
    if not config.most_loras or batch.weight_set != POLICY:
        return [batch]
    blank = blank_adapter(model.part.whole, config.max_lora_rank, model.device)
    rows = torch.zeros(len(batch.input_ids), dtype=torch.int64)
    return [batch, replace(batch, adapters=(blank,), row_adapters=rows)]
