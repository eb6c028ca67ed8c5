"""Recorded operations: the entries of a program, and the memory of the buffers that they read and
write.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nano_inference.arrays import Dtype, Tensor, has_dtype
from nano_inference.ops.cpu.library import struct
from nano_inference.ops.interface import Joint
from nano_inference.ops.rowwise import Norm

EMBED, LINEAR, NORM, ROPE_AND_STORE, ATTENTION, GATE, MEET, LORA = range(8)  # Kind of program.h
CALL = -1  # a Python call between two runs of C++ operations
STORE, ADD, SILU, GELU, CLAMPED = range(5)  # Finish of linear.h
GATES = {"silu": SILU, "gelu_tanh": GELU, "clamped_swiglu": CLAMPED}
Op, Segments, NormWeight = struct("Op"), struct("Segments"), struct("NormWeight")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Placeholder for a tensor [N, columns] of a step, or for some columns of one."""

    index: int
    columns: int
    dtype: Dtype
    first: int = 0  # first of these columns in the tensor
    of: int | None = None  # number of columns of the tensor, if this is a part of one

    @property
    def row_bytes(self) -> int:
        """Bytes per row of the whole tensor."""
        return (self.columns if self.of is None else self.of) * self.dtype.itemsize


class Window(NamedTuple):
    """Parameters of an attention plan. Layers with equal parameters share the plan of a step."""

    window: int
    scale: float
    cap: float
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass
class Operation:
    """One entry of a program. `values` are fields of `Op` in program.h."""

    kind: int
    inputs: tuple[Buffer, ...]
    output: Buffer
    residual: Buffer | None = None  # read, and written if the operation adds to it
    weight: Any = None  # a `PackedWeight`
    bias: Tensor | None = None
    norms: tuple[Norm | None, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    function: Joint | None = None  # CALL

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers that the operation reads or writes, each once."""
        residual = () if self.residual is None else (self.residual,)
        return tuple(dict.fromkeys((*self.inputs, self.output, *residual)))


def place_buffers(
    operations: Sequence[Operation], kept: Sequence[Buffer]
) -> tuple[dict[int, int], list[int]]:
    """Assign buffers to pieces of memory. Return the piece of each buffer, and the bytes per row of
    each piece.

    A piece is reused after the last read of its buffer. Buffers in `kept` have a piece of their
    own.
    """
    last: dict[int, int] = {}
    for step, operation in enumerate(operations):
        last |= {buffer.index: step for buffer in operation.buffers}
    places: dict[int, int] = {}
    sizes: list[int] = []
    free: dict[int, list[int]] = {}

    def place(buffer: Buffer) -> None:
        if buffer.index in places:
            return
        if free.get(buffer.row_bytes):
            places[buffer.index] = free[buffer.row_bytes].pop()
            return
        places[buffer.index] = len(sizes)
        sizes.append(buffer.row_bytes)

    for buffer in kept:
        place(buffer)
    keep = {buffer.index for buffer in kept}
    for step, operation in enumerate(operations):
        for buffer in operation.buffers:
            place(buffer)
        for buffer in operation.buffers:
            if last[buffer.index] == step and buffer.index not in keep:
                free.setdefault(buffer.row_bytes, []).append(places[buffer.index])
    return places, sizes


def to_struct(operation: Operation, places: dict[int, int]) -> Any:
    """Return the entry that C++ reads. Its pointers are valid as long as the tensors of `operation`
    live.
    """
    entry = Op(
        kind=operation.kind,
        input=-1,
        output=places[operation.output.index],
        residual=-1,
        **operation.values,
    )
    if operation.inputs:
        entry.input = places[operation.inputs[0].index]
        entry.first_column = operation.inputs[0].first
    if operation.residual is not None:
        entry.residual = places[operation.residual.index]
    if operation.weight is not None:
        entry.weight = operation.weight.data_ptr()
    if operation.bias is not None:
        entry.bias = operation.bias.data_ptr()
    for slot, norm in zip(("norm", "key_norm", "value_norm"), operation.norms, strict=False):
        if norm is None:
            continue
        assert norm.weight is not None
        is_float = has_dtype(norm.weight, "float32")
        setattr(
            entry,
            slot,
            NormWeight(norm.weight.data_ptr(), len(norm.weight), is_float, norm.eps, norm.offset),
        )
    return entry
