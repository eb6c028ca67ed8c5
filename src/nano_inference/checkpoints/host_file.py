"""`HostFile`: a safetensors file whose tensors are read as host arrays, without torch.

It has the methods of `safetensors.safe_open`. The numpy framework of safetensors lacks bfloat16.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from nano_inference.arrays import Tensor, host

_DTYPES = {
    "F64": host.float64,
    "F32": host.float32,
    "F16": host.float16,
    "BF16": host.bfloat16,
    "F8_E4M3": host.float8_e4m3fn,
    "F8_E5M2": host.float8_e5m2,
    "F8_E8M0": host.float8_e8m0fnu,
    "I64": host.int64,
    "I32": host.int32,
    "I16": host.int16,
    "I8": host.int8,
    "U64": host.uint64,
    "U32": host.uint32,
    "U16": host.uint16,
    "U8": host.uint8,
    "BOOL": host.bool,
}


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int  # first byte in the file


class HostFile:
    """An open safetensors file. Its tensors are views of the mapped file.

    Raises `OSError` and `SafetensorError`, as `safe_open` does.
    """

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="numpy") as checked:  # checks all of the header
            self._names = list(checked.keys())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        self._entries = {
            name: _Entry(
                header[name]["dtype"],
                tuple(header[name]["shape"]),
                8 + length + header[name]["data_offsets"][0],
            )
            for name in self._names
        }
        # copy-on-write: a caller that writes into a tensor does not change the file
        self._bytes = np.memmap(path, np.uint8, "c")

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return self._names

    def get_slice(self, name: str) -> "HostSlice":
        """Return a tensor to be read by slices."""
        if name not in self._entries:
            raise SafetensorError(f"File does not contain tensor {name}")
        return HostSlice(self._entries[name], self._bytes)

    def get_tensor(self, name: str) -> Tensor:
        """Return a whole tensor."""
        return self.get_slice(name)[...]


class HostSlice:
    """A tensor that is read by slices."""

    def __init__(self, entry: _Entry, file: np.ndarray) -> None:
        self._entry, self._file = entry, file

    def get_dtype(self) -> str:
        """Return the dtype by safetensors' name."""
        return self._entry.dtype

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return list(self._entry.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Return a slice of the tensor, as a view of the mapped file if it is aligned."""
        name, shape, start = self._entry
        if name not in _DTYPES:
            raise SafetensorError(f"dtype {name} is not supported")
        dtype = _DTYPES[name]
        stored = self._file[start : start + math.prod(shape) * dtype.itemsize]
        part = stored.view(dtype).reshape(shape)[index]
        return host.from_numpy(part if part.flags.aligned else part.copy())
