"""What goes ahead of the bytes: a description of every bucket in JSON, checked against the model
before it is used.

A bucket is one flat run of bytes. Its tensors lie one after the other, each from a multiple of 16
on: whole tensors row by row; of a patch the int64 indices, then the values.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.fields.options import is_whole
from nano_inference.weights.sources import BUCKET_BYTES, in_groups
from nano_inference.weights.staging import WeightPatch, version_of
from nano_inference.weights.transports.interface import Shapes

FORMAT = 1
ALIGNMENT = 16
RUN_BYTES = 2**23  # that travel at once: fewer cost more messages, more leave less to do meanwhile
DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a bucket, or with `count` a patch of so many numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    count: int | None = None

    def sizes(self) -> list[int]:
        """Bytes of its tensors."""
        if self.count is not None:
            return [8 * self.count, self.dtype.itemsize * self.count]
        return [self.dtype.itemsize * torch.Size(self.shape).numel()]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.sizes())


@dataclass(frozen=True, slots=True)
class Description:
    """An update as it will travel."""

    version: int | None
    buckets: tuple[tuple[TensorInfo, ...], ...]


Sendable = tuple[TensorInfo, list[Tensor]]  # what describes it, and its tensors


def sendable(weights: Mapping[str, Tensor] | Iterable[WeightPatch]) -> list[Sendable]:
    """Tensors by name, or patches, with what describes them. Raises `WeightUpdateError`."""
    found: list[Sendable]
    if isinstance(weights, Mapping):
        found = [
            (
                TensorInfo(name, _known(name, tensor.dtype), tuple(tensor.shape)),
                [tensor.detach().contiguous()],
            )
            for name, tensor in cast(Mapping[str, Tensor], weights).items()
        ]
    else:
        found = [
            (
                TensorInfo(name, _known(name, values.dtype), (), len(indices)),
                [indices.detach().to(torch.int64).contiguous(), values.detach().contiguous()],
            )
            for name, indices, values in weights
        ]
    if not found:
        raise WeightUpdateError(
            "there is nothing to send: weights must be a non-empty state dict or patches."
        )
    return found


def cut(sent: list[Sendable], max_bytes: int = BUCKET_BYTES) -> list[list[Sendable]]:
    """Tensors and patches in buckets of at most `max_bytes`; a larger one goes alone."""
    return list(in_groups(sent, lambda each: num_bytes([each[0]]), max_bytes))


def encode(description: Description) -> bytes:
    """The description as JSON."""
    buckets = [
        [[each.name, DTYPE_NAMES[each.dtype], each.shape, each.count] for each in bucket]
        for bucket in description.buckets
    ]
    return json.dumps(
        {"format": FORMAT, "version": description.version, "buckets": buckets}
    ).encode()


LEAST_BYTES = len(encode(Description(None, ())))


def most_bytes(shapes: Shapes) -> int:
    """Longer than this no description of an update of the model is."""
    return 4096 + sum(256 + 4 * len(name) for name in shapes)


def decode(content: bytes, shapes: Shapes) -> Description:
    """A description from its JSON, with every name, shape, type and size checked. Raises
    `WeightUpdateError`.
    """
    try:
        told = json.loads(content)
        if told["format"] != FORMAT:
            raise WeightUpdateError(
                f"the trainer speaks format {told['format']!r} of weight updates, not {FORMAT}."
            )
        version = version_of(told["version"], "the trainer's description")
        buckets = [
            [(str(name), dtype, shape, count) for name, dtype, shape, count in each]
            for each in told["buckets"]
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
        raise WeightUpdateError("the trainer sent an update of no tensors.")
    if any(len({info.count is None for info in bucket}) != 1 for bucket in description.buckets):
        raise WeightUpdateError(
            "the trainer sent a bucket that is empty, or of both tensors and patches."
        )
    return description


def described(
    told: Iterable[tuple[str, str, Sequence[int]]], shapes: Shapes, seen: set[str]
) -> list[TensorInfo]:
    """Whole tensors that a trainer describes by (name, dtype, shape), checked against the model.

    `seen` has the names that came before in this update, and gets theirs. Raises
    `WeightUpdateError`.
    """
    return [_checked((name, dtype, list(shape), None), shapes, seen) for name, dtype, shape in told]


def num_bytes(bucket: Iterable[TensorInfo]) -> int:
    """Length of a bucket."""
    return sum(_aligned(size) for info in bucket for size in info.sizes())


def runs(size: int) -> Iterator[tuple[int, int]]:
    """A bucket of `size` bytes as it travels: [start, stop) by [start, stop)."""
    return ((start, min(start + RUN_BYTES, size)) for start in range(0, size, RUN_BYTES))


def laid_out(bucket: list[Sendable], start: int, stop: int, room: Tensor) -> Tensor:
    """Bytes [start, stop) of a bucket: where they lie if they are of one tensor, else copied into
    `room`, uint8.
    """
    flat = room[: stop - start]
    at = 0
    for _, tensors in bucket:
        for tensor in tensors:
            end = at + tensor.nbytes
            if at < stop and end > start:
                source = (
                    tensor.view(-1)
                    .view(torch.uint8)[max(start - at, 0) : stop - at]
                    .to(room.device)
                )
                if len(source) == len(flat):
                    return source
                low = max(at - start, 0)
                flat[low : low + len(source)].copy_(source)
            at = _aligned(end)
    return flat


def unpack(bucket: Iterable[TensorInfo], flat: Tensor) -> dict[str, Tensor] | list[WeightPatch]:
    """The tensors of a bucket: views of `flat`. Patches come alone: no bucket has both."""
    tensors: dict[str, Tensor] = {}
    patches: list[WeightPatch] = []
    start = 0
    for info in bucket:
        views: list[Tensor] = []
        for size in info.sizes():
            views.append(flat[start : start + size])
            start += _aligned(size)
        if info.count is None:
            tensors[info.name] = views[0].view(info.dtype).view(info.shape)
        else:
            patches.append(
                WeightPatch(info.name, views[0].view(torch.int64), views[1].view(info.dtype))
            )
    return tensors or patches


def flat_bucket(bucket: Mapping[str, Tensor]) -> tuple[bytes, Tensor]:
    """Return an update of one bucket as it travels: its description, and uint8 [n] on the CPU.
    Raises `WeightUpdateError` for a tensor of a type that does not travel.
    """
    sent = sendable(bucket)
    pieces = tuple(piece for piece, _ in sent)
    size = num_bytes(pieces)
    content = laid_out(sent, 0, size, torch.zeros(size, dtype=torch.uint8))
    return encode(Description(None, (pieces,))), content


def opened_bucket(description: bytes, content: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return the tensors of `flat_bucket`, which share the memory of `content`, checked against the
    model's table before they are made. Raises `WeightUpdateError`.
    """
    (pieces,) = decode(description, shapes).buckets
    size = num_bytes(pieces)
    if content.dtype != torch.uint8 or content.shape != (size,):
        kind = str(content.dtype).removeprefix("torch.")
        raise WeightUpdateError(
            f"a bucket that was described as {size} bytes is {kind} {list(content.shape)}."
        )
    tensors = unpack(pieces, content)
    if not isinstance(tensors, dict):
        raise WeightUpdateError("the trainer sent patches; whole tensors are expected.")
    return tensors


