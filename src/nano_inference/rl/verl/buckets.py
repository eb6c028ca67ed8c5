"""Weights from the trainer's side to an engine's, bucket by bucket: a description in JSON and one flat run of bytes."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nano_inference.engine.transports import wire
from nano_inference.engine.transports.interface import Shapes
from nano_inference.errors import WeightUpdateError

NamedTensors = Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]]


class Parcel(NamedTuple):
    """A bucket as it travels.

    Attributes:
        description: JSON: names, types and shapes.
        content: uint8 [n]. Ray lays an array as it is into shared memory, where a tensor would be copied twice.
    """

    description: bytes
    content: NDArray[np.uint8]


async def parcels(weights: NamedTensors, max_bytes: int) -> AsyncIterator[Parcel]:
    """Tensors as they come, in buckets of at most `max_bytes`; a larger one goes alone. From any device.

    Raises `WeightUpdateError` for a tensor of a type that does not travel, or where there is none at all.
    """
    bucket: dict[str, Tensor] = {}
    size = count = 0
    async for name, tensor in _each(weights):
        if name in bucket:
            raise WeightUpdateError(f"{name!r} came twice in one update.")
        if bucket and size + tensor.nbytes > max_bytes:
            yield _parcel(bucket)
            bucket, size = {}, 0
        bucket[name] = tensor.detach().to("cpu", copy=True)  # whoever yields it may write to it afterwards
        size += tensor.nbytes
        count += 1
    if not count:
        raise WeightUpdateError("there is nothing to send: the trainer gave no weights.")
    yield _parcel(bucket)


def opened(parcel: Parcel, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors of a parcel, in memory of their own, checked against the model's table before they are made.

    Raises `WeightUpdateError`.
    """
    (pieces,) = wire.decode(parcel.description, shapes).buckets
    size = wire.num_bytes(pieces)
    if parcel.content.dtype != np.uint8 or parcel.content.shape != (size,):
        is_of = f"{parcel.content.dtype} {list(parcel.content.shape)}"
        raise WeightUpdateError(f"a bucket that was described as {size} bytes is {is_of}.")
    tensors = wire.unpack(pieces, torch.from_numpy(parcel.content.copy()))  # what came is Ray's, and read-only
    if not isinstance(tensors, dict):
        raise WeightUpdateError("the trainer sent patches; whole tensors are expected.")
    return tensors


def _parcel(bucket: dict[str, Tensor]) -> Parcel:
    sendable = wire.sendable(bucket)
    pieces = tuple(piece for piece, _ in sendable)
    size = wire.num_bytes(pieces)
    content = wire.laid_out(sendable, 0, size, torch.zeros(size, dtype=torch.uint8))
    return Parcel(wire.encode(wire.Plan(None, (pieces,))), content.numpy())


async def _each(weights: NamedTensors) -> AsyncIterator[tuple[str, Tensor]]:
    if isinstance(weights, AsyncIterable):
        async for each in weights:
            yield each
    else:
        for each in weights:
            yield each
