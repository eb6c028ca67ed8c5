"""An adapter merged into the weights: W + scale * B A, computed in float32 in one order and rounded
once to the dtype of W. A step then computes no adapter.

Merged weights are other numbers than weights with an adapter beside them, so samples of the two
have other bits. That is why it is a setting and never done by itself. It is an update of the
weights like any other: the version rises, and no cached block of the old one matches.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.engine.weights.sync import Updates
from nano_inference.errors import AdapterError, AdapterNotFound
from nano_inference.models.decoder import Decoder
from nano_inference.models.lora import targets_of
from nano_inference.ops.lora import HEAD, Adapter, LoraPart


class Merging:
    """The merged adapter of one engine; None or one. For any thread.

    Args:
        model: that is adapted.
        updates: that write it.
        shared: the loop whose requests it computes.
    """

    def __init__(self, model: Decoder, updates: Updates, shared: SharedLoop) -> None:
        self._model, self._updates, self._shared = model, updates, shared
        self._live = shared.loop.sequences
        self._lock = threading.Lock()
        self._originals: dict[str, Tensor] = {}

    def merge(self, name: str) -> int:
        """See `InferenceEngine.merge_adapter`."""
        with self._lock:
            adapter = self._mergeable(name)
            own = self._parts(adapter)
            with self._shared.lock:
                self._shared.handle()
                self._require_quiet(name)
                self._live.merged = name
                self._reserve(name)
            try:
                tensor = self._updates.manager.tensor
                originals = {key: tensor(key).clone() for key in own}
                self._write({key: merged(originals[key], part) for key, part in own.items()})
            except BaseException:
                self._free()
                raise
            self._originals = originals
            self._updates.manager.reserved = (_why(name), 0)
            return self._updates.manager.version

    def unmerge(self) -> int:
        """See `InferenceEngine.unmerge_adapter`."""
        with self._lock:
            name = self._live.merged
            if name is None:
                raise AdapterError("no adapter is merged.")
            self._reserve(name)
            try:
                self._write(self._originals)
            except BaseException:
                self._updates.manager.reserved = (_why(name), 0)
                raise
            self._originals = {}
            self._free()
            return self._updates.manager.version

    def _mergeable(self, name: str) -> Adapter:
        """Raise `AdapterError` for an adapter, or a model, that cannot be merged."""
        if self._live.merged is not None:
            raise AdapterError(
                f"adapter {self._live.merged!r} is merged already; unmerge_adapter() it first."
            )
        adapter = self._live.adapters.get(name)
        if adapter is None:
            raise AdapterNotFound(f"adapter {name!r} is not loaded.")
        assert isinstance(adapter, Adapter)
        spec = self._model.part.whole
        if HEAD in adapter.parts and spec.tie_word_embeddings:
            raise AdapterError(
                f"adapter {name!r} adapts the head, which is the embedding in this model; merged "
                "it would change the embedding too."
            )
        return adapter

    def _parts(self, adapter: Adapter) -> dict[str, LoraPart]:
        """The adapter's parts by the checkpoint's names."""
        found: dict[str, LoraPart] = {}
        every = {(p, part.first): part for p, parts in adapter.parts.items() for part in parts}
        manager = self._updates.manager
        for target in targets_of(self._model.part.whole).values():
            part = every.get((target.param, target.slot.start))
            if part is not None and target.slot.parts is None:
                found[f"{target.module}.weight"] = part
                del every[target.param, part.first]
        unknown = [name for name in found if name not in manager.shapes]
        if every or unknown:
            raise AdapterError(
                f"adapter {adapter.name!r} adapts a weight that has no tensor of its own in the "
                f"checkpoint ({(unknown or sorted(param for param, _ in every))[0]}); serve it "
                "unmerged."
            )
        return found

    def _require_quiet(self, name: str) -> None:
        """Raise `AdapterError` while something would see half of it: with the lock."""
        manager = self._updates.manager
        if manager.pending or manager.is_open:
            raise AdapterError(f"adapter {name!r} cannot be merged while an update is on its way.")
        for seq in self._live.by_id.values():
            if seq.adapter is not None:
                raise AdapterError(
                    f"adapter {name!r} cannot be merged while request {seq.request_id} is computed "
                    f"with adapter {seq.adapter.name!r}; wait for it, or abort it."
                )

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        self._updates.update(dict(weights), True)

    def _reserve(self, name: str) -> None:
        self._updates.manager.reserved = (_why(name), threading.get_ident())

    def _free(self) -> None:
        self._live.merged = None
        self._updates.manager.reserved = None


def merged(weight: Tensor, part: LoraPart) -> Tensor:
    """A weight [out, in] with what an adapter adds to it. Added up one rank after the other, number
    by number, so that neither threads nor sizes decide the order.
    """
    added = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for row, column in zip(part.a, part.b, strict=True):  # [in], [out]
        added += column[:, None] * row[None, :]
    return (weight.float() + added * part.scale).to(weight.dtype)


def _why(name: str) -> str:
    return f"adapter {name!r} is merged into the weights; unmerge_adapter() it first."
