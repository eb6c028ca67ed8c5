"""Adapters of a rank as steps on a GPU need them in advance: bounds, memory, and a blank one."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch

from nano_inference.checkpoints.lora import Target, targets_of
from nano_inference.config import EngineConfig
from nano_inference.core.sequence import POLICY
from nano_inference.models.decoder import Decoder
from nano_inference.models.sharding.shard import ModelShard
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.lora import Adapter, LoraPart


def _targets(part: ModelShard) -> Iterable[Target]:
    return targets_of(part.whole, part).values()


def most_parts(part: ModelShard) -> int:
    """Return the maximum number of parts that an adapter can have at one product."""
    return max(Counter(target.param for target in _targets(part)).values())


def columns_of(part: ModelShard) -> list[int]:
    """Return the first columns and the numbers of columns of all parts."""
    return [column for each in _targets(part) for column in (each.slot.start, each.sizes[0])]


def reserved_bytes(config: EngineConfig, part: ModelShard) -> int:
    """Return the bytes of the largest adapters that a rank can hold, and of one more: a new
    version is written before the old one is released.
    """
    if not config.most_loras:
        return 0
    sizes = sum(sum(target.sizes) for target in _targets(part))
    return 4 * config.max_lora_rank * sizes * (config.most_loras + 1)


def blank_adapter(part: ModelShard, rank: int, device: torch.device) -> Adapter:
    """Return an adapter of zeros for all products of a rank. Its matrices share memory."""
    targets = _targets(part)
    widest = max(max(target.sizes) for target in targets)
    zeros, parts = torch.zeros(rank * widest, device=device), dict[str, list[LoraPart]]()
    for target in targets:
        b, a = (zeros[: rank * size].view(rank, size) for size in target.sizes)
        parts.setdefault(target.param, []).append(LoraPart(target.slot.start, a, b, 1.0))
    ordered = {k: tuple(sorted(group, key=lambda part: part.first)) for k, group in parts.items()}
    return Adapter("blank", 0, ordered)


def with_and_without_adapters(
    config: EngineConfig, model: Decoder, batch: ForwardBatch
) -> list[ForwardBatch]:
    """Return a batch, and if the engine has adapters for these weights, the batch with one."""
    if not config.most_loras or batch.weight_set != POLICY:
        return [batch]
    blank = blank_adapter(model.part, config.max_lora_rank, model.device)
    rows = torch.zeros(len(batch.input_ids), dtype=torch.int64)
    return [batch, replace(batch, adapters=(blank,), row_adapters=rows)]
