"""The Protocol Buffers messages of the client's API: the request of `forward_backward`, and the
results of `forward_backward` and `sample`. The client's `tinker_public.proto` defines them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import EDITION_2023, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from nano_training_service.errors import Refused

Array = NDArray[np.float32] | NDArray[np.int64]

_FLOAT32, _INT64 = 1, 2  # values of the enum DType
_DTYPES: Mapping[int, type] = {_FLOAT32: np.float32, _INT64: np.int64}
MOST_VALUES = 1 << 24  # in all sparse tensors of a request after densification
STOPPED, REACHED_LENGTH = 0, 1  # values of the enum StopReason

# Each message's fields, numbered from 1 in this order. * marks repeated fields. A map is declared
# as repeated messages with a key and a value, which preserves the order of its entries.
_SCHEMA = {
    "Request": "model_id:string seq_id:int64 data:Datum* loss_fn:string numbers:Number* "
    "forward_only:bool settings:Setting*",
    "Number": "key:string value:double",
    "Setting": "key:string value:NumberOrText",
    "NumberOrText": "number:double text:string",
    "Datum": "chunks:Chunk* inputs:Input*",
    "Chunk": "text:Text image:bytes audio:bytes",
    "Text": "tokens:bytes",
    "Input": "key:string value:Tensor",
    "Tensor": "dense:bytes sparse:Rows dtype:int32 shape:int64*",
    "Rows": "values:bytes ends:bytes columns:bytes",
    "Output": "kind:string records:Record* metrics:Number*",
    "Record": "kind:string columns:Column* count:int64",
    "Column": "key:string value:Arrays",
    "Arrays": "data:bytes offsets:bytes dtype:int32 trailing:int64*",
    "Samples": "sequences:Sample* prompt_logprobs:bytes top_prompt_logprobs:Top cached:int64",
    "Sample": "stop_reason:int32 tokens:bytes logprobs:bytes top:Top",
    "Top": "ids:bytes logprobs:bytes width:int64 rows:int64",
}


def _message_classes() -> dict[str, Any]:
    """Return a class for each message of the schema. Singular fields record whether they are set,
    and strings must be UTF-8.
    """
    file = FileDescriptorProto(name="messages.proto", syntax="editions", edition=EDITION_2023)
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields.split(), 1):
            label, kind = text.rstrip("*").split(":")
            added = message.field.add(name=label, number=number)
            repeated = text.endswith("*")
            added.label = (
                FieldDescriptorProto.LABEL_REPEATED
                if repeated
                else FieldDescriptorProto.LABEL_OPTIONAL
            )
            if kind in _SCHEMA:
                added.type, added.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{kind}"
            else:
                added.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    pool = DescriptorPool()  # the default pool may hold the client's own descriptors
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(name)) for name in _SCHEMA}


MESSAGES = _message_classes()


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence of a batch.

    Attributes:
        tokens: Input of the model.
        inputs: Inputs of the loss, by name: `target_tokens`, `weights`, `advantages`, ...
    """

    tokens: tuple[int, ...]
    inputs: Mapping[str, Array]  # each [n], or [n, k] for k targets of each token


@dataclass(frozen=True)
class ForwardBackward:
    """A request for the logprobs of a batch, and for its gradients unless `forward_only`."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    data: tuple[Datum, ...]
    forward_only: bool = False
    refusal: Refused | None = field(default=None, compare=False)


# -- reading ---------------------------------------------------------------------------------------


def forward_backward_request(body: bytes) -> ForwardBackward:
    """Parse a request. If its data is invalid, `refusal` is set, and the request still has its
    model and its sequence number. Raises `Refused` if the bytes are not such a message.
    """
    try:
        request = MESSAGES["Request"].FromString(body)
    except DecodeError as problem:
        raise Refused(
            f"the body is not a valid Protocol Buffers message of forward_backward: {problem}."
        ) from None
    config: dict[str, float | str] = {each.key: each.value for each in request.numbers}
    for setting in request.settings:
        value = setting.value
        config[setting.key] = value.text if value.HasField("text") else value.number
    refusal, data = None, ()
    try:
        room = _Room(MOST_VALUES)
        data = tuple(_datum(each, room) for each in request.data)
    except Refused as problem:
        refusal = problem
    return ForwardBackward(
        model_id=request.model_id,
        seq_id=request.seq_id,
        loss_fn=request.loss_fn,
        loss_fn_config=config,
        data=data,
        forward_only=request.forward_only,
        refusal=refusal,
    )


@dataclass
class _Room:
    """Number of values that a request's remaining sparse tensors may have."""

    left: int

    def take(self, count: int) -> None:
        """Reserve `count` values. Raises `Refused` if too few are left."""
        self.left -= count
        if self.left < 0:
            raise Refused(
                f"the sparse tensors of the request have more than {MOST_VALUES} values; send "
                "fewer sequences, or fewer targets per token."
            )


def _datum(datum: Any, room: _Room) -> Datum:
    tokens: list[int] = []
    for chunk in datum.chunks:
        if not chunk.HasField("text"):
            kind = next((each for each in ("image", "audio") if chunk.HasField(each)), "empty")
            raise Refused(f"the input contains an {kind} chunk; send encoded text only.")
        tokens += _array(chunk.text.tokens, np.dtype("<i4")).tolist()
    return Datum(tuple(tokens), {each.key: _tensor(each.value, room) for each in datum.inputs})


