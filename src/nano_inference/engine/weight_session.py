"""A session: the buckets of one weight update are checked and put aside, and nothing is written."""

import math
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from nano_inference.engine.weight_update import Bucket, Change, Shares, WeightPatch, WeightUpdate
from nano_inference.errors import WeightUpdateError
from nano_inference.models.fused_names import FusedTensor, unfused
from nano_inference.models.weights import TIED, WEIGHT_DTYPES, Slot

FINITE_RUN = 2**22  # numbers that are looked at in one piece
EMPTY = (
    "weights must be a non-empty state dict (checkpoint names to tensors), a path, or "
    "buckets of them."
)


class Hold(Enum):
    """How a session keeps the tensors that it is given."""

    COPY = auto()  # the caller may write to them afterwards
    TAKE = auto()  # the caller gave them away
    # they are written into place before the caller gets control back; cast on the way
    BORROW = auto()


class WeightSession:
    """Tensors and patches on their way into one update.

    Args:
        slots: all checkpoint tensors of the model.
        own: where each goes of which this rank holds a part.
        params: the parameters that it holds.
        complete: every tensor must come, whole or as a patch.
        check_finite: refuse NaN and infinite values, as they are in the model's dtype.
        room: bytes that may be put aside on the model's device; what is beyond goes to the CPU.
        shares: the other ranks, if there are any.
        fused: names of several checkpoint tensors in one piece.
    """

    def __init__(
        self,
        slots: Mapping[str, Slot],
        own: Mapping[str, Slot],
        params: Mapping[str, Any],
        *,
        complete: bool,
        check_finite: bool,
        room: float = math.inf,
        shares: Shares | None = None,
        fused: Mapping[str, FusedTensor] = MappingProxyType({}),
    ) -> None:
        self._room = room
        self._fused = fused
        self._own = own
        self._shares = shares
        self._device = next(iter(params.values())).device
        self.update = WeightUpdate()
        self.update.shares = shares
        self.complete, self.check_finite = complete, check_finite
        self.changes: list[Change] = []
        # of tied heads, by name: compared at the end, never written
        self.heads: dict[str, list[Change]] = {}
        self.staged_bytes = 0
        self._slots, self._params = slots, params
        self.whole: set[str] = set()
        self._indices: dict[str, Tensor] = {}  # of patches, by name; rising

    def add(self, bucket: Bucket, hold: Hold) -> None:
        """Check a bucket and put it aside. Raises `WeightUpdateError`; the session is then
        useless.
        """
        if isinstance(bucket, Mapping):
            for given, whole in cast(Mapping[str, Tensor], bucket).items():
                for name, tensor in unfused(self._fused, given, whole):
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
        return sorted(self._slots.keys() - self.whole - self._indices.keys())

    def settle(self) -> None:
        """Wait until what was put aside on a device is there: whoever writes it may do so on
        another stream.
        """
        for device in {change.values.device for change in self.changes}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _add(self, name: str, values: Tensor, indices: Tensor | None, hold: Hold) -> None:
        """Hand a checked tensor or patch to the other ranks, and put this rank's part of it
        aside.
        """
        tied = self._is_tied(name)
        place = TIED[name] if tied else name
        if self.check_finite:
            _require_finite(name, values, self._dtype(place))
        if self._shares is not None:
            self._shares.give(self.update, name, values, indices)
        slot = self._own.get(place)
        if slot is None:  # other ranks' alone
            return
        if indices is None:
            values = slot.take(values)
        else:
            indices, values = slot.take_places(indices, values)
        change = Change(slot, self._hold(name, slot, values, hold), indices)
        if tied:
            self.heads.setdefault(name, []).append(change)
            return
        self.changes.append(change)
        if hold is not Hold.BORROW:
            self.staged_bytes += sum(
                part.nbytes for part in (change.values, change.indices) if part is not None
            )

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        fused = self._fused.get(name) if isinstance(name, str) else None  # it could not be split
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
        fused = self._fused.get(name) if isinstance(name, str) else None
        if fused is None:
            return [(name, indices, values)]
        _require_patch(name, indices, values)
        if len(indices):
            _require_inside(name, indices.min(), indices.max(), torch.Size(fused.shape).numel())
        return fused.split_places(indices.detach().to(torch.int64), values.detach())

    def _checked_places(self, name: str, indices: Tensor, values: Tensor, hold: Hold) -> Tensor:
        slot = self._slot(name)
        if name in self.whole:
            raise WeightUpdateError(f"{name!r} came twice in one update: whole, and as a patch.")
        _require_patch(name, indices, values)
        indices = indices.detach().to(self._device, torch.int64, copy=hold is Hold.COPY)
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
        slot = (
            self._slots.get(TIED[name] if self._is_tied(name) else name)
            if isinstance(name, str)
            else None
        )
        if slot is None:
            raise WeightUpdateError(
                f"{name!r} is not a tensor of this model; names are those of its checkpoint."
            )
        return slot

    def _is_tied(self, name: str) -> bool:
        return name in TIED and name not in self._slots

    def _hold(self, name: str, slot: Slot, tensor: Tensor, hold: Hold) -> Tensor:
        if hold is Hold.BORROW:
            return tensor.detach()
        own = self._params[slot.param]
        size = tensor.numel() * own.dtype.itemsize
        fits = size <= self._room
        self._room -= size if fits else 0
        device = own.device if fits else torch.device("cpu")
        try:
            return tensor.detach().to(device=device, dtype=own.dtype, copy=hold is Hold.COPY)
        except RuntimeError as problem:  # out of memory
            raise WeightUpdateError(f"{name!r} could not be put aside: {problem}") from problem

    def _dtype(self, name: str) -> torch.dtype:
        """Of the parameter that a checkpoint tensor goes into."""
        if self._shares is not None:
            return self._shares.dtype_of(name)
        return self._params[self._own[name].param].dtype


def _require_finite(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """In runs: a cast of all of it at once would take as much memory again."""
    ends = [
        end
        for run in values.detach().reshape(-1).split(FINITE_RUN)
        for end in run.to(dtype).aminmax()
    ]
    if ends and not bool(torch.isfinite(torch.stack(ends)).all()):
        raise WeightUpdateError(
            f"{name!r} holds NaN or infinite values in {dtype}; mend them, or send check_finite "
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
    if tensor.layout != torch.strided or tensor.is_meta:
        raise WeightUpdateError(f"{name!r} must be a dense tensor that holds its numbers.")


def _patches(bucket: Any) -> Iterable[tuple[str, Tensor, Tensor]]:
    if isinstance(bucket, WeightPatch) or (
        isinstance(bucket, tuple) and bucket and isinstance(bucket[0], str)
    ):
        bucket = [bucket]
    if not isinstance(bucket, Iterable) or isinstance(bucket, str | bytes | Tensor):
        raise WeightUpdateError(
            f"a bucket is a dict of tensors or a list of patches, not {type(bucket).__name__}."
        )
    for patch in bucket:
        if not isinstance(patch, tuple) or len(patch) != 3:
            raise WeightUpdateError(
                "a patch is (name, indices, values); whole tensors come in a dict."
            )
        yield patch
