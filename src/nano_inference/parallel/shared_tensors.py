"""Descriptions of tensors that a trainer on the same machine lends: the memory of a card, as
torch's `_share_cuda_` names it, and the tensors in it.

They come from another process, so every number is checked before torch or the driver uses it.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nano_inference.errors import WeightTransferError, WeightUpdateError

MOST_STORAGES = 2**16  # limit of one request
MOST_SIZE = 2**48  # bytes of a storage, and elements along an axis
# torch prefixes the driver's handle of 64 bytes with its version and the kind of allocation
_HANDLE, _PREFIXED = 64, 66
_ALLOCATED = ord("c")
COUNTERS = 10_000  # int64 counters in a file of torch
_COUNTER_FILE = re.compile(r"/torch_([0-9]{1,10})_[0-9]{1,20}(_[0-9]{1,20})?")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """Storage of a torch tensor in another process.

    Attributes:
        card: UUID of the card.
        handle: Handle of the allocation, as torch's caching allocator writes it.
        size: Bytes of the storage.
        offset: Bytes from the start of the allocation to the storage.
        counter: Name of the file in shared memory with torch's counters of receivers.
        counter_index: Number of the storage's counter in the file.
        event: Handle of the event after which the content is complete.
        waits: True if that event must be awaited.
    """

    card: str
    handle: bytes
    size: int
    offset: int
    counter: str
    counter_index: int
    event: bytes
    waits: bool

    @property
    def pid(self) -> int:
        """Process that lends the memory."""
        return int(self.counter.split("_")[1])


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """Tensor in a shared storage.

    Attributes:
        name: Checkpoint name.
        dtype: Name of its dtype, such as "bfloat16".
        shape: Its shape.
        start: Bytes from the start of the storage to its first element.
        storage: Index of its storage in the offer.
        strides: Elements between neighbors along each axis. None: row by row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    storage: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """Tensors that a trainer lends on one card."""

    storages: tuple[SharedStorage, ...]
    tensors: tuple[SharedTensor, ...]

    @property
    def cards(self) -> list[str]:
        """UUIDs of the cards of its storages, without repetition."""
        return list(dict.fromkeys(each.card for each in self.storages))


def card_name(uuid: str) -> str:
    """Return the UUID of a card in one spelling: lower case, without `GPU-`."""
    return uuid.lower().removeprefix("gpu-")


def chosen_offer(offers: Sequence[Offer], card: str) -> Offer:
    """Return the offer for a card. Raises `WeightUpdateError` if there is none."""
    for offer in offers:
        if [card_name(each) for each in offer.cards] == [card_name(card)]:
            return offer
    theirs = ", ".join(sorted({each for offer in offers for each in offer.cards})) or "none"
    raise WeightUpdateError(
        f"the engine's card has the UUID {card_name(card)}, but the handles are for {theirs:.300}; "
        "lend memory of the engine's card."
    )


def check_offer(offer: Offer) -> None:
    """Raise `WeightUpdateError` if a handle has another form than torch's, or a tensor is not
    inside its storage.
    """
    for storage in offer.storages:
        _check_storage(storage)
    for tensor in offer.tensors:
        if not 0 <= tensor.storage < len(offer.storages):
            raise WeightUpdateError(
                f"{tensor.name!r} names storage {tensor.storage} of {len(offer.storages)}; count "
                "storages from 0."
            )


def check_place(tensor: SharedTensor, itemsize: int, storage: SharedStorage) -> None:
    """Raise `WeightUpdateError` if a tensor is not inside its storage."""
    strides = tensor.strides
    if strides is not None and (len(strides) != len(tensor.shape) or min(strides, default=0) < 0):
        raise WeightUpdateError(
            f"{tensor.name!r} has strides {strides} of a tensor with {len(tensor.shape)} axes."
        )
    end = tensor.start + extent(tensor) * itemsize
    if tensor.start < 0 or end > storage.size:
        raise WeightUpdateError(
            f"{tensor.name!r} has bytes {tensor.start} to {end} of a storage of {storage.size}; "
            "offsets must be inside it."
        )


def extent(tensor: SharedTensor) -> int:
    """Return the number of elements from a tensor's first to its last, both included."""
    if 0 in tensor.shape:
        return 0
    if tensor.strides is None:
        return math.prod(tensor.shape)
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )


def require_lenders(storages: Iterable[SharedStorage]) -> None:
    """Raise `WeightTransferError` if a lending process has ended or has withdrawn its counters."""
    for counter, pid in {(each.counter, each.pid) for each in storages}:
        if not _lives(pid):
            raise WeightTransferError(
                f"process {pid}, which lends the weights, does not exist; start the trainer again, "
                "on this machine and in the engine's PID and IPC namespaces."
            )
        path = _SHARED_MEMORY / counter.removeprefix("/")
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        if size < 8 * COUNTERS:
            raise WeightTransferError(
                f"process {pid} no longer lends these weights; keep the tensors until the answer."
            )


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    try:  # a process that its parent has not waited for is no lender
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] not in ("Z", "X")


def _check_storage(storage: SharedStorage) -> None:
    handle = storage.handle
    prefixed = len(handle) == _PREFIXED and handle[1] == _ALLOCATED
    if not prefixed and len(handle) != _HANDLE:
        raise WeightUpdateError(
            f"a memory handle has {len(handle)} bytes, expected {_HANDLE} or {_PREFIXED}; set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the trainer, since handles of "
            "expandable segments are not supported."
        )
    if len(storage.event) not in (0, _HANDLE) or (storage.waits and not storage.event):
        raise WeightUpdateError(
            f"an event handle has {len(storage.event)} bytes, expected {_HANDLE}."
        )
    if not 0 <= storage.size < MOST_SIZE or not 0 <= storage.offset < MOST_SIZE:
        raise WeightUpdateError(
            f"a storage has {storage.size} bytes at {storage.offset}; both must be in "
            f"[0, {MOST_SIZE})."
        )
    if _COUNTER_FILE.fullmatch(storage.counter) is None:
        raise WeightUpdateError(
            f"{storage.counter!r:.80} is not the name of a counter file of torch."
        )
    if not 0 <= storage.counter_index < COUNTERS:
        raise WeightUpdateError(
            f"counter {storage.counter_index} of a storage must be in [0, {COUNTERS})."
        )
