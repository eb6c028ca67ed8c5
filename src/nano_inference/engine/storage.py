"""The KV tensors, how many blocks fit, and the table that says where the memory goes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError
from nano_inference.models.spec import ModelSpec

CPU_SHARE = 0.25  # of the available memory


def kv_shape(spec: ModelSpec) -> tuple[int, int, int]:
    """(layers, KV heads, head_dim): models that agree in it can share KV tensors."""
    return spec.num_layers, spec.num_kv_heads, spec.head_dim


class KVStorage:
    """Keys and values of all layers and blocks: two tensors [layers, kv heads, blocks, block_size, head_dim].

    The head stands before the block, so that a gather over slots gives one contiguous matrix a head.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (spec.num_layers, spec.num_kv_heads, num_blocks, block_size, spec.head_dim)
        self.block_size = block_size
        # Not initialised: no slot is read before it is written (tests fill them with NaN), and touching gigabytes that
        # may never be used takes seconds.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks (source, target), all layers; no target may be a source."""
        sources = [source for source, _ in copies]
        targets = [target for _, target in copies]
        for cache in (self.keys, self.values):
            cache[:, :, targets] = cache[:, :, sources]

    def bind(self, page_table: Tensor, total_len: Tensor) -> "BoundKVStorage":
        """The storage seen through block tables [S, blocks] and context lengths [S]."""
        return BoundKVStorage(self, page_table, total_len)


class BoundKVStorage:
    """A `KvcacheView`: the storage, and the tables of one batch."""

    def __init__(self, storage: KVStorage, page_table: Tensor, total_len: Tensor) -> None:
        self.block_size = storage.block_size
        self.page_table = page_table
        self.total_len = total_len
        self._keys = storage.keys.flatten(2, 3)  # [layers, kv heads, slots, head_dim]
        self._values = storage.values.flatten(2, 3)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, kv heads, head_dim] at slots [N]."""
        self._keys[layer].index_copy_(1, slots, keys.transpose(0, 1).to(self._keys.dtype))
        self._values[layer].index_copy_(1, slots, values.transpose(0, 1).to(self._values.dtype))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [...], as float32: two of [kv heads, ..., head_dim]."""
        flat = slots.flatten()
        keys = self._keys[layer].index_select(1, flat).float()
        values = self._values[layer].index_select(1, flat).float()
        shape = (keys.shape[0], *slots.shape, keys.shape[-1])
        return keys.view(shape), values.view(shape)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values themselves: two of [kv heads, slots, head_dim]."""
        return self._keys[layer], self._values[layer]


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Where the engine's memory goes. Sizes in bytes."""

    device: str
    weights: int
    kv_cache: int
    bytes_per_token: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values fit at once."""
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        rows = (
            ("weights", _megabytes(self.weights)),
            ("KV cache", f"{_megabytes(self.kv_cache)} = {self.num_blocks:,} blocks of {self.block_size} tokens"),
            ("a token takes", f"{self.bytes_per_token:,} bytes"),
            ("tokens that fit", f"{self.num_tokens:,}"),
            ("longest sequence", f"{self.max_model_len:,} tokens"),
        )
        return "\n".join([f"memory on {self.device}", *(f"  {name:<17} {value}" for name, value in rows)])


def plan_memory(
    config: EngineConfig, specs: Sequence[ModelSpec], weight_bytes: int, dtype: torch.dtype, device: torch.device
) -> MemoryBudget:
    """How many blocks the KV cache gets. Raises `ConfigError` where not even one token fits.

    Every block has room for every model: blocks belong to whichever weight set takes them.
    """
    per_token = sum(2 * math.prod(shape) * dtype.itemsize for shape in {kv_shape(spec) for spec in specs})
    per_block = per_token * config.block_size
    memory = config.kv_cache_memory or _free_memory(config, device)
    limit = min(spec.max_position for spec in specs)
    asked_len = min(config.max_model_len or limit, limit)
    useful = config.max_batch_size * -(-asked_len // config.block_size)
    num_blocks = min(memory // per_block, useful)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory of {memory:,} bytes holds no block of {config.block_size} tokens; give at least "
            f"{per_block:,} bytes."
        )
    return MemoryBudget(
        device=str(device),
        weights=weight_bytes,
        kv_cache=num_blocks * per_block,
        bytes_per_token=per_token,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=min(asked_len, num_blocks * config.block_size),
    )


def _free_memory(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * config.gpu_memory_utilization) - (total - free))
    return int(psutil.virtual_memory().available * CPU_SHARE)


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
