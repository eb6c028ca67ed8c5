"""`BlockLink`: the engine process's end of an exchange of blocks. Every call is a whole: nothing is
kept between.
"""

from array import array
from typing import Any

from nano_inference.engine.block_exchange import MOST_BYTES, BlockExchange
from nano_inference.errors import InvalidRequest
from nano_inference.serving.fleet.block_wire import decode, encode
from nano_inference.serving.fleet.names import unpack_names


class BlockLink:
    """What the other side of the messages may ask of an engine's blocks."""

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
        """What the other side must know to decide what is worth fetching. Raises what keeps blocks
        from leaving.
        """
        self._blocks.require_enabled()
        form = self._blocks.format
        return {
            "block_size": form.block_size,
            "block_bytes": form.block_bytes,
            "exported": self._blocks.num_exported,
            "imported": self._blocks.num_imported,
        }
