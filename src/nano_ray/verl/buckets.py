"""Buckets of weights from a trainer to an engine: a JSON description and a flat byte array."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.weights import BUCKET_BYTES
from nano_inference.weights.transports import Shapes, flat_bucket, opened_bucket

NamedTensors = Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]]


class Parcel(NamedTuple):
    """A serialized bucket.

    Attributes:
        description: JSON with names, types and shapes.
        content: Bytes, uint8 [n]. Ray copies an array into shared memory once, a tensor twice.
    """

    description: bytes
    content: NDArray[np.uint8]


async def parcels(weights: NamedTensors, max_bytes: int) -> AsyncIterator[Parcel]:
    """Yield tensors from any device in buckets of at most `max_bytes`. A larger tensor gets its own
    bucket.

    Raises `WeightUpdateError` for an unsupported dtype, or if there are no tensors.
    """
    cut = _Cut(max_bytes)
    async for name, tensor in _each(weights):
        if (full := cut.add(name, tensor)) is not None:
            yield full
    yield cut.rest()


def opened(parcel: Parcel, shapes: Shapes) -> dict[str, Tensor]:
    """Check a parcel against the model's shapes and copy its tensors out.

    Raises `WeightUpdateError`.
    """
    if parcel.content.dtype != np.uint8:
        raise WeightUpdateError(
            f"the content of a bucket must be uint8; got {parcel.content.dtype}."
        )
    # the array belongs to Ray and is read-only
    content = torch.from_numpy(parcel.content.copy())
    return opened_bucket(parcel.description, content, shapes)


def parcels_of(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Parcel]:
    """Yield parcels like `parcels`, synchronously."""
    cut = _Cut(BUCKET_BYTES)
    for name, tensor in weights:
        if (full := cut.add(name, tensor)) is not None:
            yield full
    yield cut.rest()


class _Cut:
    """Builder of buckets of limited size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bucket: dict[str, Tensor] = {}
        self._size = 0

    def add(self, name: str, tensor: Tensor) -> Parcel | None:
        """Add a tensor. Return the previous bucket if it was full."""
        if name in self._bucket:
            raise WeightUpdateError(f"an update contains {name!r} twice; send each tensor once.")
        full = None
        if self._bucket and self._size + tensor.nbytes > self._max_bytes:
            full = _parcel(self._bucket)
            self._bucket, self._size = {}, 0
        # the sender may modify the tensor afterwards
        self._bucket[name] = tensor.detach().to("cpu", copy=True)
        self._size += tensor.nbytes
        return full

    def rest(self) -> Parcel:
        """Return the last bucket."""
        if not self._bucket:
            raise WeightUpdateError("the update is empty; send at least one tensor.")
        return _parcel(self._bucket)


def _parcel(bucket: dict[str, Tensor]) -> Parcel:
    description, content = flat_bucket(bucket)
    return Parcel(description, content.numpy())


async def _each(weights: NamedTensors) -> AsyncIterator[tuple[str, Tensor]]:
    if isinstance(weights, AsyncIterable):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair
