"""Weight updates being received: each bucket is checked and staged, and nothing is written."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple, cast

import numpy as np

from nano_inference.arrays import (
    HOST,
    Device,
    Dtype,
    HostArray,
    Tensor,
    as_host,
    as_torch,
    dtype_name,
    is_tensor,
    namespace,
)
from nano_inference.errors import WeightUpdateError
from nano_inference.fields.options import is_whole
from nano_inference.models.parameters.fused import unfused
from nano_inference.models.parameters.slots import Slot
from nano_inference.models.parameters.values import WEIGHT_DTYPES, holds_numbers
from nano_inference.ops.formats import Format
from nano_inference.ops.quantised import quantise_weight
from nano_inference.types import KvPolicy
from nano_inference.weights.update import (
    NOT_A_TENSOR,
    Change,
    StagedChanges,
    WeightSet,
    WeightUpdate,
    wait_for_devices,
)

MOST_VERSIONS = 2**63  # messages between processes hold 64 bits
FINITE_RUN = 2**22  # elements per check for finite values


class WeightPatch(NamedTuple):
    """New values for single elements of one checkpoint tensor.

    Attributes:
        name: Checkpoint name of the tensor.
        indices: Indices into the flattened tensor (row by row), int64 [n], without duplicates.
        values: New values, floating point [n].
    """

    name: str
    indices: Tensor
    values: Tensor


# Part of an update: whole tensors by name, or patches.
Bucket = Mapping[str, Tensor] | Iterable[WeightPatch | tuple[str, Tensor, Tensor]]


class Hold(Enum):
    """Ownership of an update's tensors until it is written."""

    COPY = auto()  # copied, because the caller may write to them afterwards
    TAKE = auto()  # owned by the update
    BORROW = auto()  # owned by the caller, and cast, written or copied before the call returns


