"""A weight update that is being received: each bucket is checked and put aside, with nothing
written.
"""

import math
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

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
)

MOST_VERSIONS = 2**63  # what travels between processes has 64 bits
FINITE_RUN = 2**22  # numbers that are looked at in one piece


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


class Hold(Enum):
    """How the tensors of an update are kept until it is written."""

    COPY = auto()  # the caller may write to them afterwards
    TAKE = auto()  # the caller gave them away
    BORROW = auto()  # they are read before the call returns: cast, and written or copied


class WeightSession:
    """An update that is being received: checks each bucket and puts it aside.

    Args:
        weights: that it is for.
        complete: every tensor must come, whole or as a patch.
        check_finite: refuse NaN and infinite values, as they are in the model's dtype.
        version: of the update, as far as it was asked for.
        room: bytes that may be put aside on the model's device; what is beyond goes to the CPU.
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
        # where the served numbers are: tensors there may be written over before they are read
        params = weights.model.params.values()
        self._served = {p.untyped_storage().data_ptr() for p in params if isinstance(p, Tensor)}
        self._indices: dict[str, Tensor] = {}  # of patches, by name; rising

    def add(self, bucket: Bucket, hold: Hold) -> None:
        """Check a bucket and put it aside. Raises `WeightUpdateError`; the session is then
        useless.
        """
        if isinstance(bucket, Mapping):
            for given, whole in cast(Mapping[str, Tensor], bucket).items():
                if self._weights.passes_over(given):
                    continue
                for name, tensor in unfused(self._weights.fused, given, whole):
                    self._check_tensor(name, tensor)
                    self._add(name, tensor, None, hold)
        else:
            for given, all_indices, all_values in _patches(bucket):
                for name, indices, values in self._unfused_patch(given, all_indices, all_values):
                    self._add(name, values, self._checked_places(name, indices, values, hold), hold)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come."""
        return not self.whole and not self._indices

    def missing(self) -> list[str]:
        """The tensors that did not come."""
        return sorted({*self._weights.names} - self.whole - self._indices.keys())

    def settle(self, pending: Iterable[WeightUpdate], asleep: bool) -> None:
        """All has come. Wait until it is there, since another stream may write it, and raise
        `WeightUpdateError` where a tied head will differ once all `pending` updates are written;
        `asleep`: the weights are.
        """
        for device in {change.values.device for change in self.staged.changes}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        before = (each.staged for each in pending)
        self.staged.require_tied(self._weights.model.params, before, asleep)

    def _add(self, name: str, values: Tensor, indices: Tensor | None, hold: Hold) -> None:
        """Hand a checked tensor or patch to the other ranks, and put this rank's part of it
        aside.
        """
        weights = self._weights
        if self.check_finite:
            _require_finite(name, values, weights.dtype_of(name), weights.form_of(name))
        if weights.shares is not None:
            weights.shares.give(self.update, name, values, indices)
        slot = weights.own.get(name)
        if slot is None:  # other ranks' alone
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
        )  # it could not be split
        expected = self._slot(name).shape if fused is None else fused.shape
        _require_floating(name, tensor)
        if tuple(tensor.shape) != expected:
            raise WeightUpdateError(
                f"{name!r} has shape {tuple(tensor.shape)}, expected {expected}."
            )
        if name in self.whole or name in self._indices:
            raise WeightUpdateError(f"{name!r} came twice in one update.")
        self.whole.add(name)

    def _unfused_patch(
        self, name: str, indices: Tensor, values: Tensor
    ) -> list[tuple[str, Tensor, Tensor]]:
        """A patch by the names of the checkpoint."""
        fused = self._weights.fused.get(name) if isinstance(name, str) else None
        if fused is None:
            return [(name, indices, values)]
        _require_patch(name, indices, values)
        if len(indices):
            _require_inside(name, indices.min(), indices.max(), torch.Size(fused.shape).numel())
        return fused.split_places(indices.detach().to(torch.int64), values.detach())

    def _checked_places(self, name: str, indices: Tensor, values: Tensor, hold: Hold) -> Tensor:
        slot = self._slot(name)
        if self._weights.is_quantised(name):
            raise WeightUpdateError(
                f"{name!r} cannot be patched: it is stored as codes, which have scales in common; "
                "send the whole tensor."
            )
        if name in self.whole:
            raise WeightUpdateError(f"{name!r} came twice in one update: whole, and as a patch.")
        _require_patch(name, indices, values)
        indices = indices.detach().to(
            self._weights.model.device, torch.int64, copy=hold is Hold.COPY
        )
        self._require_places(name, indices, torch.Size(slot.shape).numel())
        return indices

    def _require_places(self, name: str, indices: Tensor, size: int) -> None:
        earlier = self._indices.get(name)
        rising = indices
        if earlier is not None or (
            len(indices) > 1 and not bool((indices[1:] > indices[:-1]).all())
        ):
            rising = torch.cat([indices] if earlier is None else [earlier, indices]).sort().values
        if len(rising):
            _require_inside(name, rising[0], rising[-1], size)
        again = (rising[1:] == rising[:-1]).nonzero()
        if len(again):
            raise WeightUpdateError(
                f"the patch of {name!r} has index {int(rising[again[0]])} more than once."
            )
        self._indices[name] = rising

    def _slot(self, name: str) -> Slot:
        slot = self._weights.slots.get(name) if isinstance(name, str) else None
        if slot is None:
            raise WeightUpdateError(f"{name!r} {NOT_A_TENSOR}")
        return slot

    def _hold(self, name: str, tensor: Tensor, hold: Hold) -> Tensor:
        is_served = tensor.untyped_storage().data_ptr() in self._served
        if hold is Hold.BORROW:
            return tensor.detach().clone() if is_served else tensor.detach()
        device, dtype = self._weights.model.device, self._weights.dtype_of(name)
        size = tensor.numel() * dtype.itemsize
        if size > self._room:
            device = torch.device("cpu")
        else:
            self._room -= size
        try:
            copy = is_served or hold is Hold.COPY
            return tensor.detach().to(device=device, dtype=dtype, copy=copy)
        except RuntimeError as problem:  # out of memory
            raise WeightUpdateError(f"{name!r} could not be put aside: {problem}") from problem


