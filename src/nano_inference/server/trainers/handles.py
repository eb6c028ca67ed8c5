"""CUDA IPC handles of trainers: SGLang's and vLLM's pickles, and this package's own JSON, as offers
to the engine. Pickles are read without importing or calling anything (`system/pickles.py`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from nano_inference.errors import InvalidRequest
from nano_inference.parallel.shared_tensors import MOST_STORAGES, Offer, SharedStorage, SharedTensor
from nano_inference.server.control.requests.field_types import TensorSpec
from nano_inference.server.errors import bad_request, shown
from nano_inference.system.pickles import Called, Named, read_pickle

_SIZES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_REBUILD = (
    "torch.multiprocessing.reductions.rebuild_cuda_tensor",
    "sglang.srt.patch_torch._rebuild_cuda_tensor_modified",
    "sglang.srt.utils.patch_torch._rebuild_cuda_tensor_modified",
)
_METADATA = (
    "sglang.srt.model_executor.model_runner.FlattenedTensorMetadata",
    "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata",
)
_SIZE = "torch.Size"
_TORCH = (
    _SIZE,
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
    *(f"torch.{dtype}" for dtype in _SIZES),
)
NAMES = frozenset((*_REBUILD, *_METADATA, *_TORCH))
_ARGUMENTS = 15  # of torch's `rebuild_cuda_tensor`


class _Lent(NamedTuple):
    """Tensor that torch's `reduce_tensor` describes. `start` is in bytes."""

    storage: SharedStorage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


# -- SGLang ----------------------------------------------------------------------------------------


def offers_of_sglang(
    contents: Sequence[bytes | bytearray], flattened: bool, field: str
) -> list[Offer]:
    """Return the offers of `serialized_named_tensors`, one for each pickle.

    Args:
        contents: Pickles of SGLang's `MultiprocessingSerializer`, one for each card.
        flattened: True if each is a flattened bucket, otherwise a list of (name, tensor).
        field: Name of the request's field for error messages.

    Raises:
        ApiError: 400 for a pickle of another form.
    """
    read = _flattened_bucket if flattened else _named_tensors
    return [_read(content, field, read) for content in contents]


def _named_tensors(value: Any, field: str) -> Offer:
    if isinstance(value, dict):
        value = list(value.items())
    if not isinstance(value, list) or not value:
        raise bad_request(f"{field} must hold a list of (name, tensor).", field)
    lent: list[tuple[str, _Lent]] = []
    for pair in value:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise bad_request(f"{field} must hold pairs of a name and a tensor.", field)
        lent.append((pair[0], _rebuilt(pair[1], field)))
    return _offer(lent)


def _flattened_bucket(value: Any, field: str) -> Offer:
    if not isinstance(value, dict) or not {"flattened_tensor", "metadata"} <= value.keys():
        raise bad_request(
            f"{field} must hold a dict of flattened_tensor and metadata, as SGLang's "
            "FlattenedTensorBucket makes it.",
            field,
        )
    flat, metadata = _rebuilt(value["flattened_tensor"], field), value["metadata"]
    if len(flat.shape) != 1 or flat.strides != (1,):
        raise bad_request(f"the flattened tensor in {field} must have one axis.", field)
    if not isinstance(metadata, list) or not metadata:
        raise bad_request(f"the metadata in {field} must be a nonempty list.", field)
    return Offer((flat.storage,), tuple(_part(each, flat, field) for each in metadata))


def _part(value: Any, flat: _Lent, field: str) -> SharedTensor:
    if not isinstance(value, Called) or value.name not in _METADATA:
        raise bad_request(f"the metadata in {field} is not FlattenedTensorMetadata.", field)
    state = value.state
    name: Any = state.get("name")
    start: Any = state.get("start_idx")
    end: Any = state.get("end_idx")
    if not isinstance(name, str):
        raise bad_request(f"a tensor in {field} has no name.", field)
    shape, dtype = _ints(state.get("shape"), field), _dtype(state.get("dtype"), field)
    if flat.dtype not in ("uint8", dtype):
        raise bad_request(
            f"{shown(name)} in {field} has dtype {dtype}, but its bucket {flat.dtype}.", field
        )
    size, unit = math.prod(shape) * _SIZES[dtype], _SIZES[flat.dtype]
    if not _is_int(start) or not _is_int(end) or (end - start) * unit != size:
        raise bad_request(
            f"{shown(name)} in {field} has {size} bytes, but indices {shown(start)} to "
            f"{shown(end)} of {flat.dtype}.",
            field,
        )
    if not 0 <= start <= end <= flat.shape[0]:
        raise bad_request(
            f"{shown(name)} in {field} has indices {start} to {end} of a bucket of "
            f"{flat.shape[0]} elements.",
            field,
        )
    return SharedTensor(name, dtype, shape, flat.start + start * unit, 0)


