"""Header of a GGUF file: its metadata, and the locations of its tensors.

No tensor is read, so reading a header is fast for files of any size.
"""

import hashlib
import math
import mmap
import os
import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nano_inference.errors import ModelLoadError
from nano_inference.system.regular_files import open_regular

MOST_HEADER = 2**28  # bytes: the token lists of the largest vocabularies take about ten million
DEFAULT_ALIGNMENT = 32

INSTALL_HINT = 'reading a GGUF file needs the package gguf: pip install "nano-inference[gguf]"'

# struct format of each numeric metadata type
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS[12] = "d"
_STRING, _ARRAY = 8, 9
# lists under this prefix take seconds to read, and only the tokenizer needs them
_TOKENIZER = "tokenizer."


class Layout(NamedTuple):
    """Storage of a GGUF type.

    Attributes:
        name: GGUF's name of the type.
        block: Numbers per block.
        block_bytes: Bytes per block.
    """

    name: str
    block: int
    block_bytes: int


# Types by GGUF's number that are read without the gguf package, whose import is slow. The package
# reads other types.
LAYOUTS = {
    0: Layout("F32", 1, 4),
    1: Layout("F16", 1, 2),
    2: Layout("Q4_0", 32, 18),
    3: Layout("Q4_1", 32, 20),
    6: Layout("Q5_0", 32, 22),
    7: Layout("Q5_1", 32, 24),
    8: Layout("Q8_0", 32, 34),
    12: Layout("Q4_K", 256, 144),
    13: Layout("Q5_K", 256, 176),
    14: Layout("Q6_K", 256, 210),
    20: Layout("IQ4_NL", 32, 18),
    23: Layout("IQ4_XS", 256, 136),
    30: Layout("BF16", 1, 2),
    39: Layout("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor in a file, before it is read.

    Attributes:
        file: File that contains the tensor.
        name: GGUF name.
        shape: Shape with the fastest dimension last, as in Hugging Face.
        layout: Storage of its numbers.
        start: Offset of its first byte in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    layout: Layout
    start: int

    @property
    def kind(self) -> str:
        """GGUF's name of the type."""
        return self.layout.name

    @property
    def row_bytes(self) -> int:
        """Bytes of a row along the last dimension."""
        return self.shape[-1] // self.layout.block * self.layout.block_bytes

    @property
    def num_rows(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        """Size in the file in bytes."""
        return self.num_rows * self.row_bytes

    def rows(self) -> np.ndarray:
        """Map the stored bytes, [rows, bytes of a row], without reading them."""
        if self.num_bytes == 0:
            return np.zeros((self.num_rows, self.row_bytes), np.uint8)
        shape = (self.num_rows, self.row_bytes)
        try:
            # copy-on-write mode, because torch warns about read-only memory
            return np.memmap(self.file, np.uint8, "c", offset=self.start, shape=shape)
        except (OSError, ValueError) as problem:  # the file was truncated after the header was read
            raise ModelLoadError(
                f"the GGUF tensor {self.name} of {self.file} cannot be read: {problem}"
            ) from problem


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Contents of a file's header.

    Attributes:
        digest: SHA-256 of the header's bytes: metadata and tensor table.
        metadata: Metadata by key. The token lists are None unless requested.
        tensors: Tensors by name, in the order of the file.
    """

    digest: bytes
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path, *, token_lists: bool = False) -> GgufHeader:
    """Read the header of a GGUF file.

    The latest headers without token lists are cached until their files change.

    Args:
        path: Path of the file.
        token_lists: True to read the tokenizer's lists (tokens, types, scores, merges).

    Raises:
        ModelLoadError: The file is missing, truncated or not GGUF, a tensor has an unsupported
            type, or the gguf package is not installed.
    """
    try:
        if token_lists:
            return _read_new(path, token_lists)
        return _read_kept(path, stamp(path))
    except OSError as error:
        raise ModelLoadError(f"cannot read the GGUF file {path}: {error}") from error


def stamp(path: Path) -> tuple[int, ...]:
    """Return values that change when a file is written or replaced. Raises `OSError`."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=64)
def _read_kept(path: Path, _stamp: tuple[int, ...]) -> GgufHeader:
    return _read_new(path, token_lists=False)


def _read_new(path: Path, token_lists: bool) -> GgufHeader:
    try:
        with open_regular(path) as file:
            _check_start(path, file.read(8))
            size = file.seek(0, 2)
            length = min(size, MOST_HEADER)
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) as data:
                return _read(path, _Cursor(data), size, token_lists)
    except OSError as error:
        raise ModelLoadError(f"cannot read the GGUF file {path}: {error}") from error
    except ImportError as error:
        raise ModelLoadError(INSTALL_HINT) from error
    except (ValueError, LookupError, ArithmeticError, struct.error) as error:
        raise ModelLoadError(f"{path} is truncated or damaged: {error}") from error


def _check_start(path: Path, start: bytes) -> None:
    if len(start) < 8 or start[:4] != b"GGUF":
        raise ModelLoadError(
            f"{path} is not a GGUF file: it starts with {start[:4]!r}, not b'GGUF'"
        )
    version = int.from_bytes(start[4:], "little")
    if version not in (2, 3):  # also rejects big-endian files
        raise ModelLoadError(
            f"{path} has GGUF version {version}; versions 2 and 3, little-endian, can be read"
        )


class _Cursor:
    """Sequential reader. Past the end it raises `struct.error` or `ValueError`."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 8  # after magic and version

    def numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        numbers = struct.unpack_from(f"<{count}{letter}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{letter}")
        return numbers

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def text(self) -> str:
        size = self.number("Q")
        self.at += size
        if self.at > len(self.data):
            raise ValueError("a string extends past the end of the file")
        return self.data[self.at - size : self.at].decode("utf-8")

    def value(self, kind: int, wanted: bool) -> Any:
        """Return a value of the metadata, or None for a list if `wanted` is False."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if wanted:
            if count > len(self.data) or kind == _ARRAY:  # an entry takes at least one byte
                raise ValueError(f"a list of {count} entries of type {kind}")
            if kind in _NUMBERS:
                return list(self.numbers(_NUMBERS[kind], count))
            return [self.value(kind, wanted) for _ in range(count)]
        if kind in _NUMBERS:
            self.at += count * struct.calcsize(f"<{_NUMBERS[kind]}")
        else:
            self._skip(kind, count)
        return None

    def _skip(self, kind: int, count: int) -> None:
        if kind != _STRING:
            raise ValueError(f"a list of values of type {kind}")
        at, data, length = self.at, self.data, struct.Struct("<Q")
        for _ in range(count):
            at += 8 + length.unpack_from(data, at)[0]
        self.at = at


def _read(path: Path, cursor: _Cursor, file_size: int, token_lists: bool) -> GgufHeader:
    num_tensors, num_keys = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"the key {key} is duplicated")
        wanted = token_lists or not key.startswith(_TOKENIZER)
        metadata[key] = cursor.value(cursor.number("I"), wanted)
    table = [_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment}")
    first = -(-cursor.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in table:
        if name in tensors:
            raise ValueError(f"the tensor {name} is duplicated")
        tensors[name] = _stored(path, name, shape, kind, first + offset)
        if tensors[name].start + tensors[name].num_bytes > file_size:
            raise ValueError(f"the tensor {name} extends past the file's {file_size:,} bytes")
    digest = hashlib.sha256(cursor.data[: cursor.at]).digest()
    return GgufHeader(digest, metadata, tensors)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type and offset of a tensor."""
    name, num_dimensions = cursor.text(), cursor.number("I")
    if not 1 <= num_dimensions <= 4:
        raise ValueError(f"the tensor {name} has {num_dimensions} dimensions")
    shape = cursor.numbers("Q", num_dimensions)[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _stored(path: Path, name: str, shape: tuple[int, ...], number: int, start: int) -> StoredTensor:
    try:
        layout = LAYOUTS.get(number) or _other_layout(number)
    except NotImplementedError as error:
        raise ModelLoadError(f"the GGUF tensor {name} has an unsupported type: {error}") from error
    if shape[-1] % layout.block:
        raise ValueError(
            f"the tensor {name} has rows of {shape[-1]}, not a multiple of {layout.block}"
        )
    return StoredTensor(path, name, shape, layout, start)


@cache
def _other_layout(number: int) -> Layout:
    """Return the layout of a type by the gguf package.

    Raises `NotImplementedError` for an unsupported type.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kinds = [each for each in GGMLQuantizationType if each.value == number]
    if not kinds:
        raise NotImplementedError(f"the gguf package here does not know type {number}")
    block, block_bytes = GGML_QUANT_SIZES[kinds[0]]
    dequantize(np.zeros((1, block_bytes), np.uint8), kinds[0])
    return Layout(kinds[0].name, block, block_bytes)
