"""A safetensors file that comes as bytes, in parts: its header is checked before there is memory
for the rest.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.weights.transports import wire
from nano_inference.weights.transports.interface import Deadline, Incoming, Shapes
from nano_inference.weights.transports.reuse import ReusedMemory

LENGTH = 8  # bytes of the header's length, little-endian
METADATA = 2**20  # bytes that the header may have beside its tensors
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsBytes:
    """Takes the parts of one file in order; a transport when it is whole.

    Args:
        size: bytes of the file.
        shapes: of the model's tensors.
        seen: names that came before in the same update; gets those of the file.
        memory: for the tensors.
    """

    def __init__(self, size: int, shapes: Shapes, seen: set[str], memory: ReusedMemory) -> None:
        self._size, self._shapes, self._seen, self._memory = size, shapes, seen, memory
        self._head = bytearray()  # until the header is whole
        self._places: list[tuple[wire.TensorInfo, int, int]] | None = None
        self._data = torch.empty(0, dtype=torch.uint8)
        self._filled = 0

    @property
    def is_whole(self) -> bool:
        """Whether all parts have come."""
        return self._places is not None and self._filled == len(self._data)

    def add(self, part: bytes | memoryview) -> None:
        """Take the next part. Raises `WeightUpdateError` as soon as it is known that the file is of
        no use.
        """
        if self._places is None:
            self._head += part
            start = self._header_end()
            if start is None or len(self._head) < start:
                if len(self._head) >= self._size:
                    raise WeightUpdateError(
                        "these bytes end in the middle of a safetensors header."
                    )
                return
            part = bytes(self._head[start:])
            self._places = _places(
                bytes(self._head[LENGTH:start]), self._size - start, self._shapes, self._seen
            )
            self._data = self._memory.take(self._size - start)
            self._head.clear()
        if self._filled + len(part) > len(self._data):
            raise WeightUpdateError(f"more than the {self._size} bytes came that were announced.")
        if part:
            into = self._data[self._filled : self._filled + len(part)]
            into.copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
            self._filled += len(part)

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """All is there."""
        return Incoming(None, self._buckets())

    def close(self) -> None:
        """Nothing is open."""

    def _header_end(self) -> int | None:
        if len(self._head) < LENGTH:
            return None
        length = int.from_bytes(self._head[:LENGTH], "little")
        most = wire.most_bytes(self._shapes) + METADATA
        if not 2 <= length <= most:
            raise WeightUpdateError(
                f"these bytes are not a safetensors file: its header would have {length} bytes."
            )
        return LENGTH + length

    def _buckets(self) -> Iterator[dict[str, Tensor]]:
        assert self._places is not None
        for info, start, stop in self._places:
            yield {info.name: wire.tensor_of(info, self._data[start:stop])}


def _places(
    header: bytes, size: int, shapes: Shapes, seen: set[str]
) -> list[tuple[wire.TensorInfo, int, int]]:
    """Each tensor with where it stands, in order. They must fill the file without gaps, as the
    format wants.
    """
    try:
        told: dict[str, Any] = json.loads(header)
        told.pop("__metadata__", None)
        entries = [
            (name, each["dtype"], each["shape"], *each["data_offsets"])
            for name, each in told.items()
        ]
        entries.sort(key=lambda entry: entry[3:])
        described = [
            (name, DTYPES.get(dtype, str(dtype)), shape) for name, dtype, shape, _, _ in entries
        ]
        infos = wire.described(described, shapes, seen)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise WeightUpdateError(
            f"the safetensors header cannot be read: {type(problem).__name__}."
        ) from problem
    places: list[tuple[wire.TensorInfo, int, int]] = []
    at = 0
    for info, (name, _, _, start, stop) in zip(infos, entries, strict=True):
        # JSON's 0.0 is equal too, and no place
        if type(start) is not int or start != at or stop != start + info.nbytes:
            raise WeightUpdateError(
                f"the safetensors header gives {name!r} bytes {start!r} to {stop!r}, not its size."
            )
        at = start + info.nbytes
        places.append((info, start, at))
    if not places or at != size:
        raise WeightUpdateError(
            f"the safetensors header tells of {at} bytes of tensors, and {size} came."
        )
    return places
