"""`StateStorage`: memory of layers with a state, next to the keys and values of the same blocks."""

import itertools
import math
from collections.abc import Sequence
from functools import partial

from nano_inference.arrays import Device, Dtype, Tensor, namespace
from nano_inference.device.units import UnitMap
from nano_inference.models.spec.states import StateColumn, StateSpec
from nano_inference.ops.cpu.memory import reserve
from nano_inference.ops.interface import TensorArena


def state_bytes(spec: StateSpec, block_size: int, dtype: Dtype) -> int:
    """Return the bytes that a model's layers with a state store per block."""
    numbers = sum(
        math.prod(_shape(column, block_size)) * _dtype(column, dtype).itemsize
        for column in spec.columns.values()
    )
    return sum(spec.layers) * numbers


class StateStorage:
    """Storage with one tensor per column, [layers, units, (block_size,) *shape]. A `StateView`.

    Args:
        spec: Specification of the layers.
        num_blocks: Number of block ids.
        block_size: Tokens per block.
        dtype: Dtype of the model.
        device: Device of the model.
        units: Table of each block's unit, or None if a block is its unit.
        arena: Memory of the tensors. None: new memory of the device.

    Attributes:
        tensors: Tensors by column.
        num_blocks, num_units: Numbers of block ids and of units.
        window: Number of tokens that a row reads, including its own.
    """

    def __init__(
        self,
        spec: StateSpec,
        num_blocks: int,
        block_size: int,
        dtype: Dtype,
        device: Device,
        units: UnitMap | None = None,
        arena: TensorArena | None = None,
    ) -> None:
        take = partial(reserve, device=device) if arena is None else arena.take
        self.spec, self.block_size, self.unit_map = spec, block_size, units
        self.num_blocks, self.window = num_blocks, spec.window(block_size)
        self.num_units = num_blocks if units is None else units.num_units
        nth = itertools.count()
        self.places = {layer: next(nth) for layer, has_state in enumerate(spec.layers) if has_state}
        sizes = (len(self.places), self.num_units)
        # Not initialized, like keys and values.
        self.tensors = {
            name: take((*sizes, *_shape(column, block_size)), _dtype(column, dtype))
            for name, column in spec.columns.items()
        }

    def column(self, layer: int, name: str) -> Tensor:
        """Return a layer's column itself: [units, ...]."""
        return self.tensors[name][self.places[layer]]

    def unit_row(self) -> Tensor | None:
        """Return the unit of each block, int64 [blocks], or None if a block is its unit."""
        return None if self.unit_map is None else self.unit_map.units()[0]

    def units_of(self, blocks: Tensor) -> Tensor:
        """Return the current units of blocks [...]."""
        return blocks if self.unit_map is None else self.unit_map.units()[0][blocks]

    def write(self, layer: int, name: str, slots: Tensor, values: Tensor) -> None:
        """Store a per-token column's values [N, ...] at slots [N]."""
        tokens = self._tokens(layer, name)
        tokens.index_copy_(0, self._slots(slots), values.to(tokens.dtype))

    def gather(self, layer: int, name: str, slots: Tensor) -> Tensor:
        """Return a per-token column's values at slots [...]: float32 [..., *column shape]."""
        tokens = self._tokens(layer, name)
        values = tokens.index_select(0, self._slots(slots.flatten())).float()
        return values.unflatten(0, slots.shape)

    def read_state(self, layer: int, blocks: Tensor) -> Tensor:
        """Return the column "state" of blocks [N], float32 [N, *shape]."""
        return self.column(layer, "state")[self.units_of(blocks)].float()

    def write_state(self, layer: int, blocks: Tensor, state: Tensor) -> None:
        """Store the column "state" of blocks [N]."""
        self.column(layer, "state")[self.units_of(blocks)] = state

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks. No target may be a source."""
        sources, targets = self.units_of(sources), self.units_of(targets)
        for tensor in self.tensors.values():
            tensor[:, targets] = tensor[:, sources]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in `read_blocks`."""
        return sum(tensor[:, 0].nbytes for tensor in self.tensors.values())

    def read_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """Copy whole blocks to the host: uint8 [blocks, bytes of a block]."""
        parts: list[Tensor] = []
        xp = namespace(next(iter(self.tensors.values())))
        for tensor in self.tensors.values():
            units = self.units_of(xp.tensor(block_ids, dtype=xp.int64, device=tensor.device))
            whole = tensor[:, units].swapaxes(0, 1).to("cpu").contiguous()
            parts.append(whole.flatten(1).view(xp.uint8))
        return xp.cat(parts, dim=1)

    def write_blocks(self, block_ids: Sequence[int], data: Tensor) -> None:
        """Write the result of `read_blocks`, of any storage with the same columns."""
        sizes = [tensor[:, 0].nbytes for tensor in self.tensors.values()]
        for tensor, part in zip(self.tensors.values(), data.split(sizes, dim=1), strict=True):
            xp = namespace(tensor)
            units = self.units_of(xp.tensor(block_ids, dtype=xp.int64, device=tensor.device))
            values = part.contiguous().view(tensor.dtype)
            shape = (len(block_ids), len(tensor), *tensor.shape[2:])
            tensor[:, units] = values.reshape(shape).swapaxes(0, 1).to(tensor.device)

    def _tokens(self, layer: int, name: str) -> Tensor:
        return self.column(layer, name).flatten(0, 1)  # [slots of units, ...]

    def _slots(self, slots: Tensor) -> Tensor:
        return self.units_of(slots // self.block_size) * self.block_size + slots % self.block_size


def _shape(column: StateColumn, block_size: int) -> tuple[int, ...]:
    return (block_size, *column.shape) if column.per_token else column.shape


def _dtype(column: StateColumn, dtype: Dtype) -> Dtype:
    return namespace(dtype).float32 if column.keep_float32 else dtype
