"""The weights of one model by the names of its checkpoint, and one update of them: the changes that
were checked, which are all written between two steps, or none.
"""

import hashlib
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.fused import fused_tensors
from nano_inference.models.parameters.slots import Slot, named_slots
from nano_inference.models.parameters.storage import form_of
from nano_inference.models.parameters.table import HEAD, param_table
from nano_inference.models.parameters.values import as_held, patch, read, write
from nano_inference.models.spec.text_part import is_of_another_part
from nano_inference.ops.formats import Format
from nano_inference.types import KvPolicy

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


def _sha256(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
