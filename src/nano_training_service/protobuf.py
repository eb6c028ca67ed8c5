"""Protocol Buffers' wire format, as far as the client's three messages need it: the request of
`forward_backward`, and the results of it and of `sample`.

The messages are those of `tinker_public.proto`, which the client carries; numbers are its fields.
"""

import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nano_training_service.errors import Refused

Array = NDArray[np.float32] | NDArray[np.int64]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT32, _INT64 = 1, 2  # of the enum DType
_DTYPES: Mapping[int, type] = {_FLOAT32: np.float32, _INT64: np.int64}
_CUT = "the body is no whole Protocol Buffers message."
MOST_VALUES = 1 << 24  # of all sparse tensors of a request, once they are dense
STOPPED, REACHED_LENGTH = 0, 1  # of the enum StopReason

Value = int | bytes
Kind = TypeVar("Kind", int, bytes)
Fields = dict[int, list[Value]]


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence of a batch.

    Attributes:
        tokens: the model's input.
        inputs: of the loss, by name: `target_tokens`, `weights`, `advantages`, ...
    """

    tokens: tuple[int, ...]
    inputs: Mapping[str, Array]  # each [n], or [n, k] for k targets of each token


@dataclass(frozen=True)
class ForwardBackward:
    """A request for logprobs of a batch, and for gradients unless `forward_only`."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    data: tuple[Datum, ...]
    forward_only: bool = False
    refusal: Refused | None = field(default=None, compare=False)


# -- reading ---------------------------------------------------------------------------------------


def forward_backward_request(body: bytes) -> ForwardBackward:
    """A request from its bytes. `refusal` says what the service cannot do with it, since the model
    and the place in its order are known all the same. Raises `Refused`: this is no such message.
    """
    fields = _read(body)
    config: dict[str, float | str] = {}
    for entry in _messages(fields, 5):
        config[_text(entry, 1)] = _double(entry, 2)
    for entry in _messages(fields, 7):
        value = _one_message(entry, 2)
        config[_text(entry, 1)] = _text(value, 2) if 2 in value else _double(value, 1)
    refusal, data = None, ()
    try:
        room = _Room(MOST_VALUES)
        data = tuple(_datum(each, room) for each in _messages(fields, 3))
    except Refused as problem:
        refusal = problem
    return ForwardBackward(
        model_id=_text(fields, 1),
        seq_id=_whole(fields, 2),
        loss_fn=_text(fields, 4),
        loss_fn_config=config,
        data=data,
        forward_only=bool(_whole(fields, 6)),
        refusal=refusal,
    )


@dataclass
class _Room:
    """Values that sparse tensors of a request may still come to."""

    left: int

    def take(self, count: int) -> None:
        """Raises `Refused` where there is no room for them."""
        self.left -= count
        if self.left < 0:
            raise Refused(
                f"the sparse tensors of the request come to more than {MOST_VALUES} values; send "
                "fewer sequences, or fewer targets a token, at once."
            )


def _datum(fields: Fields, room: _Room) -> Datum:
    tokens: list[int] = []
    for chunk in _messages(fields, 1):
        if 1 not in chunk:
            kind = "image" if 2 in chunk else "audio" if 3 in chunk else "empty"
            raise Refused(f"the input holds an {kind} chunk; this service takes encoded text.")
        tokens += _array(_bytes(_one_message(chunk, 1), 1), np.dtype("<i4")).tolist()
    inputs = {_text(each, 1): _tensor(_one_message(each, 2), room) for each in _messages(fields, 2)}
    return Datum(tuple(tokens), inputs)


