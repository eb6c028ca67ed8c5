"""Weights of one model by checkpoint name, and updates of them. All checked changes of an update
are written between two steps, or none.
"""

import hashlib
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nano_inference.arrays import (
    Device,
    Dtype,
    Tensor,
    as_host,
    host,
    namespace,
    without_gradients,
)
from nano_inference.errors import WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.fused import fused_tensors
from nano_inference.models.parameters.mtp import mtp_table
from nano_inference.models.parameters.slots import Slot, named_slots
from nano_inference.models.parameters.storage import formats_of
from nano_inference.models.parameters.table import HEAD, param_table
from nano_inference.models.parameters.values import as_held, patch, read, write
from nano_inference.models.spec.text_part import is_of_another_part
from nano_inference.ops.formats import Format, Stack
from nano_inference.types import KvPolicy

NOT_A_TENSOR = "is not a tensor of this model; use the names of its checkpoint."


class OtherRanks(Protocol):
    """Other ranks' parts of an update. All ranks write it, or none does."""

    def give(
        self, update: "WeightUpdate", name: str, values: Tensor, indices: Tensor | None
    ) -> None:
        """Send the other ranks their parts of a checked tensor, or of a patch."""
        ...

    def settle(self, update: "WeightUpdate") -> None:
        """Wait until the other ranks have staged their parts."""
        ...

    def apply(self, update: "WeightUpdate") -> None:
        """Write the staged parts."""
        ...

    def discard(self, update: "WeightUpdate") -> None:
        """Discard the staged parts."""
        ...

    def whole(self, name: str) -> Tensor:
        """Return a checkpoint tensor, joined from all ranks."""
        ...


class WeightSet:
    """Weights of one model, as stored in its parameters.

    Args:
        model: Model that holds the parameters.
        shares: Other ranks that hold parts of the model. None if there are none.

    Attributes:
        slots: Slot in the whole model of each tensor that an update may name, including tied heads.
        own: The same slots in this rank's part of the model.
        fused: Names that stand for several checkpoint tensors.
        shapes: Shape of every tensor that an update may name. Some tensors are parts of others.
        names: Names of the checkpoint's tensors.
        optional: Names of tensors that a complete update may omit, because they only draft.
    """

    def __init__(self, model: Decoder, shares: OtherRanks | None = None) -> None:
        spec = model.part.whole
        drafting = tuple(each for each in mtp_table(spec) if each.name in model.params)
        table = (*param_table(spec), *drafting)
        own_table = (*param_table(spec, model.part), *drafting)
        self.model, self.shares = model, shares
        self.slots, self.own = named_slots(table), named_slots(own_table)
        self.fused = fused_tensors(table)
        self.shapes = {name: fused.shape for name, fused in self.fused.items()}
        self.shapes |= {name: slot.shape for name, slot in self.slots.items()}
        self.names = [name for name, slot in self.slots.items() if slot.tied_to is None]
        self.optional = {source.name for param in drafting for source in param.sources}
        self._in_float32 = {param.name for param in table if param.keep_float32}
        self._forms = formats_of(model.params)
        # with those of other ranks
        self._codes = self._forms.keys() | {
            param.name for param in table if param.codes in ("layers", "head")
        }

    def passes_over(self, name: object) -> bool:
        """Return True if a tensor belongs to a part of the checkpoint that this engine does not
        run.
        """
        spec = self.model.part.whole
        if not isinstance(name, str) or name in self.slots or name in self.fused:
            return False
        return spec.ignores(name) or (spec.is_text_part and is_of_another_part(name))

    def dtype_of(self, name: str) -> Dtype:
        """Return the dtype in which a tensor is stored, on any rank."""
        kept = self.slots[name].param in self._in_float32
        return namespace(self.model.dtype).float32 if kept else self.model.dtype

    def is_quantised(self, name: str) -> bool:
        """Return True if a tensor is stored as codes, on any rank."""
        return bool(self._forms) and self.slots[name].param in self._codes

    def form_of(self, name: str) -> Format | None:
        """Return the format of a quantized tensor. None if it is stored plainly, or only on other
        ranks.
        """
        slot = self.own.get(name)
        if slot is None:
            return None
        form = self._forms.get(slot.param)
        return form.at(slot.start) if isinstance(form, Stack) else form

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in its stored dtype. Raises `WeightUpdateError`."""
        if name not in self.slots:
            raise WeightUpdateError(f"{name!r:.200} {NOT_A_TENSOR}")
        if self.shares is not None:
            return self.shares.whole(self.slots[name].tied_to or name)
        return read(self.model.params, self.own[name])

    def holds(self, name: str, tensor: Tensor) -> bool:
        """Return True if a tensor, stored as the model stores it, equals the live one.

        Raises `WeightUpdateError` for codes that several ranks hold.
        """
        if tuple(tensor.shape) != self.slots[name].shape:
            return False
        if self.shares is None:
            params, slot = self.model.params, self.own[name]
            served = read(params, slot)
            return namespace(served).equal(served, as_held(params, slot, tensor))
        if self.is_quantised(name):
            raise WeightUpdateError(
                f"{name!r} cannot be compared with codes on several ranks; use one rank."
            )
        served = self.tensor(name)
        return namespace(served).equal(served, tensor.to(served.device, served.dtype))

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors: views, or copies if weights are packed or other ranks hold parts."""
        return {name: self.tensor(name) for name in self.names}

    def checksum(self) -> dict[str, str]:
        """Return the SHA-256 of each tensor, over its bytes row by row in the stored dtype."""
        return {name: _sha256(self.tensor(name)) for name in self.names if self._holds(name)}

    def content_hash(self) -> str:
        """Return one SHA-256 of all tensors: of the lines "name checksum" of `checksum`, by name.

        It depends only on the values in their stored dtype, not on the processor and its packing,
        nor on tensors that only drafts read.
        """
        lines = (
            f"{name} {checksum}\n"
            for name, checksum in sorted(self.checksum().items())
            if name not in self.optional
        )
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _holds(self, name: str) -> bool:
        """Return True if this engine holds any part of a tensor. Each engine in lockstep holds only
        some experts.
        """
        return self.shares is not None or math.prod(self.own[name].local_shape) > 0


