"""KV tensors, and the placement of layers and blocks within them."""

import itertools
import math
from collections.abc import Sequence
from functools import partial

from nano_inference.arrays import Device, Dtype, Tensor, namespace
from nano_inference.config import KVCacheDType
from nano_inference.core.sequence import DRAFT, POLICY
from nano_inference.device.state_tensors import StateStorage
from nano_inference.device.units import UnitMap, sent
from nano_inference.kv_cache.sliding_window import UNIFORM, BlockLayout
from nano_inference.models.sharding.shard import split_layers
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.cpu.memory import reserve
from nano_inference.ops.interface import TensorArena
from nano_inference.ops.kv_codes import KvFormat

NO_PLACE = (-1, -1)  # marks a layer without keys


def kv_format(dtype: Dtype, kv_cache_dtype: KVCacheDType) -> KvFormat:
    """Return the storage format of keys and values for a model of this dtype."""
    return KvFormat(dtype, None if kv_cache_dtype == "auto" else kv_cache_dtype)


def kv_shape(spec: ModelSpec) -> tuple[object, ...]:
    """Return the properties that must be equal in models that share KV tensors."""
    one = spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.kv_tensors, spec.state
    return (*one, *((kind.kept, kind.keys_of) for kind in spec.kinds))


def storage_key(
    spec: ModelSpec, layout: BlockLayout, weight_set: str = POLICY
) -> tuple[object, ...]:
    """Return a key that is equal for models that share KV tensors.

    The windows of layers must agree if the layout has units for sliding layers. A draft model
    shares no tensors, because it computes the same tokens as the policy.
    """
    return (*kv_shape(spec), spec.windows if layout.num_sliding else (), weight_set == DRAFT)


def common_layout(specs: Sequence[ModelSpec], max_len: int, stages: int = 1) -> BlockLayout:
    """Return the block layout that fits every model and every stage of a pipeline.

    The number of layers per unit divides the number of layers with a window and of those without,
    in every stage. A stage with fewer of them leaves some of its units empty. See `_packed` for
    layers of several kinds. Block ids are shared, so models whose layouts differ keep all tokens,
    as if no layer had a window.
    """
    layouts = {_layout(spec, max_len, stages) for spec in specs}
    return layouts.pop() if len(layouts) == 1 else UNIFORM


def state_layout(specs: Sequence[ModelSpec], block_size: int) -> BlockLayout | None:
    """Return the layout of separate memory for the states of layers, or None if there is none.

    The memory has one unit for each block within the window. Keys and values are stored in the
    block itself, because the other layers of such models keep all tokens. Without separate memory
    (models without states, or with different ones), each block also holds its states.
    """
    kinds = {spec.state for spec in specs if spec.state is not None}
    if len(kinds) != 1:
        return None
    return BlockLayout(0, 1, kinds.pop().window(block_size), beside=True)


