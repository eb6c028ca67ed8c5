"""`BlockLink`: the engine's side of exchanging blocks, and their encoding: a header in msgpack,
then keys and values as stored in memory. Nothing is unpickled.
"""

from array import array
from typing import Any

import msgspec
import numpy as np

from nano_inference.arrays import as_host, host
from nano_inference.device.blocks import MOST_BYTES
from nano_inference.engine.block_exchange import BlockExchange, BlockFormat, BlockPiece
from nano_inference.errors import InvalidRequest
from nano_inference.kv_cache.block_hash import Namespace
from nano_inference.remote.directory import NAME_BYTES, pack_names, unpack_names

_MOST_HEADER = 64 << 20  # bytes; a chain of a million tokens needs about 6 MiB


class BlockLink:
    """Engine operations on blocks. No state is kept between calls."""

    def __init__(self, blocks: BlockExchange) -> None:
        self._blocks = blocks

    def count_blocks(self, names: bytes) -> int:
        """Return the number of leading blocks of a chain that this engine holds."""
        return self._blocks.count_blocks(unpack_names(names))

    def export_blocks(
        self, names: bytes, first: int = 0, max_bytes: int = MOST_BYTES
    ) -> bytes | None:
        """Return a piece of a chain as bytes (`BlockExchange.export_blocks`)."""
        if not 0 < max_bytes <= MOST_BYTES or first < 0:
            raise InvalidRequest(
                f"cannot export first={first}, max_bytes={max_bytes}: first must be at least 0 and "
                f"max_bytes from 1 to {MOST_BYTES}."
            )
        piece = self._blocks.export_blocks(unpack_names(names), first, max_bytes)
        return None if piece is None else encode(piece)

    def import_blocks(self, data: bytes) -> int:
        """Import an exported piece. Return the number of the chain's blocks that are here now."""
        return self._blocks.import_blocks(decode(data))

    def report_blocks(self, lost: bool = False) -> dict[str, Any]:
        """Return names that came and went since the last report (`BlockReport`), 8 bytes each."""
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
        """Return the sizes that `FetchCost` needs, and counters. Raises if blocks cannot be
        exported.
        """
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
    """Encode a piece: length of the header (8 bytes, little endian), header, keys and values."""
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
        (len(header).to_bytes(8, "little"), header, as_host(piece.data).contiguous().data)
    )


def decode(data: bytes) -> BlockPiece:
    """Decode a piece. Raises `InvalidRequest` for malformed data."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MOST_HEADER, len(data) - 8):
        raise InvalidRequest(
            f"cannot import blocks: {len(data)} bytes are shorter than their header."
        )
    try:
        header = _DECODER.decode(memoryview(data)[8 : 8 + size])
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"cannot decode the header of blocks: {problem}") from problem
    count, block_bytes, rest = (
        _num_blocks(header),
        _block_bytes(header.format),
        len(data) - 8 - size,
    )
    if rest != header.num_bytes or count * block_bytes != rest:
        raise InvalidRequest(f"expected {count} blocks of {block_bytes} bytes, got {rest} bytes.")
    contents = host.frombuffer(bytearray(memoryview(data)[8 + size :]), dtype=host.uint8)
    return BlockPiece(
        header.format,
        header.namespace,
        unpack_names(header.names),
        tuple(np.frombuffer(header.token_ids, "<i4").tolist()),
        header.first,
        contents.reshape(count, -1),
    )


def _num_blocks(header: _Header) -> int:
    count = len(header.names) // NAME_BYTES - header.first
    token_bytes, version = len(header.token_ids), header.namespace.version
    if count < 1 or header.first < 0 or version < 0 or token_bytes % 4:
        raise InvalidRequest("the header of blocks is inconsistent.")
    return count


def _block_bytes(form: BlockFormat) -> int:
    dtype = getattr(host, form.dtype, None) if form.dtype.isidentifier() else None
    extents = [form.block_size, *(extent for shape in form.shapes for extent in shape)]
    if not isinstance(dtype, np.dtype) or not form.shapes or min(extents) < 1:
        raise InvalidRequest(f"blocks have invalid shapes {form.shapes} or dtype {form.dtype!r}.")
    if any(len(shape) != 5 for shape in form.shapes):
        raise InvalidRequest(f"shapes of blocks must have five dimensions; got {form.shapes}.")
    return form.block_bytes
