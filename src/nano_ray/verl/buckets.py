"""Weights from the trainer's side to an engine's, bucket by bucket: a description in JSON and one
flat run of bytes.
"""

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
    """A bucket as it travels.

    Attributes:
        description: JSON: names, types and shapes.
        content: uint8 [n]. Ray lays an array as it is into shared memory, where a tensor would be
            copied twice.
    """

    description: bytes
    content: NDArray[np.uint8]


async def parcels(weights: NamedTensors, max_bytes: int) -> AsyncIterator[Parcel]:
    """Tensors as they come, in buckets of at most `max_bytes`; a larger one goes alone. From any
    device.

    Raises `WeightUpdateError` for a tensor of a type that does not travel, or where there is none
    at all.
    """
    cut = _Cut(max_bytes)
    async for name, tensor in _each(weights):
        if (full := cut.add(name, tensor)) is not None:
            yield full
    yield cut.rest()


def opened(parcel: Parcel, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors of a parcel, in memory of their own, checked against the model's table before
    they are made.

    Raises `WeightUpdateError`.
    """
    if parcel.content.dtype != np.uint8:
        raise WeightUpdateError(f"a bucket was described as bytes and is {parcel.content.dtype}.")
    # what came is Ray's, and read-only
    content = torch.from_numpy(parcel.content.copy())
    return opened_bucket(parcel.description, content, shapes)


def parcels_of(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Parcel]:
    """As `parcels`, where nothing is awaited."""
    cut = _Cut(BUCKET_BYTES)
    for name, tensor in weights:
        if (full := cut.add(name, tensor)) is not None:
            yield full
    yield cut.rest()


class _Cut:
    """The bucket that is being filled."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bucket: dict[str, Tensor] = {}
        self._size = 0

    def add(self, name: str, tensor: Tensor) -> Parcel | None:
        """Put a tensor in; returns the bucket before it if that was full."""
        if name in self._bucket:
            raise WeightUpdateError(f"{name!r} came twice in one update.")
        full = None
        if self._bucket and self._size + tensor.nbytes > self._max_bytes:
            full = _parcel(self._bucket)
            self._bucket, self._size = {}, 0
        # the sender may write to it afterwards
        self._bucket[name] = tensor.detach().to("cpu", copy=True)
        self._size += tensor.nbytes
        return full

    def rest(self) -> Parcel:
        """The last bucket."""
        if not self._bucket:
            raise WeightUpdateError("there is nothing to send: the trainer gave no weights.")
        return _parcel(self._bucket)


def _parcel(bucket: dict[str, Tensor]) -> Parcel:
    description, content = flat_bucket(bucket)
    return Parcel(description, content.numpy())


async def _each(weights: NamedTensors) -> AsyncIterator[tuple[str, Tensor]]:
    if isinstance(weights, AsyncIterable):
        async for each in weights:
            yield each
    else:
        for each in weights:
            yield each