def tensor_of(info: TensorInfo, content: Tensor) -> Tensor:
    """The tensor whose bytes these are, uint8: a view, or a copy where they do not begin at a
    multiple of its type's size.
    """
    if content.data_ptr() % info.dtype.itemsize:
        content = content.clone()
    return content.view(info.dtype).view(info.shape)


def _checked(told: tuple[str, Any, Any, Any], shapes: Shapes, seen: set[str]) -> TensorInfo:
    name, dtype, shape, count = told
    known = shapes.get(name)
    if known is None:
        raise WeightUpdateError(
            f"{name!r} is not a tensor of this model; names are those of its checkpoint."
        )
    if name in seen:
        raise WeightUpdateError(f"{name!r} came twice in one update.")
    seen.add(name)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise WeightUpdateError(f"{name!r} has dtype {dtype!r}; only {', '.join(DTYPES)} travel.")
    if count is None:
        if shape != list(known):
            raise WeightUpdateError(f"{name!r} has shape {shape!r}, expected {known}.")
    elif not is_whole(count, 0) or count > torch.Size(known).numel():
        raise WeightUpdateError(
            f"the patch of {name!r} has {count!r} numbers, of {torch.Size(known).numel()} there "
            "are."
        )
    return TensorInfo(name, DTYPES[dtype], known, count)


def _known(name: str, dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPE_NAMES:
        raise WeightUpdateError(f"{name!r} has dtype {dtype}; only {', '.join(DTYPES)} travel.")
    return dtype


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
