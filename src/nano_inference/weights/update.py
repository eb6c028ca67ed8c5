"""A weight set by the names of its checkpoint, and one update of it: its buckets are checked and
put aside, with nothing written; then all of it is written between two steps, or nothing.
"""

import hashlib
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.fields.options import is_whole
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.fused import fused_tensors, unfused
from nano_inference.models.parameters.slots import Slot, named_slots
from nano_inference.models.parameters.storage import form_of
from nano_inference.models.parameters.table import HEAD, param_table
from nano_inference.models.parameters.values import (
    WEIGHT_DTYPES,
    as_held,
    holds_numbers,
    patch,
    read,
    write,
)
from nano_inference.models.spec.text_part import is_of_another_part
from nano_inference.ops.formats import Format
from nano_inference.ops.quantised import quantise_weight
from nano_inference.types import KvPolicy

MOST_VERSIONS = 2**63  # what travels between processes has 64 bits
FINITE_RUN = 2**22  # numbers that are looked at in one piece
NOT_A_TENSOR = "is not a tensor of this model; names are those of its checkpoint."


class OtherRanks(Protocol):
    """The other ranks' parts of an update; all ranks write it, or none."""

    def give(
        self, update: "WeightUpdate", name: str, values: Tensor, indices: Tensor | None
    ) -> None:
        """Send the other ranks their parts of a checked tensor, or of single numbers of one."""
        ...

    def settle(self, update: "WeightUpdate") -> None:
        """Wait until the other ranks have staged their parts."""
        ...

    def apply(self, update: "WeightUpdate") -> None:
        """Write the staged parts."""
        ...

    def discard(self, update: "WeightUpdate") -> None:
        """Forget the staged parts."""
        ...

    def whole(self, name: str) -> Tensor:
        """Return a tensor as a checkpoint has it, joined from all ranks."""
        ...


class WeightSet:
    """The weights of one model, as they stand in its parameters.

    Args:
        model: whose parameters they are.
        shares: the other ranks that hold parts of the model; None: there are none.

    Attributes:
        slots: where each tensor goes that an update may name, in the whole model; tied heads too.
        own: the same in this rank's part of the model.
        fused: names of several checkpoint tensors in one piece.
        shapes: of every tensor that an update may name; some names are parts of others.
        names: of the checkpoint's tensors.
    """

    def __init__(self, model: Decoder, shares: OtherRanks | None = None) -> None:
        table = param_table(model.part.whole)
        own_table = param_table(model.part.whole, model.part)
        self.model, self.shares = model, shares
        self.slots, self.own = named_slots(table), named_slots(own_table)
        self.fused = fused_tensors(table)
        self.shapes = {name: fused.shape for name, fused in self.fused.items()}
        self.shapes |= {name: slot.shape for name, slot in self.slots.items()}
        self.names = [name for name, slot in self.slots.items() if slot.tied_to is None]
        self._in_float32 = {param.name for param in table if param.keep_float32}
        self._codes = {param.name: param.codes for param in table if param.codes is not None}
        # of what this rank holds
        found = {param.codes: form_of(model.params.get(param.name)) for param in own_table}
        self._forms = {codes: form for codes, form in found.items() if form is not None}

    def passes_over(self, name: object) -> bool:
        """Whether a tensor is of a part of the checkpoint that this engine does not run."""
        text_part = self.model.part.whole.is_text_part
        return text_part and isinstance(name, str) and is_of_another_part(name)

    def dtype_of(self, name: str) -> torch.dtype:
        """How a tensor is stored, on whichever rank."""
        kept = self.slots[name].param in self._in_float32
        return torch.float32 if kept else self.model.dtype

    def is_quantised(self, name: str) -> bool:
        """Whether a tensor is stored as codes, on whichever rank."""
        return bool(self._forms) and self.slots[name].param in self._codes

    def form_of(self, name: str) -> Format | None:
        """The format of a tensor; None: it is stored as it is, or other ranks alone know."""
        return self._forms.get(self._codes.get(self.slots[name].param))

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the dtype that it is stored in. Raises `WeightUpdateError`."""
        if name not in self.slots:
            raise WeightUpdateError(f"{name!r:.200} {NOT_A_TENSOR}")
        if self.shares is not None:
            return self.shares.whole(self.slots[name].tied_to or name)
        return read(self.model.params, self.own[name])

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors: views, or copies where weights are packed or other ranks hold parts."""
        return {name: self.tensor(name) for name in self.names}

    def checksum(self) -> dict[str, str]:
        """SHA-256 of each tensor: its bytes row by row, in the dtype that it is stored in."""
        return {name: _sha256(self.tensor(name)) for name in self.names if self._holds(name)}

    def _holds(self, name: str) -> bool:
        """Whether this engine has any of a tensor: of engines in lockstep each has some of the
        experts.
        """
        return self.shares is not None or math.prod(self.own[name].local_shape) > 0


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
    BORROW = auto()  # they are written into place at once, or copied; cast on the way


