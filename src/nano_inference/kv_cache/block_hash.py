"""Names of KV blocks: a chain of SHA-256 hashes over token ids.

The chain starts with everything else that determines a block's contents.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

NO_PREFIX = -1  # the prefix hash of a first block


def adapter_key(name: str, version: int) -> str:
    """Return the `Namespace.adapter` of a version of an adapter."""
    return f"{name}@{version}"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything except token ids that determines the contents of a KV block.

    A namespace is part of the names of its blocks.

    Attributes:
        weight_set: Weight set that computed the block (`"policy"`, `"reference"`, ...).
        version: Version of these weights. Blocks from before an update can therefore never match.
        salt: The request's `cache_salt`.
        adapter: Name and version of an adapter on top of the weights.
    """

    weight_set: str = "policy"
    version: int = 0
    salt: str | None = None
    adapter: str | None = None

    def encode(self) -> bytes:
        """Return an injective encoding.

        Each part follows its length, and None differs from the empty string.
        """
        parts = [self.weight_set.encode(), str(self.version).encode()]
        parts += [
            b"\0" if text is None else b"\1" + text.encode() for text in (self.salt, self.adapter)
        ]
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def compute_block_hash(
    token_ids: Sequence[int], prefix_hash: int = NO_PREFIX, *, extra: bytes = b""
) -> int:
    """Return the hash, a 256-bit integer, of one full block of token ids.

    `prefix_hash` is the hash of the block before it. Pass `extra` (an encoded `Namespace`) only for
    the first block of a chain, since later hashes depend on it.
    """
    if not token_ids:
        raise ValueError("token_ids is empty; a block hash needs at least one token id.")
    digest = hashlib.sha256(extra)
    digest.update(b"root" if prefix_hash == NO_PREFIX else prefix_hash.to_bytes(32, "little"))
    digest.update(array("q", token_ids).tobytes())
    return int.from_bytes(digest.digest(), "little")


class PrefixKeys:
    """The chain of block hashes of one sequence, extended as its token ids become known."""

    __slots__ = ("hashes", "namespace")

    def __init__(self, namespace: Namespace = Namespace(), hashes: Sequence[int] = ()) -> None:
        self.namespace = namespace
        self.hashes = list(hashes)

    def extend(self, token_ids: Sequence[int], block_size: int) -> None:
        """Add the hashes of the full blocks of `token_ids` that have none yet."""
        while (len(self.hashes) + 1) * block_size <= len(token_ids):
            start = len(self.hashes) * block_size
            parent = self.parent(len(self.hashes))
            extra = b"" if self.hashes else self.namespace.encode()
            self.hashes.append(
                compute_block_hash(token_ids[start : start + block_size], parent, extra=extra)
            )

    def parent(self, index: int) -> int:
        """Return the hash of the block before block `index`, or `NO_PREFIX`."""
        return self.hashes[index - 1] if index else NO_PREFIX

    def copy(self) -> "PrefixKeys":
        """Return an independent chain with the same hashes."""
        return PrefixKeys(self.namespace, self.hashes)
