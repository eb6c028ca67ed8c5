"""The KV tensors, and how layers and blocks find their place in them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nano_inference.kv_cache.units import UNIFORM, BlockLayout, UnitPool
from nano_inference.models.spec import ModelSpec
from nano_inference.ops.cpu.memory import advise_huge_pages


def kv_shape(spec: ModelSpec) -> tuple[int, int, int]:
    """(layers, KV heads, head_dim): models that agree in it can share KV tensors."""
    return spec.num_layers, spec.num_kv_heads, spec.head_dim


def storage_key(spec: ModelSpec, layout: BlockLayout) -> tuple[object, ...]:
    """Models with the same key share KV tensors: also which layers have a window must agree where that counts."""
    return (*kv_shape(spec), spec.windows if layout.num_sliding else ())


def common_layout(specs: Sequence[ModelSpec], max_len: int) -> BlockLayout:
    """What a block costs if every model is to find its place in it.

    A unit holds as many layers as divide both those with a window and those without. Block ids are shared, so models
    whose layouts differ all keep everything, as if no layer had a window.
    """
    layouts = {_layout(spec, max_len) for spec in specs}
    return layouts.pop() if len(layouts) == 1 else UNIFORM


def _layout(spec: ModelSpec, max_len: int) -> BlockLayout:
    windows = [window for window in spec.windows if 0 < window < max_len]  # one that no sequence outgrows is none
    if not windows:
        return UNIFORM
    num_full = spec.num_layers - len(windows)
    layers = math.gcd(num_full, len(windows))
    return BlockLayout(num_full // layers, len(windows) // layers, max(windows))


def layers_of_a_unit(spec: ModelSpec, layout: BlockLayout) -> int:
    """How many layers' keys and values one unit holds."""
    return spec.num_layers // layout.num_units


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on a device, behind what is queued there; the host does not wait for it."""
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class UnitMap:
    """Which units stand behind which block, on the device: a mirror of `UnitPool.unit_of`, shared by all storages."""

    def __init__(self, pool: UnitPool, device: torch.device) -> None:
        self.layout, self.num_units = pool.layout, pool.num_units
        self._pool = pool
        self._host = torch.frombuffer(pool.unit_of, dtype=torch.int64).view(pool.layout.num_units, pool.num_blocks)
        self._units = self._host if device.type == "cpu" else self._host.to(device)  # a CPU reads the pool's own memory

    def units(self) -> Tensor:
        """Units [units of a block, blocks] as they are now."""
        if self._units is not self._host and self._pool.changed:
            blocks = torch.tensor(sorted(self._pool.changed))
            changed = sent(torch.cat([blocks[None], self._host[:, blocks]]), self._units.device)
            self._units[:, changed[0]] = changed[1:]  # in place: captured graphs read it
            self._pool.changed.clear()
        return self._units


class KVStorage:
    """Keys and values: two tensors [layers of a unit, kv heads, units, block_size, head_dim].

    The head stands before the block, so that a gather over slots gives one contiguous matrix a head. Without `units` a
    block is one unit of all layers. With them, each layer of a block lies in one of the block's units.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        units: UnitMap | None = None,
    ) -> None:
        layout, num_units = (UNIFORM, num_blocks) if units is None else (units.layout, units.num_units)
        layers = layers_of_a_unit(spec, layout)
        shape = (layers, spec.num_kv_heads, num_units, block_size, spec.head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.unit_map = units
        # For each layer: which of a block's units it lies in, and where in there. Full layers stand before others.
        sliding = [0 < window <= layout.window for window in spec.windows]
        order = sorted(range(spec.num_layers), key=sliding.__getitem__)
        ranks = {layer: rank for rank, layer in enumerate(order)}
        self.places = [divmod(ranks[layer], layers) for layer in range(spec.num_layers)]
        # Not initialised: no slot is read before it is written (tests fill them with NaN), and touching gigabytes that
        # may never be used takes seconds.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            advise_huge_pages(self.keys)
            advise_huge_pages(self.values)

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks (source, target), all layers; no target may be a source."""
        pairs = sent(torch.tensor(copies), self.keys.device)
        sources, targets = pairs[:, 0], pairs[:, 1]
        if self.unit_map is not None:
            units = self.unit_map.units()
            sources, targets = units[:, sources].flatten(), units[:, targets].flatten()
        for cache in (self.keys, self.values):
            cache[:, :, targets] = cache[:, :, sources]

    def bind(self, page_table: Tensor, total_len: Tensor) -> "BoundKVStorage":
        """The storage seen through block tables [S, blocks] and context lengths [S]."""
        return BoundKVStorage(self, page_table, total_len)


class BoundKVStorage:
    """A `KvcacheView`: the storage, and the tables of one batch. Slots are of blocks, whatever stands behind them."""

    def __init__(self, storage: KVStorage, page_table: Tensor, total_len: Tensor) -> None:
        self.block_size = storage.block_size
        self.storage = storage
        self.page_table = page_table
        self.total_len = total_len
        self._places = storage.places
        self._units = storage.unit_map.units() if storage.unit_map is not None else None

    @property
    def _keys(self) -> Tensor:
        return self.storage.keys.flatten(2, 3)  # [layers of a unit, kv heads, slots, head_dim]

    @property
    def _values(self) -> Tensor:
        return self.storage.values.flatten(2, 3)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, kv heads, head_dim] at slots [N]."""
        place, slots = self._find(layer, slots)
        self._keys[place].index_copy_(1, slots, keys.transpose(0, 1).to(self._keys.dtype))
        self._values[place].index_copy_(1, slots, values.transpose(0, 1).to(self._values.dtype))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [...], as float32: two of [kv heads, ..., head_dim]."""
        place, flat = self._find(layer, slots.flatten())
        keys = self._keys[place].index_select(1, flat).float()
        values = self._values[place].index_select(1, flat).float()
        shape = (keys.shape[0], *slots.shape, keys.shape[-1])
        return keys.view(shape), values.view(shape)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values themselves: two of [kv heads, slots, head_dim]."""
        if self._units is not None:
            raise RuntimeError("slots of units are not slots of blocks; plan_memory keeps them apart.")
        place = self._places[layer][1]
        return self._keys[place], self._values[place]

    def _find(self, layer: int, slots: Tensor) -> tuple[int, Tensor]:
        """Where a layer lies in its units, and the slots of those units."""
        unit, place = self._places[layer]
        if self._units is None:
            return place, slots
        return place, self._units[unit][slots // self.block_size] * self.block_size + slots % self.block_size