@dataclass(frozen=True, slots=True)
class Change:
    """A checked piece of an update: a whole checkpoint tensor, or with `indices` some numbers of
    it.
    """

    slot: Slot
    values: Tensor
    indices: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def clone(self) -> "Change":
        """The same in memory of its own."""
        indices = None if self.indices is None else self.indices.clone()
        return Change(self.slot, self.values.clone(), indices)

    def apply(self, params: dict[str, Any]) -> None:
        """Write it into its place."""
        if self.indices is None:
            write(params, self.slot, self.values)
        else:
            patch(params, self.slot, self.indices, self.values)


class StagedChanges:
    """What one rank has put aside of one update: `changes`, and those of a tied head, which is
    compared and never written.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.heads: list[Change] = []

    def add(self, change: Change) -> None:
        """Put a checked piece aside."""
        (self.changes if change.slot.tied_to is None else self.heads).append(change)

    @property
    def params(self) -> frozenset[str]:
        """The decoder's names of the parameters that it changes."""
        return frozenset(change.slot.param for change in self.changes)

    def require_tied(
        self, params: dict[str, Any], before: Iterable["StagedChanges"], asleep: bool = False
    ) -> None:
        """Raise `WeightUpdateError` unless a tied head becomes what its tensor becomes, after the
        updates `before` this one. The memory of weights that are `asleep` is not read.
        """
        if not self.heads:
            return
        head_slot = self.heads[0].slot
        slot = replace(head_slot, name=head_slot.tied_to, tied_to=None)
        pending = [each for staged in before for each in staged.changes if each.slot == slot]
        own = [change for change in self.changes if change.slot == slot]
        both = [*pending, *self.heads], [*pending, *own]
        if asleep and any(all(each.indices is not None for each in part) for part in both):
            raise WeightUpdateError(
                f"{HEAD!r} is tied to {head_slot.tied_to!r}, which cannot be read while the "
                "weights are asleep; send both, or call wake() first."
            )
        head, tied = (_value_of(params, slot, part) for part in both)
        if not torch.equal(head, tied):
            raise WeightUpdateError(
                f"{HEAD!r} is tied to {head_slot.tied_to!r} in this model and differs from it."
            )

    def write(self, params: dict[str, Any]) -> None:
        """Write every change into its place."""
        for change in self.changes:
            change.apply(params)


class WeightUpdate:
    """A weight update on its way: being received, then waiting between two steps, then serving. Or
    it failed.

    Attributes:
        params: the decoder's names of the parameters that it touches; empty while it is received.
        staged_bytes: memory that it held beside the weights while it waited.
        kv_policy: what becomes of running requests when it is applied; None: the engine's default.
        error: why it failed; None: it did not.
        staged: what was put aside and is not written yet.
    """

    def __init__(self, kv_policy: KvPolicy | None = None, shares: OtherRanks | None = None) -> None:
        self.kv_policy: KvPolicy | None = kv_policy
        self.params: frozenset[str] = frozenset()
        self.staged_bytes = 0
        self.error: WeightUpdateError | None = None
        self.staged = StagedChanges()
        self._whole: frozenset[str] = frozenset()
        self._version: int | None = None
        self._shares = shares
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

        Another thread must call `step()` meanwhile; a blocking update does not.
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

    # The rest is the manager's.

    def stage(
        self, version: int, staged: StagedChanges, staged_bytes: int, whole: Iterable[str]
    ) -> None:
        """Everything was received and checked. `whole`: checkpoint names of the tensors that it
        gives as a whole.
        """
        staged.heads.clear()  # they were compared
        self._version, self.staged, self.staged_bytes = version, staged, staged_bytes
        self._whole, self.params = frozenset(whole), staged.params

    def is_whole(self, names: Iterable[str]) -> bool:
        """Whether it gives every one of these checkpoint tensors, so that nothing before it
        matters.
        """
        return self._whole >= set(names)

    def write_to(self, params: dict[str, Any]) -> None:
        """Write every change into its place and let go of it."""
        if self._shares is not None:
            self._shares.apply(self)
        self.staged.write(params)
        for device in {params[name].device for name in self.params}:
            # until then the values are still read, and a fault of theirs is this update's
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self.staged = StagedChanges()

    def copy_borrowed(self) -> None:
        """Hold copies of all tensors that it holds."""
        self.staged.changes = [each.clone() for each in self.staged.changes]
        self.staged_bytes = sum(each.nbytes for each in self.staged.changes)

    def succeed(self) -> None:
        """It serves."""
        self._ended.set()

    def fail(self, error: WeightUpdateError) -> None:
        """It will never serve. The first reason stays."""
        if not self._ended.is_set():
            self.error, self.staged = error, StagedChanges()
            self._ended.set()
            if self._shares is not None:
                self._shares.discard(self)


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


def _value_of(params: dict[str, Any], slot: Slot, changes: list[Change]) -> Tensor:
    """What a rank's part of a checkpoint tensor is after some changes of it, in the model's
    dtype.
    """
    dtype, device = params[slot.param].dtype, params[slot.param].device
    whole = max(
        (place for place, change in enumerate(changes) if change.indices is None), default=-1
    )
    value = read(params, slot) if whole < 0 else as_held(params, slot, changes[whole].values)
    if whole + 1 < len(changes):
        value = value.clone(memory_format=torch.contiguous_format)
    for change in changes[whole + 1 :]:
        assert change.indices is not None
        value.view(-1).index_copy_(0, change.indices.to(device), change.values.to(device, dtype))
    return value


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


def _sha256(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