def _tensor(fields: Fields, room: _Room) -> Array:
    dtype = _DTYPES.get(_whole(fields, 3))
    if dtype is None:
        raise Refused(f"a tensor of dtype {_whole(fields, 3)}; float32 (1) and int64 (2) are read.")
    shape = [size for part in fields.get(4, []) for size in _packed(part)]
    if len(shape) > 2 or not all(0 <= size < 1 << 31 for size in shape):
        raise Refused(
            f"a tensor of shape {shape}; give one value for each token, or k: [n] or [n, k]."
        )
    if 2 in fields:
        return _dense(_one_message(fields, 2), np.dtype(dtype), shape, room)
    values = _array(_bytes(fields, 1), np.dtype(dtype).newbyteorder("<"))
    if shape and math.prod(shape) != len(values):
        raise Refused(f"a tensor of shape {shape} with {len(values)} values.")
    return values.reshape(shape) if shape else values


def _dense(fields: Fields, dtype: np.dtype, shape: Sequence[int], room: _Room) -> Array:
    """A matrix of compressed sparse rows, whose other values are 0."""
    values = _array(_bytes(fields, 1), dtype.newbyteorder("<"))
    ends, columns = (_array(_bytes(fields, number), np.dtype("<i8")) for number in (2, 3))
    if len(shape) != 2:
        raise Refused(f"a sparse tensor of shape {list(shape)}; a sparse tensor is a matrix.")
    rows, width = shape
    counts = np.diff(ends)
    if (
        len(ends) != rows + 1
        or (ends[0], ends[-1]) != (0, len(values))
        or (counts < 0).any()
        or len(columns) != len(values)
        or (len(columns) and not 0 <= columns.min() <= columns.max() < width)
    ):
        raise Refused(
            f"a sparse tensor of shape {list(shape)} with {len(values)} values whose row ends and "
            "columns do not fit it."
        )
    room.take(max(rows, 1) * width)
    dense = np.zeros((rows, width), dtype)
    dense[np.repeat(np.arange(rows), counts), columns] = values
    return dense


def _array(data: bytes, dtype: np.dtype) -> NDArray:
    if len(data) % dtype.itemsize:
        raise Refused(f"{len(data)} bytes are no whole number of values of {dtype.name}.")
    return np.frombuffer(data, dtype)


def _read(data: bytes) -> Fields:
    """The fields of a message: numbers, or bytes of what is nested. Raises `Refused`."""
    found: Fields = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
            value, at = data[at : at + size], at + size
        else:
            raise Refused(f"the body is no Protocol Buffers message: wire type {kind}.")
        if at > len(data):
            raise Refused(_CUT)
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of at most ten bytes, and where the next one begins. Raises `Refused`."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise Refused(_CUT)


