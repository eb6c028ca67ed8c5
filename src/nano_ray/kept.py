"""What a new replica must receive to serve the weights that the others serve."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of an update, in Ray's object store.

    Attributes:
        description: JSON: names, types and shapes, as in `nano_ray.verl.buckets.Parcel`.
        content: reference to the bytes, a uint8 array.
    """

    description: bytes
    content: Any

    @property
    def names(self) -> frozenset[str]:
        """Of its tensors."""
        (pieces,) = json.loads(self.description)["buckets"]
        return frozenset(str(name) for name, *_ in pieces)


@dataclass(frozen=True, slots=True)
class KeptUpdate:
    """What of an update still serves."""

    version: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """The updates that together make the version which serves out of the model's own weights,
    oldest first.

    A bucket that later ones bring anew is let go of, and Ray frees it.
    """

    updates: tuple[KeptUpdate, ...] = ()

    @property
    def version(self) -> int:
        """That they make; 0: the model's own."""
        return self.updates[-1].version if self.updates else 0

    def since(self, version: int) -> tuple[KeptUpdate, ...]:
        """What a replica that has this version must receive."""
        return tuple(update for update in self.updates if update.version > version)

    def after(self, version: int, buckets: Iterable[Bucket]) -> "KeptWeights":
        """These, and an update of a larger version behind them."""
        newest = KeptUpdate(version, tuple(buckets))
        later = frozenset[str]().union(*(bucket.names for bucket in newest.buckets))
        older: list[KeptUpdate] = []
        for update in reversed(self.updates):
            left = tuple(bucket for bucket in update.buckets if not bucket.names <= later)
            later = later.union(*(bucket.names for bucket in left))
            if left:
                older.append(replace(update, buckets=left))
        return KeptWeights((*reversed(older), newest))
