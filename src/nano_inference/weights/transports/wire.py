"""Wire format of updates: a JSON description of every bucket is sent first, and checked against the
model before it is used.

A bucket is one flat run of bytes. Its tensors follow each other, each aligned to 16 bytes. A whole
tensor is stored row by row. A patch is stored as int64 indices, then values.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from nano_inference.arrays import Dtype, Tensor, dtype_name, host, namespace
from nano_inference.errors import WeightUpdateError
from nano_inference.fields.options import is_whole
from nano_inference.weights.sources import BUCKET_BYTES, in_groups
from nano_inference.weights.staging import WeightPatch, version_of
from nano_inference.weights.transports.interface import Shapes

FORMAT = 1
ALIGNMENT = 16
RUN_BYTES = 2**23  # bytes per message: a balance between message overhead and overlap
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Description of a tensor of a bucket or, with `count`, of a patch of that many elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int | None = None

    def sizes(self) -> list[int]:
        """Return the size of each stored tensor in bytes."""
        if self.count is not None:
            return [8 * self.count, self.itemsize * self.count]
        return [self.itemsize * math.prod(self.shape)]

    @property
    def itemsize(self) -> int:
        """Size of a number in bytes."""
        return getattr(host, self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        return sum(self.sizes())


@dataclass(frozen=True, slots=True)
class Description:
    """Description of an update, sent before its buckets."""

    version: int | None
    buckets: tuple[tuple[TensorInfo, ...], ...]


Sendable = tuple[TensorInfo, list[Tensor]]  # description and tensors


def sendable(weights: Mapping[str, Tensor] | Iterable[WeightPatch]) -> list[Sendable]:
    """Return tensors by name, or patches, with their descriptions. Raises `WeightUpdateError`."""
    entries: list[Sendable]
    if isinstance(weights, Mapping):
        entries = [
            (
                TensorInfo(name, _known(name, tensor.dtype), tuple(tensor.shape)),
                [tensor.detach().contiguous()],
            )
            for name, tensor in cast(Mapping[str, Tensor], weights).items()
        ]
    else:
        entries = [
            (
                TensorInfo(name, _known(name, values.dtype), (), len(indices)),
                [
                    indices.detach().to(namespace(indices).int64).contiguous(),
                    values.detach().contiguous(),
                ],
            )
            for name, indices, values in weights
        ]
    if not entries:
        raise WeightUpdateError("the update is empty; pass a non-empty state dict or patches.")
    return entries


def cut(sent: list[Sendable], max_bytes: int = BUCKET_BYTES) -> list[list[Sendable]]:
    """Split tensors and patches into buckets of at most `max_bytes`. A larger tensor or patch gets
    its own bucket.
    """
    return list(in_groups(sent, lambda each: num_bytes([each[0]]), max_bytes))


def encode(description: Description) -> bytes:
    """Return the description as JSON."""
    buckets = [
        [[each.name, each.dtype, each.shape, each.count] for each in bucket]
        for bucket in description.buckets
    ]
    return json.dumps(
        {"format": FORMAT, "version": description.version, "buckets": buckets}
    ).encode()


LEAST_BYTES = len(encode(Description(None, ())))


def most_bytes(shapes: Shapes) -> int:
    """Return the maximum size in bytes of a description of an update of the model."""
    return 4096 + sum(256 + 4 * len(name) for name in shapes)


def decode(content: bytes, shapes: Shapes) -> Description:
    """Return a description from its JSON, after checking every name, shape, type and size. Raises
    `WeightUpdateError`.
    """
    try:
        message = json.loads(content)
        if message["format"] != FORMAT:
            raise WeightUpdateError(
                f"the trainer uses format {message['format']!r} of weight updates, not {FORMAT}; "
                "install equal versions of nano-inference."
            )
        version = version_of(message["version"], "the trainer's description")
        buckets = [
            [(str(name), dtype, shape, count) for name, dtype, shape, count in each]
            for each in message["buckets"]
        ]
    except (ValueError, KeyError, TypeError) as problem:
        raise WeightUpdateError(
            f"the trainer's description of its weights cannot be read: {problem!r}"
        ) from problem
    seen: set[str] = set()
    description = Description(
        version, tuple(tuple(_checked(each, shapes, seen) for each in bucket) for bucket in buckets)
    )
    if not seen:
        raise WeightUpdateError("the trainer sent an empty update; send at least one tensor.")
    if any(len({info.count is None for info in bucket}) != 1 for bucket in description.buckets):
        raise WeightUpdateError(
            "the trainer sent a bucket that is empty or mixes tensors and patches."
        )
    return description


def described(
    tensors: Iterable[tuple[str, str, Sequence[int]]], shapes: Shapes, seen: set[str]
) -> list[TensorInfo]:
    """Return checked descriptions of whole tensors, given as (name, dtype, shape) by a trainer.

    `seen` holds the names received earlier in this update, and gets these names. Raises
    `WeightUpdateError`.
    """
    return [
        _checked((name, dtype, list(shape), None), shapes, seen) for name, dtype, shape in tensors
    ]


def num_bytes(bucket: Iterable[TensorInfo]) -> int:
    """Return the length of a bucket in bytes."""
    return sum(_aligned(size) for info in bucket for size in info.sizes())


def runs(size: int) -> Iterator[tuple[int, int]]:
    """Return the ranges [start, stop) in which a bucket of `size` bytes is sent."""
    return ((start, min(start + RUN_BYTES, size)) for start in range(0, size, RUN_BYTES))


def laid_out(bucket: list[Sendable], start: int, stop: int, room: Tensor) -> Tensor:
    """Return bytes [start, stop) of a bucket: a view if they belong to one tensor, otherwise a copy
    in `room`, uint8.
    """
    flat = room[: stop - start]
    at = 0
    for _, tensors in bucket:
        for tensor in tensors:
            end = at + tensor.nbytes
            if at < stop and end > start:
                content = tensor.reshape(-1).view(room.dtype)
                source = content[max(start - at, 0) : stop - at].to(room.device)
                if len(source) == len(flat):
                    return source
                low = max(at - start, 0)
                flat[low : low + len(source)].copy_(source)
            at = _aligned(end)
    return flat


def unpack(bucket: Iterable[TensorInfo], flat: Tensor) -> dict[str, Tensor] | list[WeightPatch]:
    """Return the tensors or patches of a bucket as views of `flat`. No bucket has both."""
    xp = namespace(flat)
    tensors: dict[str, Tensor] = {}
    patches: list[WeightPatch] = []
    start = 0
    for info in bucket:
        views: list[Tensor] = []
        for size in info.sizes():
            views.append(flat[start : start + size])
            start += _aligned(size)
        if info.count is None:
            tensors[info.name] = views[0].view(getattr(xp, info.dtype)).reshape(info.shape)
        else:
            values = views[1].view(getattr(xp, info.dtype))
            patches.append(WeightPatch(info.name, views[0].view(xp.int64), values))
    return tensors or patches


def flat_bucket(bucket: Mapping[str, Tensor]) -> tuple[bytes, Tensor]:
    """Return an update of one bucket as sent: its description, and its bytes, uint8 [n] on the CPU.
    Raises `WeightUpdateError` for a tensor of a dtype that cannot be sent.
    """
    sent = sendable(bucket)
    pieces = tuple(piece for piece, _ in sent)
    size = num_bytes(pieces)
    xp = namespace(sent[0][1][0])
    content = laid_out(sent, 0, size, xp.zeros(size, dtype=xp.uint8))
    return encode(Description(None, (pieces,))), content


def opened_bucket(description: bytes, content: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return the tensors of `flat_bucket`, which share the memory of `content`, after checking them
    against the model's table. Raises `WeightUpdateError`.
    """
    (pieces,) = decode(description, shapes).buckets
    size = num_bytes(pieces)
    kind = dtype_name(content.dtype)
    if kind != "uint8" or content.shape != (size,):
        raise WeightUpdateError(
            f"a bucket described as {size} bytes has type {kind} and shape {list(content.shape)}."
        )
    tensors = unpack(pieces, content)
    if not isinstance(tensors, dict):
        raise WeightUpdateError("the trainer sent patches; send whole tensors.")
    return tensors