@dataclass(frozen=True, slots=True)
class Change:
    """Checked part of an update: a whole checkpoint tensor or, with `indices`, some of its
    elements.
    """

    slot: Slot
    values: Tensor
    indices: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the change holds."""
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def clone(self) -> "Change":
        """Return a copy with its own memory."""
        indices = None if self.indices is None else self.indices.clone()
        return Change(self.slot, self.values.clone(), indices)

    def apply(self, params: dict[str, Any]) -> None:
        """Write the change into the parameters."""
        if self.indices is None:
            write(params, self.slot, self.values)
        else:
            patch(params, self.slot, self.indices, self.values)


class StagedChanges:
    """Changes of one update that are staged on one rank. Changes of a tied head are kept
    separately, only for comparison.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.heads: list[Change] = []

    def add(self, change: Change) -> None:
        """Stage a checked change."""
        (self.changes if change.slot.tied_to is None else self.heads).append(change)

    @property
    def params(self) -> frozenset[str]:
        """Decoder's names of the changed parameters."""
        return frozenset(change.slot.param for change in self.changes)

    def require_tied(
        self, params: dict[str, Any], before: Iterable["StagedChanges"], asleep: bool = False
    ) -> None:
        """Raise `WeightUpdateError` unless a tied head will equal its tensor once the updates
        `before` this one are written. The memory of weights that are `asleep` is not read.
        """
        if not self.heads:
            return
        head_slot = self.heads[0].slot
        slot = replace(head_slot, name=head_slot.tied_to, tied_to=None)
        pending = [each for staged in before for each in staged.changes if each.slot == slot]
        changes = [change for change in self.changes if change.slot == slot]
        both = [*pending, *self.heads], [*pending, *changes]
        if asleep and any(all(each.indices is not None for each in part) for part in both):
            raise WeightUpdateError(
                f"{HEAD!r} is tied to {head_slot.tied_to!r}, which cannot be read while the "
                "weights are asleep; send both, or call wake() first."
            )
        head, tied = (_value_of(params, slot, part) for part in both)
        if not namespace(head).equal(head, tied):
            raise WeightUpdateError(
                f"{HEAD!r} is tied to {head_slot.tied_to!r} in this model but differs from it; "
                f"send equal tensors, or omit {HEAD!r}."
            )

    def write(self, params: dict[str, Any]) -> None:
        """Write every change into the parameters."""
        for change in self.changes:
            change.apply(params)