# -- vLLM ------------------------------------------------------------------------------------------


def offers_of_vllm(
    content: bytes | bytearray, tensors: Sequence[TensorSpec], sizes: object, field: str
) -> list[Offer]:
    """Return the offers of vLLM's `ipc_handles_pickled`, one for each card.

    Args:
        content: Pickle of a handle by UUID for each tensor, or of one for all of them packed.
        tensors: Names, dtypes and shapes of the same request.
        sizes: Bytes of each tensor of a packed buffer.
        field: Name of the request's field for error messages.

    Raises:
        ApiError: 400 for a pickle of another form, or one that contradicts `tensors`.
    """

    def read(value: Any, field: str) -> list[Offer]:
        if isinstance(value, dict):
            return [
                _packed(_handle(args, uuid, field), tensors, sizes, field)
                for uuid, args in value.items()
            ]
        if not isinstance(value, list) or len(value) != len(tensors):
            raise bad_request(f"{field} must hold one handle for each of the names.", field)
        cards = _cards(value, field)
        return [
            _offer(
                (tensor.name, _same(_handle(handles[uuid], uuid, field), tensor, field))
                for tensor, handles in zip(tensors, value, strict=True)
            )
            for uuid in cards
        ]

    return _read(content, field, read)


def _cards(handles: list[Any], field: str) -> list[str]:
    if not all(isinstance(each, dict) and each for each in handles):
        raise bad_request(f"{field} must hold handles by the UUID of a card.", field)
    cards = list(handles[0])
    if any(each.keys() != handles[0].keys() for each in handles):
        raise bad_request(
            f"the tensors in {field} are on different cards; lend all on each.", field
        )
    return cards


