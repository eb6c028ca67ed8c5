"""New weights for a live model: staged, checked, then written in place between two steps."""

import threading
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.models.weights import TIED, Slot, param_table, read, slots, write


class WeightUpdate:
    """A weight update on its way. It was checked when it was made, so what is left to do cannot be refused."""

    def __init__(self, version: int, tensors: list[tuple[Slot, Tensor]]) -> None:
        self.version = version
        self.tensors = tensors
        self._applied = threading.Event()

    @property
    def params(self):
        return frozenset(slot.param for slot, _ in self.tensors)

    def done(self) -> bool:
        """Whether the new weights serve."""
        return self._applied.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for at most `timeout` seconds; returns `done()`."""
        return self._applied.wait(timeout)

    def result(self, timeout: float | None = None) -> int:
        """Wait until they serve; returns the version. Raises `WeightUpdateError` after `timeout` seconds.

        The wait needs somebody to call `step()`; a blocking update does not.
        """
        if not self._applied.wait(timeout):
            raise WeightUpdateError(
                f"weight version {self.version} is not applied after {timeout} s; is step() called?"
            )
        return self.version

    def write_to(self, params: dict[str, Tensor]) -> None:
        """Write every tensor into its place and let go of it."""
        for slot, tensor in self.tensors:
            write(params, slot, tensor)
        self.tensors = []
        self._applied.set()


class WeightSyncManager:
    """Owns the version of one model's weights and the updates that wait for it.

    A state dict uses the checkpoint's Hugging Face names, unfused, and may name only what changed. Everything is
    checked before anything is written; a refused update leaves the old version serving.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.version = 0
        self.pending: deque[WeightUpdate] = deque()
        self._slots = slots(param_table(model.spec))
        self._newest = 0  # version of the newest update, pending or applied

    def stage(
        self,
        weights: Mapping[str, Tensor],
        *,
        version: int | None = None,
        copy: bool = True,
        complete=False,
        check_finite=False,
    ) -> WeightUpdate:
        """Check a state dict and queue it. With `copy` the tensors are the caller's again when this returns.

        Raises `WeightUpdateError`, with nothing changed.
        """
        staged = [(self._slots[name], tensor) for name, tensor in self._checked(weights).items()]
        if version is None:
            version = self._newest + 1
        if not isinstance(version, int) or isinstance(version, bool):
            raise WeightUpdateError(f"version={version!r} must be an integer.")
        if version <= self._newest:
            raise WeightUpdateError(f"version={version} is not newer than {self._newest}; leave it out or raise it.")
        if copy:
            staged = [(slot, self._copy(slot, tensor)) for slot, tensor in staged]
        update = WeightUpdate(version, staged)
        self._newest = version
        self.pending.append(update)
        return update

    def finish(self) -> int:
        """Write the oldest pending update; returns the version that now serves. Nothing may be in flight."""
        update = self.pending.popleft()
        with torch.no_grad():
            update.write_to(self.model.params)
        self.version = update.version
        return self.version

    def start_sync(self, new_weights: Mapping[str, Tensor]) -> None:
        """Stage an update; it is applied by a later `maybe_finish_sync`."""
        self.stage(new_weights)

    def maybe_finish_sync(self) -> bool:
        """Apply the oldest pending update, if there is one."""
        if not self.pending:
            return False
        self.finish()
        return True

    def sync_blocking(self, new_weights: Mapping[str, Tensor]) -> None:
        """Stage an update and apply it, after those that are pending."""
        self.stage(new_weights, copy=False)
        while self.maybe_finish_sync():
            pass

    def _checked(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(weights, Mapping) or not weights:
            raise WeightUpdateError("weights must be a non-empty state dict: checkpoint names to tensors.")
        for name, tensor in weights.items():
            slot = self._slots.get(TIED[name] if name in TIED and name not in self._slots else name)
            if slot is None:
                raise WeightUpdateError(f"{name!r} is not a tensor of this model; names are those of its checkpoint.")
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise WeightUpdateError(f"{name!r} must be a floating point tensor, not {kind}.")
            if tuple(tensor.shape) != slot.shape:
                raise WeightUpdateError(f"{name!r} has shape {tuple(tensor.shape)}, expected {slot.shape}.")
        return self._without_tied(weights)

    def _without_tied(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = dict(weights)
        for name, target in TIED.items():
            if name in kept and name not in self._slots:
                head = kept.pop(name)
                tied = kept[target] if target in kept else self._newest_value(self._slots[target])
                if not torch.equal(head.to(tied.device, tied.dtype), tied):
                    raise WeightUpdateError(f"{name!r} is tied to {target!r} in this model and differs from it.")
        return kept

    def _newest_value(self, slot: Slot) -> Tensor:
        """What a place will hold once the pending updates are applied."""
        staged = [tensor for update in self.pending for where, tensor in update.tensors if where == slot]
        return staged[-1] if staged else read(self.model.params, slot)

    def _copy(self, slot: Slot, tensor: Tensor) -> Tensor:
        own = self.model.params[slot.param]
        return tensor.detach().to(device=own.device, dtype=own.dtype, copy=True)
