"""`BlockLink`: the engine's end of an exchange of blocks, and blocks as bytes: a header in msgpack,
then keys and values as they lie in memory. Nothing here is ever unpickled.
"""

from array import array
from typing import Any

import msgspec
import numpy as np
import torch

from nano_inference.device.blocks import MOST_BYTES
from nano_inference.engine.block_exchange import BlockExchange, BlockFormat, BlockPiece
from nano_inference.errors import InvalidRequest
from nano_inference.kv_cache.block_hash import Namespace
from nano_inference.remote.directory import NAME_BYTES, pack_names, unpack_names

_MOST_HEADER = 64 << 20  # a chain of a million tokens has one of some 6 MiB


class BlockLink:
    """Engine operations on blocks. Each call stands alone: no state is kept between two."""

    def __init__(self, blocks: BlockExchange) -> None:
        self._blocks = blocks

    def count_blocks(self, names: bytes) -> int:
        """How many blocks at the head of a chain are here."""
        return self._blocks.count_blocks(unpack_names(names))

    def export_blocks(
        self, names: bytes, first: int = 0, max_bytes: int = MOST_BYTES
    ) -> bytes | None:
        """A piece of a chain (`BlockExchange.export_blocks`) as bytes."""
        if not 0 < max_bytes <= MOST_BYTES or first < 0:
            raise InvalidRequest(
                f"first={first} and max_bytes={max_bytes}: at most {MOST_BYTES} bytes at a time."
            )
        piece = self._blocks.export_blocks(unpack_names(names), first, max_bytes)
        return None if piece is None else encode(piece)

    def import_blocks(self, data: bytes) -> int:
        """Take such a piece in; returns how many blocks of the chain are here now."""
        return self._blocks.import_blocks(decode(data))

    def report_blocks(self, lost: bool = False) -> dict[str, Any]:
        """Names that came and went since the last report (`BlockReport`), eight bytes each."""
        report = self._blocks.report(lost)
        published, dropped = (
            array("Q", names).tobytes() for names in (report.published, report.dropped)
        )
        return {
            "number": report.number,
            "published": published,
            "dropped": dropped,
            "whole": report.whole,
        }

    def describe_blocks(self) -> dict[str, Any]:
        """Sizes that `FetchCost` needs, and counters. Raises what keeps blocks from leaving."""
        self._blocks.require_enabled()
        form = self._blocks.format
        return {
            "block_size": form.block_size,
            "block_bytes": form.block_bytes,
            "exported": self._blocks.num_exported,
            "imported": self._blocks.num_imported,
        }


# -- blocks as bytes -------------------------------------------------------------------------------


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: BlockFormat
    namespace: Namespace
    names: bytes
    token_ids: bytes
    first: int
    num_bytes: int


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Header)


def encode(piece: BlockPiece) -> bytes:
    """Length of the header (8 bytes, little endian), header, keys and values."""
    header = _ENCODER.encode(
        _Header(
            format=piece.format,
            namespace=piece.namespace,
            names=pack_names(piece.names),
            token_ids=np.array(piece.token_ids, "<i4").tobytes(),
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
    count, block_bytes, rest = (
        _num_blocks(header),
        _block_bytes(header.format),
        len(data) - 8 - size,
    )
    if rest != header.num_bytes or count * block_bytes != rest:
        raise InvalidRequest(f"{rest} bytes came for {count} blocks of {block_bytes}.")
    contents = torch.frombuffer(bytearray(memoryview(data)[8 + size :]), dtype=torch.uint8)
    return BlockPiece(
        header.format,
        header.namespace,
        unpack_names(header.names),
        tuple(np.frombuffer(header.token_ids, "<i4").tolist()),
        header.first,
        contents.view(count, -1),
    )


def _num_blocks(header: _Header) -> int:
    count = len(header.names) // NAME_BYTES - header.first
    token_bytes, version = len(header.token_ids), header.namespace.version
    if count < 1 or header.first < 0 or version < 0 or token_bytes % 4:
        raise InvalidRequest("the header of blocks contradicts itself.")
    return count


def _block_bytes(form: BlockFormat) -> int:
    dtype = getattr(torch, form.dtype, None) if form.dtype.isidentifier() else None
    extents = [form.block_size, *(extent for shape in form.shapes for extent in shape)]
    if not isinstance(dtype, torch.dtype) or not form.shapes or min(extents) < 1:
        raise InvalidRequest(
            f"blocks of shapes {form.shapes} in {form.dtype!r}: there are none such."
        )
    if any(len(shape) != 5 for shape in form.shapes):
        raise InvalidRequest(f"blocks of shapes {form.shapes}: each has five extents.")
    return form.block_bytes
