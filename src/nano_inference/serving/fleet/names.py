"""Names of blocks as the API process makes and sends them; it knows no engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.errors import InvalidRequest
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.news import BlockReport

NAME_BYTES = 32
_POLICY = "policy"


def names_of(
    token_ids: Sequence[int], block_size: int, version: int, salt: str | None = None
) -> tuple[int, ...]:
    """Names of the full blocks of a prompt, as an engine whose weights have this version gives
    them.
    """
    prefix = PrefixKeys(Namespace(_POLICY, version, salt))
    prefix.extend(token_ids, block_size)
    return tuple(prefix.hashes)


def pack_names(names: Sequence[int]) -> bytes:
    """Names one after the other; msgpack has no integers of 256 bits."""
    return b"".join(name.to_bytes(NAME_BYTES, "little") for name in names)


def unpack_names(data: bytes) -> tuple[int, ...]:
    """The names again. Raises `InvalidRequest` where they are cut short."""
    if len(data) % NAME_BYTES:
        raise InvalidRequest(
            f"{len(data)} bytes are no names of blocks, which have {NAME_BYTES} each."
        )
    return tuple(
        int.from_bytes(data[at : at + NAME_BYTES], "little")
        for at in range(0, len(data), NAME_BYTES)
    )


def report_of(said: Mapping[str, Any]) -> BlockReport:
    """What a call of `report_blocks` returned."""
    published, dropped = (
        tuple(memoryview(said[key]).cast("Q")) for key in ("published", "dropped")
    )
    return BlockReport(said["number"], published, dropped, said["whole"])
