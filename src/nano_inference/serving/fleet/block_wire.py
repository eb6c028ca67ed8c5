"""Blocks as bytes: a header in msgpack, then keys and values as they lie in memory. Nothing here is
ever unpickled.
"""

import math
import sys
from array import array

import msgspec
import torch

from nano_inference.engine.block_exchange import BlockFormat, BlockPiece
from nano_inference.errors import InvalidRequest
from nano_inference.kv_cache.block_hash import Namespace
from nano_inference.serving.fleet.names import NAME_BYTES, pack_names, unpack_names

_MOST_HEADER = 64 << 20  # a chain of a million tokens has one of some 6 MiB


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    numerics: str
    block_size: int
    dtype: str
    shapes: tuple[tuple[int, int, int, int, int], ...]
    weight_set: str
    version: int
    salt: str | None
    adapter: str | None
    names: bytes
    token_ids: bytes
    first: int
    num_bytes: int


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Header)


def encode(piece: BlockPiece) -> bytes:
    """Length of the header (8 bytes, little endian), header, keys and values."""
    form, space = piece.format, piece.namespace
    header = _ENCODER.encode(
        _Header(
            numerics=form.numerics,
            block_size=form.block_size,
            dtype=form.dtype,
            shapes=form.shapes,  # pyright: ignore[reportArgumentType]
            weight_set=space.weight_set,
            version=space.version,
            salt=space.salt,
            adapter=space.adapter,
            names=pack_names(piece.names),
            token_ids=_swapped(array("i", piece.token_ids)).tobytes(),
            first=piece.first,
            num_bytes=piece.data.numel(),
        )
    )
    return b"".join(
        (len(header).to_bytes(8, "little"), header, piece.data.contiguous().numpy().data)
    )


def decode(data: bytes) -> BlockPiece:
    """The piece that was encoded; its tensor reads the bytes themselves. Raises `InvalidRequest`
    for anything else.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MOST_HEADER, len(data) - 8):
        raise InvalidRequest(
            f"{len(data)} bytes are no blocks: they are shorter than their header."
        )
    try:
        header = _DECODER.decode(memoryview(data)[8 : 8 + size])
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"the header of blocks was not understood: {problem}") from problem
    count, rest = _num_blocks(header), len(data) - 8 - size
    if rest != header.num_bytes or count * _block_bytes(header) != rest:
        raise InvalidRequest(f"{rest} bytes came for {count} blocks of {_block_bytes(header)}.")
    token_ids = array("i")
    token_ids.frombytes(header.token_ids)
    contents = torch.frombuffer(bytearray(memoryview(data)[8 + size :]), dtype=torch.uint8)
    return BlockPiece(
        BlockFormat(header.numerics, header.block_size, header.dtype, header.shapes),
        Namespace(header.weight_set, header.version, header.salt, header.adapter),
        unpack_names(header.names),
        tuple(_swapped(token_ids)),
        header.first,
        contents.view(count, -1),
    )


def _num_blocks(header: _Header) -> int:
    count = len(header.names) // NAME_BYTES - header.first
    if count < 1 or header.first < 0 or header.version < 0 or len(header.token_ids) % 4:
        raise InvalidRequest("the header of blocks contradicts itself.")
    return count


def _block_bytes(header: _Header) -> int:
    dtype = getattr(torch, header.dtype, None) if header.dtype.isidentifier() else None
    counts = [header.block_size, *(extent for shape in header.shapes for extent in shape)]
    if not isinstance(dtype, torch.dtype) or not header.shapes or min(counts) < 1:
        raise InvalidRequest(
            f"blocks of shapes {header.shapes} in {header.dtype!r}: there are none such."
        )
    return dtype.itemsize * sum(map(math.prod, header.shapes))


def _swapped(numbers: "array[int]") -> "array[int]":
    if sys.byteorder != "little":
        numbers.byteswap()
    return numbers
