"""What a weight update is made of: tensors and patches in buckets, and the future that says when
they serve.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.models.weights import Slot, patch, read, write
from nano_inference.options import is_whole
from nano_inference.types import KvPolicy

BUCKET_BYTES = 2**26
MOST_VERSIONS = 2**63  # what travels between processes has 64 bits
Item = TypeVar("Item")


class WeightPatch(NamedTuple):
    """New values for single numbers of one checkpoint tensor.

    Attributes:
        name: the tensor's name in the checkpoint.
        indices: int64 [n], places in the tensor flattened row by row; each at most once.
        values: [n], floating point.
    """

    name: str
    indices: Tensor
    values: Tensor


# A part of an update: whole tensors by name, or patches.
Bucket = Mapping[str, Tensor] | Iterable[WeightPatch | tuple[str, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Change:
    """A checked piece of an update: a whole checkpoint tensor, or with `indices` some numbers of
    it.
    """

    slot: Slot
    values: Tensor
    indices: Tensor | None = None

    def apply(self, params: dict[str, Any]) -> None:
        """Write it into its place."""
        if self.indices is None:
            write(params, self.slot, self.values)
        else:
            patch(params, self.slot, self.indices, self.values)


class Shares(Protocol):
    """The other ranks' parts of updates: what is given is sent on, and written on all ranks or on
    none.

    What is raised is a `WeightUpdateError`, or `RankLost`.
    """

    def dtype_of(self, name: str) -> torch.dtype:
        """Of the parameter that a checkpoint tensor goes into, on whichever rank."""
        ...

    def give(
        self, update: "WeightUpdate", name: str, values: Tensor, indices: Tensor | None
    ) -> None:
        """Send all other ranks their parts of a checked tensor, or of single numbers of one."""
        ...

    def settle(self, update: "WeightUpdate") -> None:
        """All was given. Returns when every rank has its part and can write it."""
        ...

    def apply(self, update: "WeightUpdate") -> None:
        """Let all ranks write it, at this place between steps."""
        ...

    def discard(self, update: "WeightUpdate") -> None:
        """Let all ranks forget it. Raises nothing."""
        ...

    def whole(self, name: str) -> Tensor:
        """A checkpoint tensor as all ranks together hold it."""
        ...


class WeightUpdate:
    """A weight update on its way: being received, then waiting between two steps, then serving. Or
    it failed.

    Attributes:
        params: the decoder's names of the parameters that it touches; empty while it is received.
        staged_bytes: memory that it held beside the weights while it waited.
        kv_policy: what becomes of running requests when it is applied; None: the engine's default.
        error: why it failed; None: it did not.
    """

    def __init__(self, kv_policy: KvPolicy | None = None) -> None:
        self.kv_policy: KvPolicy | None = kv_policy
        self.params: frozenset[str] = frozenset()
        self.staged_bytes = 0
        self.error: WeightUpdateError | None = None
        self._version: int | None = None
        self._changes: list[Change] = []
        self._whole: frozenset[str] = frozenset()
        self.shares: Shares | None = None  # the other ranks, if there are any
        self._ended = threading.Event()

    @property
    def version(self) -> int:
        """Its version. Raises `WeightUpdateError` while it is received: the trainer may yet name
        one.
        """
        if self._version is None:
            raise self.error or WeightUpdateError(
                "the weight update is still being received; it has no version yet."
            )
        return self._version

    def done(self) -> bool:
        """Whether it has ended: the new weights serve, or it failed."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for at most `timeout` seconds; returns `done()`."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> int:
        """Wait until the weights serve; returns the version. Raises `WeightUpdateError` if it
        failed, or in time.

        The wait needs somebody to call `step()`; a blocking update does not.
        """
        if not self._ended.wait(timeout):
            subject = (
                "the weight update" if self._version is None else f"weight version {self._version}"
            )
            state = "received" if self._version is None else "applied"
            raise WeightUpdateError(
                f"{subject} is not {state} after {timeout} s; is step() called?"
            )
        if self.error is not None:
            raise self.error
        return self.version

    # What follows is the manager's.

    def stage(
        self, version: int, changes: list[Change], staged_bytes: int, whole: Iterable[str]
    ) -> None:
        """Everything was received and checked. `whole`: checkpoint names of the tensors that it
        gives as a whole.
        """
        self._version, self._changes, self.staged_bytes = version, changes, staged_bytes
        self._whole = frozenset(whole)
        self.params = frozenset(change.slot.param for change in changes)

    def changes_of(self, slot: Slot) -> list[Change]:
        """What it will do to one checkpoint tensor, in order."""
        return [change for change in self._changes if change.slot == slot]

    def is_whole(self, names: Iterable[str]) -> bool:
        """Whether it gives every one of these checkpoint tensors, so that nothing before it
        matters.
        """
        return self._whole >= set(names)

    def write_to(self, params: dict[str, Any]) -> None:
        """Write every change into its place and let go of it."""
        if self.shares is not None:
            self.shares.apply(self)
        for change in self._changes:
            change.apply(params)
        for device in {params[name].device for name in self.params}:
            # until then the values are still read, and a fault of theirs is this update's
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self._changes = []

    def copy_borrowed(self) -> None:
        """Hold copies of all tensors that it holds."""
        self._changes = [
            Change(
                change.slot,
                change.values.clone(),
                change.indices if change.indices is None else change.indices.clone(),
            )
            for change in self._changes
        ]
        tensors = [
            part
            for change in self._changes
            for part in (change.values, change.indices)
            if part is not None
        ]
        self.staged_bytes = sum(tensor.nbytes for tensor in tensors)

    def succeed(self) -> None:
        """It serves."""
        self._ended.set()

    def fail(self, error: WeightUpdateError) -> None:
        """It will never serve. The first reason stays."""
        if not self._ended.is_set():
            self.error, self._changes = error, []
            self._ended.set()
            if self.shares is not None:
                self.shares.discard(self)