def _tensor(tensor: Any, room: _Room) -> Array:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise Refused(f"a tensor has dtype {tensor.dtype}; send float32 (1) or int64 (2).")
    shape = list(tensor.shape)
    if len(shape) > 2 or not all(0 <= size < 1 << 31 for size in shape):
        raise Refused(
            f"a tensor has shape {shape}; send one value per token, [n], or k values, [n, k]."
        )
    if tensor.HasField("sparse"):
        return _dense(tensor.sparse, np.dtype(dtype), shape, room)
    values = _array(tensor.dense, np.dtype(dtype).newbyteorder("<"))
    if shape and math.prod(shape) != len(values):
        raise Refused(f"a tensor of shape {shape} has {len(values)} values.")
    return values.reshape(shape) if shape else values


def _dense(sparse: Any, dtype: np.dtype, shape: Sequence[int], room: _Room) -> Array:
    """Convert a matrix of compressed sparse rows to a dense array."""
    values = _array(sparse.values, dtype.newbyteorder("<"))
    ends, columns = (_array(each, np.dtype("<i8")) for each in (sparse.ends, sparse.columns))
    if len(shape) != 2:
        raise Refused(f"a sparse tensor has shape {list(shape)}; it must have two dimensions.")
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
            f"a sparse tensor of shape {list(shape)} has {len(values)} values, and row ends or "
            "columns that do not match."
        )
    room.take(max(rows, 1) * width)
    dense = np.zeros((rows, width), dtype)
    dense[np.repeat(np.arange(rows), counts), columns] = values
    return dense


def _array(data: bytes, dtype: np.dtype) -> NDArray:
    if len(data) % dtype.itemsize:
        raise Refused(f"{len(data)} bytes are not a multiple of the item size of {dtype.name}.")
    return np.frombuffer(data, dtype)


# -- writing ---------------------------------------------------------------------------------------


def forward_backward_output(
    outputs: Mapping[str, Sequence[NDArray[np.float32]]], metrics: Mapping[str, float]
) -> bytes:
    """Encode a result: for each name one float32 array per datum, [n] or [n, k], and metrics. A
    record holds neighboring datums whose arrays have the same number of values per token.
    """
    result = MESSAGES["Output"](kind="ArrayRecord")
    rows = zip(*outputs.values(), strict=True)
    for _, group in itertools.groupby(rows, lambda row: [array.shape[1:] for array in row]):
        columns = [*zip(*group, strict=True)]
        record = result.records.add(kind="ArrayRecord", count=len(columns[0]))
        for name, arrays in zip(outputs, columns, strict=True):
            record.columns.add(key=name, value=_batched(arrays))
    for name, value in metrics.items():
        result.metrics.add(key=name, value=value)
    return result.SerializeToString()


def _batched(arrays: Sequence[NDArray[np.float32]]) -> Message:
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
    return MESSAGES["Arrays"](
        data=b"".join(array.astype("<f4").tobytes() for array in arrays),
        offsets=offsets.tobytes(),
        dtype=_FLOAT32,
        trailing=arrays[0].shape[1:],
    )


# proto3 omits numbers that are 0, and so does `or None` in the messages below


def sample_response(
    sequences: Sequence[Message],
    prompt_logprobs: NDArray[np.float32] | None,
    top_prompt_logprobs: Message | None,
    cached_tokens: int,
) -> bytes:
    """Encode the result of `sample`: sequences from `sampled_sequence`, logprobs of the prompt
    (nan if there is none), and the prompt's `top_logprobs`.
    """
    prompt = None if prompt_logprobs is None else prompt_logprobs.astype("<f4").tobytes()
    return MESSAGES["Samples"](
        sequences=sequences,
        prompt_logprobs=prompt,
        top_prompt_logprobs=top_prompt_logprobs,
        cached=cached_tokens or None,
    ).SerializeToString()


def sampled_sequence(
    stop_reason: int, tokens: Sequence[int], logprobs: Sequence[float], top: Message | None = None
) -> Message:
    """Return the message of one sample: its stop reason, tokens and logprobs."""
    return MESSAGES["Sample"](
        stop_reason=stop_reason or None,
        tokens=np.asarray(tokens, "<i4").tobytes() or None,
        logprobs=np.asarray(logprobs, "<f4").tobytes(),
        top=top,
    )


MASKED = -99999.0  # logprob of a padding cell, whose token id is 0


def top_logprobs(rows: Sequence[tuple[Sequence[int], Sequence[float]]], width: int) -> Message:
    """Return ids and logprobs as matrices [positions, width]. Shorter rows are padded."""
    ids = np.zeros((len(rows), width), "<i4")
    logprobs = np.full((len(rows), width), MASKED, "<f4")
    for at, (row, values) in enumerate(rows):
        ids[at, : len(row)] = row
        logprobs[at, : len(row)] = values
    return MESSAGES["Top"](
        ids=ids.tobytes(), logprobs=logprobs.tobytes(), width=width or None, rows=len(rows) or None
    )
