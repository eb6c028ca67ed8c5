"""Kept weight updates, which a new replica needs to get the live weights."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of an update, in Ray's object store.

    Attributes:
        description: JSON with names, types and shapes, as in `nano_ray.verl.buckets.Parcel`.
        content: Reference to the bytes, a uint8 array.
    """

    description: bytes
    content: Any

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors."""
        (pieces,) = json.loads(self.description)["buckets"]
        return frozenset(str(name) for name, *_ in pieces)


@dataclass(frozen=True, slots=True)
class KeptUpdate:
    """Buckets of an update that contain live tensors."""

    version: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Updates that turn the model's own weights into the live version, oldest first.

    A bucket whose tensors are all replaced by later updates is dropped, and Ray frees it.
    """

    updates: tuple[KeptUpdate, ...] = ()

    @property
    def version(self) -> int:
        """Version after all updates. 0: the model's own weights."""
        return self.updates[-1].version if self.updates else 0

    def since(self, version: int) -> tuple[KeptUpdate, ...]:
        """Return the updates that a replica with this version needs."""
        return tuple(update for update in self.updates if update.version > version)

    def after(self, version: int, buckets: Iterable[Bucket]) -> "KeptWeights":
        """Return these updates followed by one with a larger version."""
        newest = KeptUpdate(version, tuple(buckets))
        later = frozenset[str]().union(*(bucket.names for bucket in newest.buckets))
        older: list[KeptUpdate] = []
        for update in reversed(self.updates):
            left = tuple(bucket for bucket in update.buckets if not bucket.names <= later)
            later = later.union(*(bucket.names for bucket in left))
            if left:
                older.append(replace(update, buckets=left))
        return KeptWeights((*reversed(older), newest))