def version_of(given: object, who: object) -> int | None:
    """The number of a version as a file or a trainer (`who`) gives it. Raises
    `WeightUpdateError`.
    """
    if given is not None and not (is_whole(given, 0) and given < MOST_VERSIONS):
        raise WeightUpdateError(
            f"{who}: version={given!r:.40} must be an integer from 0 to 2^63 - 1."
        )
    return given


def value_of(params: dict[str, Any], slot: Slot, changes: list[Change]) -> Tensor:
    """What a rank's part of a checkpoint tensor is after some changes of it, in the model's
    dtype.
    """
    dtype, device = params[slot.param].dtype, params[slot.param].device
    whole = max(
        (place for place, change in enumerate(changes) if change.indices is None), default=-1
    )
    value = (read(params, slot) if whole < 0 else changes[whole].values).to(device, dtype)
    if whole + 1 < len(changes):
        value = value.clone(memory_format=torch.contiguous_format)
    for change in changes[whole + 1 :]:
        assert change.indices is not None
        value.view(-1).index_copy_(0, change.indices.to(device), change.values.to(device, dtype))
    return value


def cut_into_buckets(
    weights: Mapping[str, Tensor], max_bytes: int = BUCKET_BYTES
) -> Iterator[dict[str, Tensor]]:
    """A state dict in parts of at most `max_bytes` each, in order; a tensor that is larger goes
    alone.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} must be at least 1.")
    yield from map(dict, in_groups(weights.items(), lambda named: named[1].nbytes, max_bytes))


def in_groups(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Neighbours together, as many as are at most `most` bytes; one that is larger goes alone."""
    group: list[Item] = []
    size = 0
    for item in items:
        more = size_of(item)
        if group and size + more > most:
            yield group
            group, size = [], 0
        group.append(item)
        size += more
    if group:
        yield group