def _layout(spec: ModelSpec, max_len: int, stages: int) -> BlockLayout:
    # a window that no sequence exceeds has no effect
    windows = [window if window < max_len else 0 for window in spec.windows]
    if not any(windows):
        return UNIFORM
    if spec.kinds:
        full, sliding = _packed(spec, [window > 0 for window in windows])[1:]
        return BlockLayout(full, sliding, max(windows))
    held = [[windows[layer] for layer in layers] for layers in split_layers(spec, stages)]
    num_full, num_sliding = (
        [each.count(0) for each in held],
        [len(each) - each.count(0) for each in held],
    )
    layers = math.gcd(*num_full, *num_sliding)
    return BlockLayout(max(num_full) // layers, max(num_sliding) // layers, max(windows))


def unit_width(spec: ModelSpec, layout: BlockLayout, kept: KvFormat) -> int:
    """Return how many numbers a unit stores for a token's keys."""
    if spec.kinds:
        return _unit_of_kinds(spec, layout)[0]
    return layers_of_a_unit(spec, layout) * spec.num_kv_heads * kept.width(spec.head_dim)


def _unit_of_kinds(spec: ModelSpec, layout: BlockLayout) -> tuple[int, list[tuple[int, int]]]:
    """Return the width of a unit, and each layer's unit and first number within it."""
    if layout.num_sliding and not layout.beside:
        slides = _slides(spec, layout)
        width, num_full, num_sliding = _packed(spec, slides)
        if (num_full, num_sliding) != (layout.num_full, layout.num_sliding):
            raise ValueError(f"{spec.architecture} does not fit the units of {layout}.")
    else:
        slides = [False] * spec.num_layers
        width = sum(kind.kept for layer, kind in enumerate(spec.kinds) if kind.keys_of == layer)
    places: dict[int, tuple[int, int]] = {}
    for unit, sliding in ((0, False), (layout.num_full, True)):
        makers = [layer for layer in _makers(spec) if slides[layer] == sliding]
        positions = _in_a_row([spec.kinds[layer].kept for layer in makers], width)
        places |= {
            layer: (unit + nth, first)
            for layer, (nth, first) in zip(makers, positions, strict=True)
        }
    return width, [places[kind.keys_of] for kind in spec.kinds]


def _makers(spec: ModelSpec) -> list[int]:
    """Return the layers that compute their own keys and values."""
    return [layer for layer, kind in enumerate(spec.kinds) if kind.keys_of == layer]


def _packed(spec: ModelSpec, slides: Sequence[bool]) -> tuple[int, int, int]:
    """Return the width of a unit, and the numbers of full and of sliding units of a block.

    Chooses the layout with the least total size for layers of several kinds. Ties are resolved to
    the widest unit. Layers are not split.
    """
    kept = [
        [spec.kinds[layer].kept for layer in _makers(spec) if slides[layer] == of]
        for of in (False, True)
    ]
    least = math.lcm(*kept[0], *kept[1])
    options: list[tuple[int, int, int, int]] = []
    for width in range(least, max(map(sum, kept)) + least, least):
        full, sliding = (
            max((nth + 1 for nth, _ in _in_a_row(each, width)), default=0) for each in kept
        )
        options.append((width * (full + sliding), -width, full, sliding))
    _, width, full, sliding = min(options)
    return -width, full, sliding


def _in_a_row(sizes: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Return the unit and first number of each item if items fill units of this width in order."""
    positions, unit, first = list[tuple[int, int]](), 0, 0
    for size in sizes:
        if first + size > width:
            unit, first = unit + 1, 0
        positions.append((unit, first))
        first += size
    return positions


def layers_of_a_unit(spec: ModelSpec, layout: BlockLayout) -> int:
    """Return how many layers one unit holds, for a model or a stage's part of it."""
    if spec.state is not None:
        return spec.state.layers.count(False)
    if layout.beside:  # the units belong to another model's states
        return spec.num_layers
    num_sliding = sum(_slides(spec, layout))
    kinds = ((spec.num_layers - num_sliding, layout.num_full), (num_sliding, layout.num_sliding))
    return max(-(-layers // units) for layers, units in kinds if units)


def _slides(spec: ModelSpec, layout: BlockLayout) -> list[bool]:
    """Return for each layer whether it is in the units of sliding layers."""
    return [0 < window <= layout.window for window in spec.windows]


class KVStorage:
    """Keys and values in two tensors [layers of a unit, kv heads, units, block_size, row width].

    A `KvcacheView`. Heads precede blocks, so that a gather over slots returns one contiguous matrix
    per head. Without `units`, a block is one unit of all layers. With `units`, each layer of a
    block is in one of the block's units. If a model has layers with a state, the units belong to
    those layers. If layers are of several kinds, the two tensors are [units, numbers of a unit],
    with a layer's [kv heads, block_size, head_dim] in one piece. A layer that reads another layer's
    keys shares its place.

    Args:
        spec: Specification of the model, or of a rank's part of it.
        num_blocks: Number of block ids.
        block_size: Tokens per block.
        dtype: Dtype of the model.
        device: Device of the tensors.
        units: Table of each block's units, or None if a block is its unit.
        kv_cache_dtype: Dtype of the cache, as in `EngineConfig`.
        arena: Memory of the tensors. None: new memory of the device.

    Attributes:
        format: Storage format of the rows.
        head_dim: Numbers per row that attention reads.
        states: Storage of layers with a state, or None if the model has none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: Dtype,
        device: Device,
        units: UnitMap | None = None,
        kv_cache_dtype: KVCacheDType = "auto",
        arena: TensorArena | None = None,
    ) -> None:
        take = partial(reserve, device=device) if arena is None else arena.take
        self.format, self.head_dim = kv_format(dtype, kv_cache_dtype), spec.head_dim
        self.states = (
            None
            if spec.state is None
            else StateStorage(spec.state, num_blocks, block_size, dtype, device, units, arena)
        )
        if units is not None and units.layout.beside:
            units = None  # they hold states only
        layout, num_units = (
            (UNIFORM, num_blocks) if units is None else (units.layout, units.num_units)
        )
        stored = self.format.stored
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.unit_map = units
        self._kinds = spec.kinds
        shape: tuple[int, ...]
        if spec.kinds:
            width, self.places = _unit_of_kinds(spec, layout)
            shape = (num_units, width * block_size)
        else:
            layers = layers_of_a_unit(spec, layout)
            row = self.format.width(spec.head_dim)
            shape = (layers, spec.num_kv_heads, num_units, block_size, row)
            self.places = _places(spec, layout, layers)
        # Not initialized: every slot is written before it is read (tests fill them with NaN), and
        # touching gigabytes that may never be used takes seconds.
        self.keys = take(shape, stored)
        self.values = take(shape, stored) if spec.kv_tensors == 2 else self.keys
        lie = {place: self._lie(layer) for layer, place in enumerate(self.places)}
        self._layers = [lie[place] for place in self.places]

    def lie(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as views [kv heads, units, block_size, row width]."""
        return self._layers[layer]

    def _lie(self, layer: int) -> tuple[Tensor, Tensor]:
        index = self.places[layer][1]
        if not self._kinds:
            return self.keys[index], self.values[index]
        kind, size = self._kinds[layer], self.block_size
        shape, rest = (kind.num_kv_heads, size, kind.head_dim), slice(index * size, None)
        keys, values = (
            cache[:, rest][:, : kind.kept * size].unflatten(1, shape).swapaxes(0, 1)
            for cache in (self.keys, self.values)
        )
        return keys, values

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks (source, target) in all layers. No target may be a source."""
        pairs = sent(namespace(self.keys).tensor(copies), self.keys.device)
        sources, targets = pairs[:, 0], pairs[:, 1]
        if self.states is not None:
            self.states.copy_blocks(sources, targets)
        if self.unit_map is not None:
            units = self.unit_map.units()
            sources, targets = units[:, sources].flatten(), units[:, targets].flatten()
        for cache in self._caches:
            by_unit = cache if self._kinds else cache.movedim(2, 0)
            by_unit[targets] = by_unit[sources]

    def update_units(self) -> None:
        """Bring the device's map of units up to date. Captured steps read it in place."""
        for units in (self.unit_map, self.states and self.states.unit_map):
            if units is not None:
                units.units()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the storage."""
        states = () if self.states is None else self.states.tensors.values()
        return [*self._caches, *states]

    @property
    def _caches(self) -> list[Tensor]:
        """Keys and values, or a single tensor for latents, which are both."""
        return [self.keys] if self.values is self.keys else [self.keys, self.values]

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block in `read_blocks`: [tensors, layers, kv heads, block_size, row width].

        Keys come first. With states or layers of several kinds, the shape is flat.
        """
        if self.states is not None or self._kinds:
            states = 0 if self.states is None else self.states.block_bytes // self.keys.itemsize
            return (self._kept + states,)
        layers = len(self._attention_layers)
        return len(self._caches), layers, self.keys.shape[1], self.block_size, self.keys.shape[-1]

    @property
    def _kept(self) -> int:
        """Numbers of a block's keys and values."""
        return sum(
            cache[:, :1].numel() for layer in self._attention_layers for cache in self._of(layer)
        )

    @property
    def _attention_layers(self) -> list[int]:
        """Layers that keep keys and values, one for each place."""
        firsts = {place: layer for layer, place in reversed([*enumerate(self.places)])}
        return sorted(layer for place, layer in firsts.items() if place != NO_PLACE)

    def _of(self, layer: int) -> tuple[Tensor, ...]:
        """Return a layer's keys and values, or a single tensor for latents, which are both."""
        return self._layers[layer][: len(self._caches)]

    def read_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """Copy whole blocks to the host: uint8 [blocks, bytes of a block]."""
        xp = namespace(self.keys)
        blocks = xp.tensor(block_ids, dtype=xp.int64, device=self.keys.device)
        parts = [
            cache[:, self._find_blocks(layer, blocks)].swapaxes(0, 1).flatten(1)
            for caches in zip(*map(self._of, self._attention_layers), strict=True)
            for layer, cache in zip(self._attention_layers, caches, strict=True)
        ]
        keys = xp.cat(parts, dim=1).to("cpu").view(xp.uint8)
        if self.states is None:
            return keys
        return xp.cat([keys, self.states.read_blocks(block_ids)], dim=1)

    def write_blocks(self, block_ids: Sequence[int], data: Tensor) -> None:
        """Write the result of `read_blocks`, of any storage of the same shape.

        The blocks must be unused.
        """
        xp = namespace(self.keys)
        blocks = xp.tensor(block_ids, dtype=xp.int64, device=self.keys.device)
        size = self._kept * self.keys.itemsize
        if self.states is not None:
            self.states.write_blocks(block_ids, data[:, size:])
        values = data[:, :size].contiguous().view(self.keys.dtype).to(self.keys.device)
        first = 0
        for caches in zip(*map(self._of, self._attention_layers), strict=True):
            for layer, cache in zip(self._attention_layers, caches, strict=True):
                shape = (cache.shape[0], *cache.shape[2:])
                part = values[:, first : first + math.prod(shape)].unflatten(1, shape)
                cache[:, self._find_blocks(layer, blocks)] = part.swapaxes(0, 1)
                first += math.prod(shape)

    def _find_blocks(self, layer: int, blocks: Tensor) -> Tensor:
        """Return the units of these blocks that hold a layer."""
        unit = self.places[layer][0]
        return blocks if self.unit_map is None else self.unit_map.units()[unit][blocks]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, kv heads, head_dim] at slots [N]."""
        slots = self._find(layer, slots)
        for cache, rows in zip(self._of(layer), (keys, values), strict=False):
            encoded = self.format.encode(rows).swapaxes(0, 1)
            if self.format.coded:
                places = self.format.places(slots, *cache.shape[2:]).flatten()
                cache.flatten(1).index_copy_(1, places, encoded.flatten(1))
            elif cache.is_contiguous():
                cache.flatten(1, 2).index_copy_(1, slots, encoded)
            else:
                cache[:, slots // self.block_size, slots % self.block_size] = encoded

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values at slots [...] as float32: two of [kv heads, ..., head_dim]."""
        flat = self._find(layer, slots.flatten())
        keys, values = (self._picked(cache, flat) for cache in self._layers[layer])
        shape = (keys.shape[0], *slots.shape, keys.shape[-1])
        return keys.reshape(shape), values.reshape(shape)

    def _picked(self, cache: Tensor, slots: Tensor) -> Tensor:
        if self.format.coded:
            places = self.format.places(slots, *cache.shape[2:])
            kept = cache.flatten(1).index_select(1, places.flatten())
            return self.format.decode(kept.unflatten(1, tuple(places.shape)))
        if cache.is_contiguous():
            return self.format.decode(cache.flatten(1, 2).index_select(1, slots))
        return self.format.decode(cache[:, slots // self.block_size, slots % self.block_size])

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the layer's keys and values themselves: two of [kv heads, slots, row width]."""
        if self.unit_map is not None:
            raise RuntimeError(
                "units have no contiguous slots; plan_memory disables units for flex attention."
            )
        keys, values = self._layers[layer]
        return keys.flatten(1, 2), values.flatten(1, 2)

    def _find(self, layer: int, slots: Tensor) -> Tensor:
        """Return the slots within a layer's units for slots of blocks."""
        if self.unit_map is None:
            return slots
        units = self.unit_map.units()[self.places[layer][0]][slots // self.block_size]
        return units * self.block_size + slots % self.block_size


def _places(spec: ModelSpec, layout: BlockLayout, layers: int) -> list[tuple[int, int]]:
    """Return each layer's unit within a block and index within the unit. Full layers come first."""
    seen = {False: itertools.count(), True: itertools.count(layout.num_full * layers)}
    has_state = spec.state.layers if spec.state is not None else (False,) * spec.num_layers
    return [
        NO_PLACE if of_state else divmod(next(seen[slides]), layers)
        for slides, of_state in zip(_slides(spec, layout), has_state, strict=True)
    ]