def _handle(value: Any, uuid: Any, field: str) -> _Lent:
    """Read torch's arguments, alone or after the function that older vLLM names."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Named):
        function, value = value
        if function.name not in _REBUILD:
            raise bad_request(f"{field} names {function.name} as a handle's function.", field)
    if not isinstance(uuid, str):
        raise bad_request(f"{field} must hold handles by the UUID of a card.", field)
    return _lent(value, field, card=uuid)


def _same(lent: _Lent, tensor: TensorSpec, field: str) -> _Lent:
    dtype = tensor.dtype.removeprefix("torch.")
    if (lent.dtype, lent.shape) != (dtype, tensor.shape):
        raise bad_request(
            f"{shown(tensor.name)} is described as {shown(dtype)} {list(tensor.shape)}, but its "
            f"handle in {field} as {lent.dtype} {list(lent.shape)}.",
            field,
        )
    return lent


def _packed(lent: _Lent, tensors: Sequence[TensorSpec], sizes: object, field: str) -> Offer:
    if not isinstance(sizes, list) or len(sizes) != len(tensors):
        raise bad_request(
            "tensor_sizes must list the bytes of each tensor of a packed buffer.", "tensor_sizes"
        )
    if lent.dtype != "uint8" or len(lent.shape) != 1 or lent.strides != (1,):
        raise bad_request(f"the packed buffer in {field} must be uint8 with one axis.", field)
    parts: list[SharedTensor] = []
    at = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        dtype = tensor.dtype.removeprefix("torch.")
        expected = math.prod(tensor.shape) * _SIZES.get(dtype, 0)
        if size != expected:
            raise bad_request(
                f"{shown(tensor.name)} has {shown(size)} bytes in tensor_sizes, expected "
                f"{expected} of {shown(dtype)} {list(tensor.shape)}.",
                "tensor_sizes",
            )
        parts.append(SharedTensor(tensor.name, dtype, tensor.shape, lent.start + at, 0))
        at += expected
    if at > lent.shape[0]:
        raise bad_request(
            f"tensor_sizes add up to {at} bytes of a buffer of {lent.shape[0]}.", "tensor_sizes"
        )
    return Offer((lent.storage,), tuple(parts))


# -- this package ----------------------------------------------------------------------------------


def offers_of_json(value: object, field: str) -> list[Offer]:
    """Return the offers of `weights.transports.lending.lend`. Raises `ApiError` 400."""
    try:
        offers = msgspec.convert(value, list[Offer])
    except msgspec.ValidationError as problem:
        raise bad_request(f"{field} is not a list of offers: {problem}.", field) from problem
    if not offers or any(not each.storages or not each.tensors for each in offers):
        raise bad_request(f"{field} must list offers of storages and tensors.", field)
    return offers


# -- torch -----------------------------------------------------------------------------------------


def _read(content: bytes | bytearray, field: str, read: Callable[[Any, str], Any]) -> Any:
    try:
        return read(read_pickle(content, NAMES, field), field)
    except InvalidRequest as problem:
        raise bad_request(str(problem), field) from problem


def _offer(lent: Iterable[tuple[str, _Lent]]) -> Offer:
    tensors: list[SharedTensor] = []
    storages: list[SharedStorage] = []
    for name, tensor in lent:
        storage, dtype, shape, strides, start = tensor
        tensors.append(SharedTensor(name, dtype, shape, start, len(storages), strides))
        storages.append(storage)
    if len(storages) > MOST_STORAGES:
        raise bad_request(f"an offer has {len(storages)} storages; send at most {MOST_STORAGES}.")
    return Offer(tuple(storages), tuple(tensors))


def _rebuilt(value: Any, field: str) -> _Lent:
    """Read a pickled CUDA tensor."""
    if not isinstance(value, Called) or value.name not in _REBUILD:
        raise bad_request(f"{field} holds something else than CUDA tensors.", field)
    return _lent(value.arguments, field)


def _lent(arguments: Any, field: str, card: str | None = None) -> _Lent:
    """Read the arguments of torch's `rebuild_cuda_tensor`. `card` replaces their device."""
    if not isinstance(arguments, tuple) or len(arguments) != _ARGUMENTS:
        raise bad_request(
            f"{field} describes a CUDA tensor by other arguments than torch's "
            f"rebuild_cuda_tensor, which has {_ARGUMENTS}.",
            field,
        )
    _, shape, strides, start, _, dtype, device, handle, size, offset = arguments[:10]
    counter, index, event, waits = arguments[11:]
    card = device if card is None else card
    if not isinstance(card, str):
        raise bad_request(
            f"{field} names the card by the trainer's number {shown(card)}; name its UUID, as "
            "SGLang's monkey_patch_torch_reductions() does.",
            field,
        )
    if not all(map(_is_int, (start, size, offset, index))):
        raise bad_request(f"{field} has an offset that is not an integer.", field)
    if not all(isinstance(each, bytes) for each in (handle, counter, event)):
        raise bad_request(f"{field} has a handle that is not bytes.", field)
    name = _dtype(dtype, field)
    storage = SharedStorage(
        card=card,
        handle=handle,
        size=size,
        offset=offset,
        counter=counter.decode("ascii", "replace"),
        counter_index=index,
        event=event,
        waits=bool(waits),
    )
    return _Lent(storage, name, _ints(shape, field), _ints(strides, field), start * _SIZES[name])


def _dtype(value: Any, field: str) -> str:
    name = value.name.removeprefix("torch.") if isinstance(value, Named) else ""
    if name not in _SIZES:
        raise bad_request(f"{field} has a tensor without a known dtype.", field)
    return name


def _ints(value: Any, field: str) -> tuple[int, ...]:
    if isinstance(value, Called) and value.name == _SIZE and len(value.arguments) == 1:
        (value,) = value.arguments
    if not isinstance(value, tuple | list) or not all(map(_is_int, value)) or len(value) > 64:
        raise bad_request(f"{field} has a shape that is not a list of sizes.", field)
    return tuple(value)


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62
