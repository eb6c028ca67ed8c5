"""The KV tensors, and how layers and blocks find their place in them."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nano_inference.config import KVCacheDType
from nano_inference.engine.state_storage import StateStorage
from nano_inference.kv_cache.sliding_window import UNIFORM, BlockLayout, UnitPool
from nano_inference.models.shard import split_layers
from nano_inference.models.spec import ModelSpec
from nano_inference.ops.cpu.memory import advise_huge_pages
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.scheduling.sequence import DRAFT, POLICY

NO_PLACE = (-1, -1)  # of a layer without keys


def kv_format(dtype: torch.dtype, kv_cache_dtype: KVCacheDType) -> KvFormat:
    """How rows are kept of a model of this dtype."""
    return KvFormat(dtype, coded=kv_cache_dtype == "int8")


def kv_shape(spec: ModelSpec) -> tuple[object, ...]:
    """What models that can share KV tensors agree in."""
    return spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.kv_tensors, spec.state


def storage_key(
    spec: ModelSpec, layout: BlockLayout, weight_set: str = POLICY
) -> tuple[object, ...]:
    """Models with the same key share KV tensors: also which layers have a window must agree where
    that counts. A model that drafts shares none: it computes the tokens of the policy's sequences.
    """
    return (*kv_shape(spec), spec.windows if layout.num_sliding else (), weight_set == DRAFT)


def common_layout(specs: Sequence[ModelSpec], max_len: int, stages: int = 1) -> BlockLayout:
    """What a block costs if every model, and every stage of a pipeline, is to find its place in it.

    A unit holds as many layers as divide both those with a window and those without, in every
    stage; a stage that has fewer of them than another leaves some of its units empty. Block ids are
    shared, so models whose layouts differ all keep everything, as if no layer had a window.
    """
    layouts = {_layout(spec, max_len, stages) for spec in specs}
    return layouts.pop() if len(layouts) == 1 else UNIFORM


def state_layout(specs: Sequence[ModelSpec], block_size: int) -> BlockLayout | None:
    """What a block costs in the memory of layers with a state, where all models have the same.

    That is a memory of its own, one unit a block within their window. Keys and values lie in the
    block itself: of models that have such layers the others keep everything. None: a block is its
    unit.
    """
    kinds = {spec.state for spec in specs}
    state = kinds.pop()
    if kinds or state is None:
        return None
    return BlockLayout(0, 1, state.window(block_size), beside=True)


def _layout(spec: ModelSpec, max_len: int, stages: int) -> BlockLayout:
    # one that no sequence outgrows is none
    windows = [window if window < max_len else 0 for window in spec.windows]
    if not any(windows):
        return UNIFORM
    held = [[windows[layer] for layer in layers] for layers in split_layers(spec, stages)]
    num_full, num_sliding = (
        [each.count(0) for each in held],
        [len(each) - each.count(0) for each in held],
    )
    layers = math.gcd(*num_full, *num_sliding)
    return BlockLayout(max(num_full) // layers, max(num_sliding) // layers, max(windows))


def layers_of_a_unit(spec: ModelSpec, layout: BlockLayout) -> int:
    """How many layers' keys and values one unit holds, of a model or of a stage's part of it."""
    if spec.state is not None:
        return spec.state.layers.count(False)
    num_sliding = sum(_slides(spec, layout))
    kinds = ((spec.num_layers - num_sliding, layout.num_full), (num_sliding, layout.num_sliding))
    return max(-(-layers // units) for layers, units in kinds if units)


def _slides(spec: ModelSpec, layout: BlockLayout) -> list[bool]:
    """For each layer: whether it lies in units of sliding layers."""
    return [0 < window <= layout.window for window in spec.windows]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on a device, behind what is queued there; the host does not wait
    for it.
    """
    return (
        tensor.to(device)
        if device.type == "cpu"
        else tensor.pin_memory().to(device, non_blocking=True)
    )