def _signed(value: int) -> int:
    """Negative numbers of int32 and int64 are written as 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _packed(part: Value) -> Iterator[int]:
    """The numbers of a repeated field, written one by one or all in one."""
    if isinstance(part, int):
        yield _signed(part)
        return
    at = 0
    while at < len(part):
        value, at = _varint(part, at)
        yield _signed(value)


def _last(fields: Fields, number: int, default: Kind) -> Kind:
    value = fields.get(number, [default])[-1]
    if not isinstance(value, type(default)):
        raise Refused(f"field {number} of the message has another wire type than the protocol's.")
    return value


def _bytes(fields: Fields, number: int) -> bytes:
    return _last(fields, number, b"")


def _whole(fields: Fields, number: int) -> int:
    return _signed(_last(fields, number, 0))


def _text(fields: Fields, number: int) -> str:
    try:
        return _bytes(fields, number).decode()
    except UnicodeDecodeError:
        raise Refused(f"field {number} of the message is no UTF-8.") from None


def _double(fields: Fields, number: int) -> float:
    data = _bytes(fields, number) or bytes(8)
    if len(data) != 8:
        raise Refused(f"field {number} of the message is no double.")
    return struct.unpack("<d", data)[0]


def _messages(fields: Fields, number: int) -> Iterator[Fields]:
    for value in fields.get(number, []):
        if not isinstance(value, bytes):
            raise Refused(f"field {number} of the message is no message.")
        yield _read(value)


def _one_message(fields: Fields, number: int) -> Fields:
    return _read(_bytes(fields, number))


# -- writing ---------------------------------------------------------------------------------------


def forward_backward_output(
    outputs: Mapping[str, Sequence[NDArray[np.float32]]], metrics: Mapping[str, float]
) -> bytes:
    """A result: for each name one float32 array a datum, [n] or [n, k], and metrics. A record holds
    neighbouring datums whose arrays have as many values a token.
    """
    rows = zip(*outputs.values(), strict=True)
    parts = [_put(1, "ArrayRecord")]
    for _, group in itertools.groupby(rows, lambda row: [array.shape[1:] for array in row]):
        columns = [*zip(*group, strict=True)]
        fields = [
            _entry(2, name, _batched(arrays)) for name, arrays in zip(outputs, columns, strict=True)
        ]
        record = [_put(1, "ArrayRecord"), *fields, _put(3, len(columns[0]))]
        parts.append(_put(2, b"".join(record)))
    parts += [_entry(3, name, value) for name, value in metrics.items()]
    return b"".join(parts)


def _batched(arrays: Sequence[NDArray[np.float32]]) -> bytes:
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
    data = b"".join(array.astype("<f4").tobytes() for array in arrays)
    trailing = b"".join(_number(size) for size in arrays[0].shape[1:])
    parts = [_put(1, data), _put(2, offsets.tobytes()), _put(3, _FLOAT32)]
    return b"".join([*parts, _put(4, trailing)] if trailing else parts)


def sample_response(
    sequences: Sequence[bytes],
    prompt_logprobs: NDArray[np.float32] | None,
    top_prompt_logprobs: bytes | None,
    cached_tokens: int,
) -> bytes:
    """The result of `sample`: sequences of `sampled_sequence`, logprobs of the prompt (nan where
    there is none), and `top_logprobs` of it.
    """
    parts = [_put(1, each) for each in sequences]
    if prompt_logprobs is not None:
        parts.append(_put(2, prompt_logprobs.astype("<f4").tobytes()))
    if top_prompt_logprobs is not None:
        parts.append(_put(3, top_prompt_logprobs))
    return b"".join((*parts, _put(4, cached_tokens)))


def sampled_sequence(
    stop_reason: int, tokens: Sequence[int], logprobs: Sequence[float], top: bytes | None = None
) -> bytes:
    """One sample: why it ended, its tokens and their logprobs."""
    parts = [
        _put(1, stop_reason),
        _put(2, np.asarray(tokens, "<i4").tobytes()) if tokens else b"",
        _put(3, np.asarray(logprobs, "<f4").tobytes()),
    ]
    return b"".join(parts if top is None else (*parts, _put(4, top)))


MASKED = -99999.0  # the logprob of an empty cell, whose token is 0


def top_logprobs(rows: Sequence[tuple[Sequence[int], Sequence[float]]], width: int) -> bytes:
    """Matrices [positions, width] of ids and logprobs; rows that are shorter are filled up."""
    ids = np.zeros((len(rows), width), "<i4")
    logprobs = np.full((len(rows), width), MASKED, "<f4")
    for at, (row, values) in enumerate(rows):
        ids[at, : len(row)] = row
        logprobs[at, : len(row)] = values
    return (
        _put(1, ids.tobytes()) + _put(2, logprobs.tobytes()) + _put(3, width) + _put(4, len(rows))
    )


def _entry(number: int, key: str, value: bytes | float) -> bytes:
    """An entry of a map."""
    return _put(number, _put(1, key) + _put(2, value))


def _put(number: int, value: bytes | str | int | float) -> bytes:
    """A field. A number that is 0 is left out, as proto3 does."""
    if isinstance(value, float):
        return _number(number << 3 | _FIXED64) + struct.pack("<d", value)
    if isinstance(value, int):
        return _number(number << 3 | _VARINT) + _number(value) if value else b""
    data = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | _BYTES) + _number(len(data)) + data


def _number(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