def tensor_of(info: TensorInfo, content: Tensor) -> Tensor:
    """Return the tensor stored in these bytes, uint8: a view, or a copy if they are not aligned to
    its dtype.
    """
    if content.data_ptr() % info.itemsize:
        content = content.clone()
    return content.view(getattr(namespace(content), info.dtype)).reshape(info.shape)


def _checked(entry: tuple[str, Any, Any, Any], shapes: Shapes, seen: set[str]) -> TensorInfo:
    name, dtype, shape, count = entry
    known = shapes.get(name)
    if known is None:
        raise WeightUpdateError(
            f"{name!r} is not a tensor of this model; use the names of its checkpoint."
        )
    if name in seen:
        raise WeightUpdateError(f"{name!r} occurs twice in one update; send it once.")
    seen.add(name)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise WeightUpdateError(f"{name!r} has dtype {dtype!r}; use one of {', '.join(DTYPES)}.")
    if count is None:
        if shape != list(known):
            raise WeightUpdateError(f"{name!r} has shape {shape!r}, expected {known}.")
    elif not is_whole(count, 0) or count > math.prod(known):
        raise WeightUpdateError(
            f"the patch of {name!r} has {count!r} elements; it must have 0 to {math.prod(known)}."
        )
    return TensorInfo(name, dtype, known, count)


def _known(name: str, dtype: Dtype) -> str:
    known = dtype_name(dtype)
    if known not in DTYPES:
        raise WeightUpdateError(f"{name!r} has dtype {dtype}; use one of {', '.join(DTYPES)}.")
    return known


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