class UnitMap:
    """Which units stand behind which block, on the device: a mirror of `UnitPool.unit_of`, shared
    by all storages.
    """

    def __init__(self, pool: UnitPool, device: torch.device) -> None:
        self.layout, self.num_units = pool.layout, pool.num_units
        self._pool = pool
        self._host = torch.frombuffer(pool.unit_of, dtype=torch.int64).view(
            pool.layout.num_units, pool.num_blocks
        )
        # a CPU reads the pool's own memory
        self._units = self._host if device.type == "cpu" else self._host.to(device)

    def units(self) -> Tensor:
        """Units [units of a block, blocks] as they are now."""
        if self._units is not self._host and self._pool.changed:
            blocks = torch.tensor(sorted(self._pool.changed))
            changed = sent(torch.cat([blocks[None], self._host[:, blocks]]), self._units.device)
            self._units[:, changed[0]] = changed[1:]  # in place: captured graphs read it
            self._pool.changed.clear()
        return self._units


class KVStorage:
    """Keys and values: two tensors [layers of a unit, kv heads, units, block_size, numbers of a
    row]. A `KvcacheView`.

    The head stands before the block, so that a gather over slots gives one contiguous matrix a
    head. Without `units` a block is one unit of all layers. With them, each layer of a block lies
    in one of the block's units. Where a model has layers with a state, the units are theirs.

    Args:
        spec: of the model, or of a rank's part of it.
        num_blocks: blocks there is room for.
        block_size: tokens of one.
        dtype: of the model.
        device: where they lie.
        units: what stands behind blocks; None: a block is its unit.
        kv_cache_dtype: as in `EngineConfig`.

    Attributes:
        format: of the rows.
        head_dim: numbers of a row that are attended.
        states: what layers with a state keep; None: the model has none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        units: UnitMap | None = None,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> None:
        self.format, self.head_dim = kv_format(dtype, kv_cache_dtype), spec.head_dim
        self.states = (
            None
            if spec.state is None
            else StateStorage(spec.state, num_blocks, block_size, dtype, device, units)
        )
        if self.states is not None:
            units = None
        layout, num_units = (
            (UNIFORM, num_blocks) if units is None else (units.layout, units.num_units)
        )
        layers = layers_of_a_unit(spec, layout)
        width, stored = self.format.width(spec.head_dim), self.format.stored
        shape = (layers, spec.num_kv_heads, num_units, block_size, width)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.unit_map = units
        # For each layer: which of a block's units it lies in, and where in there. Full layers stand
        # before others.
        seen = {False: itertools.count(), True: itertools.count(layout.num_full * layers)}
        has_state = spec.state.layers if spec.state is not None else (False,) * spec.num_layers
        self.places = [
            NO_PLACE if of_state else divmod(next(seen[slides]), layers)
            for slides, of_state in zip(_slides(spec, layout), has_state, strict=True)
        ]
        # Not initialised: no slot is read before it is written (tests fill them with NaN), and
        # touching gigabytes that may never be used takes seconds.
        self.keys = torch.empty(shape, dtype=stored, device=device)
        self.values = (
            torch.empty(shape, dtype=stored, device=device) if spec.kv_tensors == 2 else self.keys
        )
        if device.type == "cpu":
            for cache in self._caches:
                advise_huge_pages(cache)

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks (source, target), all layers; no target may be a source."""
        pairs = sent(torch.tensor(copies), self.keys.device)
        sources, targets = pairs[:, 0], pairs[:, 1]
        if self.states is not None:
            self.states.copy_blocks(sources, targets)
        if self.unit_map is not None:
            units = self.unit_map.units()
            sources, targets = units[:, sources].flatten(), units[:, targets].flatten()
        for cache in self._caches:
            cache[:, :, targets] = cache[:, :, sources]

    @property
    def tensors(self) -> list[Tensor]:
        """All of it."""
        states = () if self.states is None else self.states.tensors.values()
        return [*self._caches, *states]

    @property
    def _caches(self) -> list[Tensor]:
        """Keys and values; of latents, which are both, one."""
        return [self.keys] if self.values is self.keys else [self.keys, self.values]

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of one block in `read_blocks`: [tensors, layers, kv heads, block_size, numbers of a row],
        keys first; with states all of its numbers in a row.
        """
        if self.states is not None:
            return (math.prod(self._kv_shape) + self.states.block_bytes // self.keys.itemsize,)
        return self._kv_shape

    @property
    def _kv_shape(self) -> tuple[int, ...]:
        layers = len(self._attention_layers)
        return len(self._caches), layers, self.keys.shape[1], self.block_size, self.keys.shape[-1]

    @property
    def _attention_layers(self) -> list[int]:
        return [layer for layer, place in enumerate(self.places) if place != NO_PLACE]

    def read_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """Copies of whole blocks on the host: uint8 [blocks, bytes of a block]."""
        blocks = torch.tensor(block_ids, device=self.keys.device)
        parts: list[Tensor] = []
        for layer in self._attention_layers:
            place, where = self._find_blocks(layer, blocks)
            parts.append(torch.stack([cache[place][:, where] for cache in self._caches]))
        # [layers, tensors, kv heads, blocks, block_size, numbers of a row]
        whole = torch.stack(parts).permute(3, 1, 0, 2, 4, 5).to("cpu").contiguous()
        keys = whole.view(len(block_ids), -1).view(torch.uint8)
        if self.states is None:
            return keys
        return torch.cat([keys, self.states.read_blocks(block_ids)], dim=1)

    def write_blocks(self, block_ids: Sequence[int], data: Tensor) -> None:
        """Put back what `read_blocks` gave, of any storage of the same shape, into blocks that
        nothing reads now.
        """
        blocks = torch.tensor(block_ids, device=self.keys.device)
        size = math.prod(self._kv_shape) * self.keys.itemsize
        if self.states is not None:
            self.states.write_blocks(block_ids, data[:, size:])
        values = (
            data[:, :size]
            .contiguous()
            .view(self.keys.dtype)
            .view(len(block_ids), *self._kv_shape)
            .to(self.keys.device)
        )
        for nth, layer in enumerate(self._attention_layers):
            place, where = self._find_blocks(layer, blocks)
            for which, cache in enumerate(self._caches):
                cache[place][:, where] = values[:, which, nth].transpose(0, 1)

    def _find_blocks(self, layer: int, blocks: Tensor) -> tuple[int, Tensor]:
        """Where a layer of these blocks lies: the place in its units, and the units."""
        unit, place = self.places[layer]
        return place, blocks if self.unit_map is None else self.unit_map.units()[unit][blocks]

    @property
    def _keys(self) -> Tensor:
        return self.keys.flatten(2, 3)  # [layers of a unit, kv heads, slots, numbers of a row]

    @property
    def _values(self) -> Tensor:
        return self.values.flatten(2, 3)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, kv heads, head_dim] at slots [N]."""
        place, slots = self._find(layer, slots)
        self._keys[place].index_copy_(1, slots, self.format.encode(keys).transpose(0, 1))
        if self.values is not self.keys:
            self._values[place].index_copy_(1, slots, self.format.encode(values).transpose(0, 1))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [...], as float32: two of [kv heads, ..., head_dim]."""
        place, flat = self._find(layer, slots.flatten())
        keys = self.format.decode(self._keys[place].index_select(1, flat))
        values = self.format.decode(self._values[place].index_select(1, flat))
        shape = (keys.shape[0], *slots.shape, keys.shape[-1])
        return keys.view(shape), values.view(shape)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values themselves: two of [kv heads, slots, numbers of a row]."""
        if self.unit_map is not None:
            raise RuntimeError(
                "slots of units are not slots of blocks; plan_memory keeps them apart."
            )
        place = self.places[layer][1]
        return self._keys[place], self._values[place]

    def _find(self, layer: int, slots: Tensor) -> tuple[int, Tensor]:
        """Where a layer lies in its units, and the slots of those units."""
        unit, place = self.places[layer]
        if self.unit_map is None:
            return place, slots
        units = self.unit_map.units()[unit][slots // self.block_size]
        return place, units * self.block_size + slots % self.block_size