class WeightUpdate:
    """Weight update in progress: being received, then pending, then live or failed.

    Attributes:
        params: Decoder's names of the parameters that it changes. Empty while it is received.
        staged_bytes: Bytes of staging memory that it holds while it is pending.
        kv_policy: Effect on running requests. None is the engine's default.
        error: Reason of the failure. None if it has not failed.
        staged: Staged changes that are not written yet.
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
        """Version of the update. Raises `WeightUpdateError` while it is received, since the trainer
        may still name one.
        """
        if self._version is None:
            raise self.error or WeightUpdateError(
                "the weight update has no version while it is being received; call result() first."
            )
        return self._version

    def done(self) -> bool:
        """Return True if the new weights are live or the update has failed."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for at most `timeout` seconds. Return `done()`."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> int:
        """Wait until the weights are live and return their version. Raises `WeightUpdateError` if
        the update failed or did not finish in time.

        Another thread must call `step()` meanwhile. Blocking updates need no such thread.
        """
        if not self._ended.wait(timeout):
            subject = (
                "the weight update" if self._version is None else f"weight version {self._version}"
            )
            state = "received" if self._version is None else "applied"
            raise WeightUpdateError(
                f"{subject} was not {state} within {timeout} s; call step() in another thread."
            )
        if self.error is not None:
            raise self.error
        return self.version

    # The methods below are for the manager.

    def stage(
        self, version: int, staged: StagedChanges, staged_bytes: int, whole: Iterable[str]
    ) -> None:
        """Store a received and checked update. `whole` names the checkpoint tensors that it
        replaces as a whole.
        """
        staged.heads.clear()  # already compared
        self._version, self.staged, self.staged_bytes = version, staged, staged_bytes
        self._whole, self.params = frozenset(whole), staged.params

    def is_whole(self, names: Iterable[str]) -> bool:
        """Return True if it replaces all of these checkpoint tensors, so that no earlier update
        matters.
        """
        return self._whole >= set(names)

    @without_gradients
    def write_to(self, params: dict[str, Any]) -> None:
        """Write every change into the parameters and release it."""
        if self._shares is not None:
            self._shares.apply(self)
        self.staged.write(params)
        # the values are read until then, and a device failure must be raised by this update
        wait_for_devices(params[name].device for name in self.params)
        self.staged = StagedChanges()

    @without_gradients
    def copy_borrowed(self) -> None:
        """Replace all staged tensors by copies."""
        self.staged.changes = [each.clone() for each in self.staged.changes]
        self.staged_bytes = sum(each.nbytes for each in self.staged.changes)

    def succeed(self) -> None:
        """Mark the update as live."""
        self._ended.set()

    def fail(self, error: WeightUpdateError) -> None:
        """Mark the update as failed. The first error is kept."""
        if not self._ended.is_set():
            self.error, self.staged = error, StagedChanges()
            self._ended.set()
            if self._shares is not None:
                self._shares.discard(self)


def wait_for_devices(devices: Iterable[Device]) -> None:
    """Wait until the current streams of GPUs have done their work. The CPU has none."""
    for device in set(devices):
        if device.type == "cuda":
            import torch

            torch.cuda.current_stream(device).synchronize()


def _value_of(params: dict[str, Any], slot: Slot, changes: list[Change]) -> Tensor:
    """Return this rank's part of a checkpoint tensor after some changes of it, in the model's
    dtype.
    """
    dtype, device = params[slot.param].dtype, params[slot.param].device
    whole = max(
        (index for index, change in enumerate(changes) if change.indices is None), default=-1
    )
    value = read(params, slot) if whole < 0 else as_held(params, slot, changes[whole].values)
    patches = changes[whole + 1 :]
    if not patches:
        return value
    flat = value.reshape(-1).clone()
    for change in patches:
        assert change.indices is not None
        flat.index_copy_(0, change.indices.to(device), change.values.to(device, dtype))
    return flat.reshape(value.shape)


def _sha256(tensor: Tensor) -> str:
    flat = as_host(tensor).contiguous().reshape(-1).view(host.uint8)
    return hashlib.sha256(flat.data).hexdigest()
