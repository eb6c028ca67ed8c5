"""Safetensors file received as bytes, in parts. The header is checked before memory is allocated
for the rest.
"""

import json
from collections.abc import Iterator
from typing import Any

from nano_inference.arrays import Tensor, host
from nano_inference.errors import WeightUpdateError
from nano_inference.weights.transports import wire
from nano_inference.weights.transports.interface import Deadline, Incoming, Shapes
from nano_inference.weights.transports.reuse import ReusedMemory

LENGTH = 8  # bytes of the header's length, little-endian
METADATA = 2**20  # maximum bytes of the header in addition to its tensors
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsBytes:
    """Receiver of the parts of one file, in order. It is a transport once the file is complete.

    Args:
        size: Size of the file in bytes.
        shapes: Shapes of the model's tensors.
        seen: Names received earlier in the same update. Names in the file are added to it.
        memory: Memory for the tensors.
    """

    def __init__(self, size: int, shapes: Shapes, seen: set[str], memory: ReusedMemory) -> None:
        self._size, self._shapes, self._seen, self._memory = size, shapes, seen, memory
        self._head = bytearray()  # bytes received until the header is complete
        self._places: list[tuple[wire.TensorInfo, int, int]] | None = None
        self._data: Tensor = host.empty(0, dtype=host.uint8)
        self._filled = 0

    @property
    def is_whole(self) -> bool:
        """True if all parts were received."""
        return self._places is not None and self._filled == len(self._data)

    def add(self, part: bytes | memoryview) -> None:
        """Accept the next part. Raises `WeightUpdateError` as soon as the file is known to be
        invalid.
        """
        if self._places is None:
            self._head += part
            start = self._header_end()
            if start is None or len(self._head) < start:
                if len(self._head) >= self._size:
                    raise WeightUpdateError(
                        "the file ends in the middle of a safetensors header; send all of it."
                    )
                return
            part = bytes(self._head[start:])
            self._places = _places(
                bytes(self._head[LENGTH:start]), self._size - start, self._shapes, self._seen
            )
            self._data = self._memory.take(self._size - start)
            self._head.clear()
        if self._filled + len(part) > len(self._data):
            raise WeightUpdateError(f"received more than the announced {self._size} bytes.")
        if part:
            into = self._data[self._filled : self._filled + len(part)]
            into.copy_(host.frombuffer(part, dtype=host.uint8))
            self._filled += len(part)

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Return the complete file."""
        return Incoming(None, self._buckets())

    def close(self) -> None:
        """Do nothing, since no connection is open."""

    def _header_end(self) -> int | None:
        if len(self._head) < LENGTH:
            return None
        length = int.from_bytes(self._head[:LENGTH], "little")
        most = wire.most_bytes(self._shapes) + METADATA
        if not 2 <= length <= most:
            raise WeightUpdateError(
                f"the file is not a safetensors file: its header would have {length} bytes."
            )
        return LENGTH + length

    def _buckets(self) -> Iterator[dict[str, Tensor]]:
        assert self._places is not None
        for info, start, stop in self._places:
            yield {info.name: wire.tensor_of(info, self._data[start:stop])}


def _places(
    header: bytes, size: int, shapes: Shapes, seen: set[str]
) -> list[tuple[wire.TensorInfo, int, int]]:
    """Return each tensor with its start and end, in order. Tensors must fill the file without gaps,
    as the format requires.
    """
    try:
        fields: dict[str, Any] = json.loads(header)
        fields.pop("__metadata__", None)
        entries = [
            (name, each["dtype"], each["shape"], *each["data_offsets"])
            for name, each in fields.items()
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
        # the type check rejects JSON's 0.0, which equals 0
        if type(start) is not int or start != at or stop != start + info.nbytes:
            raise WeightUpdateError(
                f"the safetensors header gives {name!r} bytes {start!r} to {stop!r}, which do not "
                "match its size."
            )
        at = start + info.nbytes
        places.append((info, start, at))
    if not places or at != size:
        raise WeightUpdateError(
            f"the safetensors header describes {at} bytes of tensors, but the file has {size}."
        )
    return places
