"""How much memory the KV cache gets, what fits into it, and the table that says so."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from nano_inference.config import EngineConfig
from nano_inference.engine.storage import common_layout, layers_of_a_unit, storage_key
from nano_inference.errors import ConfigError
from nano_inference.kv_cache.units import UNIFORM, BlockLayout
from nano_inference.models.spec import ModelSpec

CPU_SHARE = 0.25  # of the available memory


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Where the engine's memory goes. Sizes in bytes.

    Attributes:
        bytes_per_token: of a token that all layers can see.
        num_blocks: block ids. With sliding-window layers the memory is that of units, and ids are plenty.
        num_units: pieces of memory; see `layout`. Without sliding-window layers a block is one.
        layout: what a block costs.
    """

    device: str
    weights: int
    kv_cache: int
    bytes_per_token: int
    num_blocks: int
    num_units: int
    block_size: int
    max_model_len: int
    layout: BlockLayout = UNIFORM

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values of all layers fit at once."""
        return self.num_units // self.layout.num_units * self.block_size

    def num_sequences(self, length: int) -> int:
        """How many sequences of so many tokens fit while each computes one more token; none shares a block."""
        by_ids = self.num_blocks // -(-length // self.block_size)
        return min(by_ids, self.num_units // self.layout.most_units(length, 1, self.block_size))

    def __str__(self) -> str:
        blocks = f"{self.num_units // self.layout.num_units:,} blocks of {self.block_size} tokens"
        rows = [
            ("weights", _megabytes(self.weights)),
            ("KV cache", f"{_megabytes(self.kv_cache)} = {blocks}"),
            ("a token takes", f"{self.bytes_per_token:,} bytes"),
            ("tokens that fit", f"{self.num_tokens:,}{' within windows' if self.layout.num_sliding else ''}"),
            ("longest sequence", f"{self.max_model_len:,} tokens"),
        ]
        if self.layout.num_sliding:
            later = self.bytes_per_token * self.layout.num_full // self.layout.num_units
            rows.insert(
                3, ("  further back", f"{later:,} bytes, once it has left the window of {self.layout.window:,}")
            )
            rows.append(("  of which fit", f"{self.num_sequences(self.max_model_len):,}"))
        return "\n".join([f"memory on {self.device}", *(f"  {name:<17} {value}" for name, value in rows)])


def plan_memory(
    config: EngineConfig, specs: Sequence[ModelSpec], weight_bytes: int, dtype: torch.dtype, device: torch.device
) -> MemoryBudget:
    """How many blocks the KV cache gets. Raises `ConfigError` where not even one token fits.

    Every block has room for every model: blocks belong to whichever weight set takes them.
    """
    limit = min(spec.max_position for spec in specs)
    asked_len = min(config.max_model_len or limit, limit)
    # flex attention walks the slots of the KV tensors by itself and knows blocks only.
    layout = common_layout(specs, asked_len) if config.attention != "flex" else UNIFORM
    shapes = {
        storage_key(spec, layout): (layers_of_a_unit(spec, layout), spec.num_kv_heads, spec.head_dim) for spec in specs
    }
    unit_bytes = sum(2 * math.prod(shape) * dtype.itemsize for shape in shapes.values()) * config.block_size
    memory = config.kv_cache_memory or _free_memory(config, device)
    chunk = min(config.max_tokens_per_batch, config.max_chunk_tokens or asked_len, asked_len)
    useful = config.max_batch_size * layout.most_units(
        asked_len, chunk if config.enable_chunked_prefill else asked_len, config.block_size
    )
    num_units = min(memory // unit_bytes, useful)
    if num_units < layout.num_units:
        raise ConfigError(
            f"kv_cache_memory of {memory:,} bytes holds no block of {config.block_size} tokens; give at least "
            f"{unit_bytes * layout.num_units:,} bytes."
        )
    max_model_len = min(asked_len, _longest(layout, num_units, config) * config.block_size)
    return MemoryBudget(
        device=str(device),
        weights=weight_bytes,
        kv_cache=num_units * unit_bytes,
        bytes_per_token=unit_bytes * layout.num_units // config.block_size,
        num_blocks=_num_blocks(layout, num_units, max_model_len, config),
        num_units=num_units,
        block_size=config.block_size,
        max_model_len=max_model_len,
        layout=layout,
    )


def _longest(layout: BlockLayout, num_units: int, config: EngineConfig) -> int:
    """Blocks of the longest sequence that can run alone. A chunk is cut to what fits, if it may be cut at all."""
    whole = num_units // layout.num_units
    if not layout.num_sliding or not config.enable_chunked_prefill:
        return whole
    within = layout.most_in_window(1, config.block_size)
    if whole < within:
        return whole
    if not layout.num_full:
        return 2**62
    return (num_units - layout.num_sliding * within) // layout.num_full


def _num_blocks(layout: BlockLayout, num_units: int, max_model_len: int, config: EngineConfig) -> int:
    """Block ids: so many that units run out first."""
    if layout.num_full:
        return num_units // layout.num_full
    # All layers slide: what left the window takes no memory, but its id is held, and its name may lead to a match.
    longest = -(-max_model_len // config.block_size)
    return min(config.max_batch_size * longest, max(longest, num_units * -(-max_model_len // layout.window)))


def _free_memory(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * config.gpu_memory_utilization) - (total - free))
    return int(psutil.virtual_memory().available * CPU_SHARE)


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
