"""Names of KV blocks: a chain of SHA-256 over token ids, rooted in everything else that decides a
block's contents.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

NO_PREFIX = -1  # the first seed's default; only this module's edge knows it


def adapter_key(name: str, version: int) -> str:
    """What a `Namespace` calls a version of an adapter."""
    return f"{name}@{version}"


@dataclass(frozen=True, slots=True)
class Namespace:
    """What besides token ids decides the contents of a KV block: part of every block's identity.

    Attributes:
        weight_set: which weights computed it (`"policy"`, `"reference"` …).
        version: the version of those weights. An update can therefore never make an old block
            match.
        salt: the request's `cache_salt`.
        adapter: name and version of an adapter on top of the weights.
    """

    weight_set: str = "policy"
    version: int = 0
    salt: str | None = None
    adapter: str | None = None

    def encode(self) -> bytes:
        """An injective encoding: each part is preceded by its length, and None differs from the
        empty string.
        """
        parts = [self.weight_set.encode(), str(self.version).encode()]
        parts += [
            b"\0" if text is None else b"\1" + text.encode() for text in (self.salt, self.adapter)
        ]
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def compute_block_hash(
    token_ids: Sequence[int], prefix_hash: int = NO_PREFIX, *, extra: bytes = b""
) -> int:
    """Hash of one full block of token ids after the block named `prefix_hash`: a 256-bit integer.

    `extra` (an encoded `Namespace`) belongs into the first block of a chain; the chain carries it
    on.
    """
    if not token_ids:
        raise ValueError("a block hash needs at least one token id.")
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
        """Add the hashes of blocks that `token_ids` fills and that are not named yet."""
        while (len(self.hashes) + 1) * block_size <= len(token_ids):
            start = len(self.hashes) * block_size
            parent = self.parent(len(self.hashes))
            extra = b"" if self.hashes else self.namespace.encode()
            self.hashes.append(
                compute_block_hash(token_ids[start : start + block_size], parent, extra=extra)
            )

    def parent(self, index: int) -> int:
        """Hash of the block before block `index`, or `NO_PREFIX`."""
        return self.hashes[index - 1] if index else NO_PREFIX

    def copy(self) -> "PrefixKeys":
        """An independent chain with the same past."""
        return PrefixKeys(self.namespace, self.hashes)