class WeightSession:
    """Update being received. It checks and stages each bucket.

    Tensors may be torch's, on any device, numpy arrays, or objects with `__dlpack__`.

    Tensors that are not copied must keep their contents until the update is written. A change
    cannot be noticed, whether it is made through the tensor, through another view of its memory, or
    in a file that is mapped there. Live weights are the exception: a tensor in their memory is
    always copied, because the update itself may overwrite it.

    Args:
        weights: Weight set to update.
        room: Bytes that may be staged on the model's device. Further tensors go to the CPU.
        kv_policy: Effect on running requests.
        version: Version of the update, if requested.
        complete: Require every tensor, whole or as a patch.
        check_finite: Reject NaN and infinite values, judged in the model's dtype.
    """

    def __init__(
        self,
        weights: WeightSet,
        *,
        room: float = math.inf,
        kv_policy: KvPolicy | None = None,
        version: int | None = None,
        complete: bool = False,
        check_finite: bool = False,
    ) -> None:
        self.update = WeightUpdate(kv_policy, weights.shares)
        self.complete, self.check_finite, self.version = complete, check_finite, version
        self.staged, self.staged_bytes, self.whole = StagedChanges(), 0, set[str]()
        self._weights, self._room = weights, room
        # memory of the live weights: staged tensors there could be overwritten before use
        self._served = _joined(map(_memory_of, filter(is_tensor, weights.model.params.values())))
        self._indices: dict[str, Tensor] = {}  # ascending indices of patches by name

    def add(self, bucket: Bucket, hold: Hold) -> None:
        """Check a bucket and stage it. Raises `WeightUpdateError`, after which the session is
        unusable.
        """
        device = self._weights.model.device
        if isinstance(bucket, Mapping):
            for sent_name, whole in cast(Mapping[str, Tensor], bucket).items():
                if self._weights.passes_over(sent_name):
                    continue
                whole = taken(whole, device)
                for name, tensor in unfused(self._weights.fused, sent_name, whole):
                    self._check_tensor(name, tensor)
                    self._add(name, tensor, None, hold)
        else:
            for sent_name, all_indices, all_values in _patches(bucket):
                patch = (taken(each, device) for each in (all_indices, all_values))
                patches = self._unfused_patch(sent_name, *patch)
                for name, indices, values in patches:
                    self._add(name, values, self._checked_places(name, indices, values, hold), hold)

    @property
    def is_empty(self) -> bool:
        """True if no tensor was received."""
        return not self.whole and not self._indices

    def missing(self) -> list[str]:
        """Return the names of tensors that were not received."""
        weights = self._weights
        return sorted({*weights.names} - weights.optional - self.whole - self._indices.keys())

    def settle(self, pending: Iterable[WeightUpdate], asleep: bool) -> None:
        """Wait until all received data has arrived, since another stream may write it, and check
        tied heads.

        Raises `WeightUpdateError` if a tied head would differ once all `pending` updates are
        written. `asleep` is True while the weights are asleep.
        """
        wait_for_devices(change.values.device for change in self.staged.changes)
        before = (each.staged for each in pending)
        self.staged.require_tied(self._weights.model.params, before, asleep)

    def _add(self, name: str, values: Tensor, indices: Tensor | None, hold: Hold) -> None:
        """Send a checked tensor or patch to the other ranks, and stage this rank's part of it."""
        weights = self._weights
        if self.check_finite:
            _require_finite(name, values, weights.dtype_of(name), weights.form_of(name))
        if weights.shares is not None:
            weights.shares.give(self.update, name, values, indices)
        slot = weights.own.get(name)
        if slot is None:  # only on other ranks
            return
        if indices is None:
            values = slot.take(values)
        else:
            indices, values = slot.take_places(indices, values)
        change = Change(slot, self._hold(name, values, hold), indices)
        self.staged.add(change)
        if hold is not Hold.BORROW and slot.tied_to is None:
            self.staged_bytes += change.nbytes

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        fused = (
            self._weights.fused.get(name) if isinstance(name, str) else None
        )  # not None if it could not be split
        expected = self._slot(name).shape if fused is None else fused.shape
        _require_floating(name, tensor)
        if tuple(tensor.shape) != expected:
            raise WeightUpdateError(
                f"{name!r} has shape {tuple(tensor.shape)}, expected {expected}."
            )
        if name in self.whole or name in self._indices:
            raise WeightUpdateError(f"{name!r} occurs twice in one update; send it once.")
        self.whole.add(name)

    def _unfused_patch(
        self, name: str, indices: Tensor, values: Tensor
    ) -> list[tuple[str, Tensor, Tensor]]:
        """Return a patch split by checkpoint name."""
        fused = self._weights.fused.get(name) if isinstance(name, str) else None
        if fused is None:
            return [(name, indices, values)]
        _require_patch(name, indices, values)
        if len(indices):
            _require_inside(name, indices.min(), indices.max(), math.prod(fused.shape))
        int64 = namespace(indices).int64
        return fused.split_places(indices.detach().to(int64), values.detach())

    def _checked_places(self, name: str, indices: Tensor, values: Tensor, hold: Hold) -> Tensor:
        slot = self._slot(name)
        if self._weights.is_quantised(name):
            raise WeightUpdateError(
                f"{name!r} cannot be patched, because it is stored as codes that share scales; "
                "send the whole tensor."
            )
        if name in self.whole:
            raise WeightUpdateError(
                f"{name!r} occurs twice in one update, whole and as a patch; send it once."
            )
        _require_patch(name, indices, values)
        indices = indices.detach().to(
            self._weights.model.device, namespace(indices).int64, copy=hold is Hold.COPY
        )
        self._require_places(name, indices, math.prod(slot.shape))
        return indices

    def _require_places(self, name: str, indices: Tensor, size: int) -> None:
        earlier = self._indices.get(name)
        rising = indices
        if earlier is not None or (
            len(indices) > 1 and not bool((indices[1:] > indices[:-1]).all())
        ):
            rising = indices if earlier is None else namespace(indices).cat([earlier, indices])
            rising = rising[rising.argsort()]
        if len(rising):
            _require_inside(name, rising[0], rising[-1], size)
        again = (rising[1:] == rising[:-1]).nonzero()
        if len(again):
            raise WeightUpdateError(
                f"the patch of {name!r} has index {int(rising[again[0, 0]])} more than once; send "
                "each index once."
            )
        self._indices[name] = rising

    def _slot(self, name: str) -> Slot:
        slot = self._weights.slots.get(name) if isinstance(name, str) else None
        if slot is None:
            raise WeightUpdateError(f"{name!r} {NOT_A_TENSOR}")
        return slot

    def _hold(self, name: str, tensor: Tensor, hold: Hold) -> Tensor:
        is_served = _overlaps(_memory_of(tensor), self._served)
        if hold is Hold.BORROW:
            return tensor.detach().clone() if is_served else tensor.detach()
        device, dtype = self._weights.model.device, self._weights.dtype_of(name)
        size = tensor.numel() * dtype.itemsize
        if size > self._room:
            device = "cpu"
        else:
            self._room -= size
        try:
            copy = is_served or hold is Hold.COPY
            return tensor.detach().to(device=device, dtype=dtype, copy=copy)
        except (MemoryError, RuntimeError) as problem:  # torch raises RuntimeError
            raise WeightUpdateError(f"{name!r} could not be staged: {problem}") from problem