def version_of(given: object, source: object) -> int | None:
    """The number of a version as a file or a trainer (`source`) gives it. Raises
    `WeightUpdateError`.
    """
    if given is not None and not (is_whole(given, 0) and given < MOST_VERSIONS):
        raise WeightUpdateError(
            f"{source}: version={given!r:.40} must be an integer from 0 to 2^63 - 1."
        )
    return given


def _require_finite(name: str, values: Tensor, dtype: torch.dtype, form: Format | None) -> None:
    """In runs: a cast of all of it at once would take as much memory again. Of codes the scales
    are looked at too.
    """
    ends = [
        end
        for run in values.detach().reshape(-1).split(FINITE_RUN)
        for end in run.to(dtype).aminmax()
    ]
    kind = str(dtype)
    if ends and form is not None:
        kind += f", or too large ones for {form.name}"
        ends = list(quantise_weight(torch.stack(ends)[:, None], form, [(0, 1)])[1])
    if ends and not bool(torch.isfinite(torch.stack(ends)).all()):
        raise WeightUpdateError(
            f"{name!r} holds NaN or infinite values in {kind}; mend them, or send check_finite "
            "as false."
        )


def _require_patch(name: str, indices: Any, values: Any) -> None:
    _require_floating(name, values)
    integers = (torch.int64, torch.int32)
    if not isinstance(indices, Tensor) or indices.dtype not in integers or indices.is_meta:
        kind = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise WeightUpdateError(
            f"the patch of {name!r} needs indices that are an int64 tensor, not {kind}."
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
            f"the patch of {name!r} has index {wrong}, outside of its {size} numbers."
        )


def _require_floating(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in WEIGHT_DTYPES:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in WEIGHT_DTYPES)
        raise WeightUpdateError(
            f"{name!r} must be a floating point tensor, not {kind}; a weight is {known}."
        )
    if not holds_numbers(tensor):
        raise WeightUpdateError(
            f"{name!r} must be a dense tensor that holds its numbers, as a DTensor's full_tensor()."
        )


def _patches(bucket: Any) -> Iterable[tuple[str, Tensor, Tensor]]:
    if isinstance(bucket, WeightPatch) or (
        isinstance(bucket, tuple) and bucket and isinstance(bucket[0], str)
    ):
        bucket = [bucket]
    if not isinstance(bucket, Iterable) or isinstance(bucket, str | bytes | Tensor):
        raise WeightUpdateError(
            f"a bucket is a dict of tensors or a list of patches, not {type(bucket).__name__}."
        )
    for given in bucket:
        if not isinstance(given, tuple) or len(given) != 3:
            raise WeightUpdateError(
                "a patch is (name, indices, values); whole tensors come in a dict."
            )
        yield given