def taken(value: Any, device: Device) -> Any:
    """Return a trainer's tensor as an array of the kind that the engine's device needs, in the same
    memory if possible.

    Values that are not suitable remain so, and later checks name them.
    """
    is_host, is_numpy = device is HOST, isinstance(value, np.ndarray)
    if is_tensor(value) and not is_numpy and not (is_host and holds_numbers(value)):
        return value
    try:
        return as_host(value) if is_host else as_torch(value)
    except TypeError:  # its dtype, or no array at all
        return value.view(HostArray) if is_numpy else value


def version_of(version: object, source: object) -> int | None:
    """Return a checked version number from a file or a trainer, which `source` names in errors.
    Raises `WeightUpdateError`.
    """
    if version is not None and not (is_whole(version, 0) and version < MOST_VERSIONS):
        raise WeightUpdateError(
            f"{source}: version={version!r:.40} must be an integer from 0 to 2^63 - 1."
        )
    return version


def _require_finite(name: str, values: Tensor, dtype: Dtype, form: Format | None) -> None:
    """Raise `WeightUpdateError` for values, or scales of codes, that are not finite.

    The values are cast in runs, since a cast of the whole tensor would double its memory.
    """
    ends = [
        end
        for run in values.detach().reshape(-1).split(FINITE_RUN)
        for end in run.to(dtype).aminmax()
    ]
    kind, xp = dtype_name(dtype), namespace(dtype)
    if ends and form is not None:
        kind += f", or too large ones for {form.name}"
        ends = list(quantise_weight(xp.stack(ends)[:, None], form, [(0, 1)])[1])
    if ends and not bool(xp.isfinite(xp.stack(ends)).all()):
        raise WeightUpdateError(
            f"{name!r} holds NaN or infinite values in {kind}; fix them, or set check_finite to "
            "false."
        )


def _require_patch(name: str, indices: Any, values: Any) -> None:
    _require_floating(name, values)
    integers = ("int64", "int32")
    if not is_tensor(indices) or dtype_name(indices.dtype) not in integers or indices.is_meta:
        kind = dtype_name(indices.dtype) if is_tensor(indices) else type(indices).__name__
        raise WeightUpdateError(
            f"indices of the patch of {name!r} must be an int64 tensor, not {kind}."
        )
    if indices.dim() != 1 or values.shape != indices.shape:
        shapes = (
            f"indices of shape {tuple(indices.shape)} and values of shape {tuple(values.shape)}"
        )
        raise WeightUpdateError(f"the patch of {name!r} has {shapes}; both must be [n].")


def _require_inside(name: str, least: Tensor, most: Tensor, size: int) -> None:
    low, high = int(least), int(most)
    if not 0 <= low <= high < size:
        wrong = low if low < 0 else high
        raise WeightUpdateError(
            f"the patch of {name!r} has index {wrong}, which is outside its {size} elements."
        )


def _require_floating(name: str, tensor: Any) -> None:
    if not is_tensor(tensor) or dtype_name(tensor.dtype) not in WEIGHT_DTYPES:
        kind = dtype_name(tensor.dtype) if is_tensor(tensor) else type(tensor).__name__
        raise WeightUpdateError(
            f"{name!r} must be a floating point tensor, not {kind}; send one of "
            f"{', '.join(WEIGHT_DTYPES)}."
        )
    if not holds_numbers(tensor):
        raise WeightUpdateError(
            f"{name!r} must be a dense tensor with data, such as a DTensor's full_tensor()."
        )


def _patches(bucket: Any) -> Iterable[tuple[str, Tensor, Tensor]]:
    if isinstance(bucket, WeightPatch) or (
        isinstance(bucket, tuple) and bucket and isinstance(bucket[0], str)
    ):
        bucket = [bucket]
    if not isinstance(bucket, Iterable) or isinstance(bucket, str | bytes) or is_tensor(bucket):
        raise WeightUpdateError(
            f"a bucket must be a dict of tensors or a list of patches, not {type(bucket).__name__}."
        )
    for entry in bucket:
        if not isinstance(entry, tuple) or len(entry) != 3:
            raise WeightUpdateError(
                "a patch must be (name, indices, values); send whole tensors in a dict."
            )
        yield entry


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses [start, stop) between which a tensor's numbers lie."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = [(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    size = tensor.element_size()
    below, above = (sum(way(step, 0) for step in steps) for way in (min, max))
    return start + below * size, start + (above + 1) * size


def _joined(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of memory in ascending order, with overlapping ones joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(extents):
        if joined and start < joined[-1][1]:
            first, last = joined.pop()
            start, stop = first, max(stop, last)
        joined.append((start, stop))
    return joined


def _overlaps(extent: tuple[int, int], ranges: list[tuple[int, int]]) -> bool:
    """Return True if a range of memory overlaps one of `ranges`, which `_joined` returned."""
    start, stop = extent
    later = bisect_left(ranges, (stop,))  # the first that begins at its end or later
    return start < stop and later > 0 and ranges[later - 1][1] > start
