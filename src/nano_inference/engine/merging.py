"""An adapter merged into the weights: W + scale * B A, computed in float32 in one order and rounded
once to the dtype of W. A step then computes no adapter.

Merged weights are other numbers than weights with an adapter beside them, so samples of the two
have other bits. That is why it is a setting and never done by itself. It is an update of the
weights like any other: the version rises, and no cached block of the old one matches.

`Sequences.merging` and `merged` say which adapter that is; they change under the loop's lock alone,
`merged` in the same hold of it as the weights. What a request for an adapter means is asked when it
enters the loop (`settle_adapter`), under that lock too.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from nano_inference.checkpoints.lora import targets_of
from nano_inference.core.versions import being_merged
from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.engine.weight_updates import Updates
from nano_inference.errors import AdapterError, AdapterNotFound, WeightUpdateError
from nano_inference.models.decoder import Decoder
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
        self._originals: dict[str, Tensor] = {}

    def merge(self, name: str) -> int:
        """See `InferenceEngine.merge_adapter`."""
        with ExitStack() as stack:
            with self._shared.lock:
                self._shared.handle()
                own = self._parts(self._mergeable(name))
                self._require_quiet(name)
                self._reserve(name)
                stack.enter_context(self._refusing(name))
                tensor = self._updates.manager.tensor
                originals = {key: tensor(key).clone() for key in own}
            # without the lock: it takes long, and requests without an adapter go on meanwhile
            weights = {key: merged(originals[key], part) for key, part in own.items()}
            return self._write(name, weights, name, originals)

    def unmerge(self) -> int:
        """See `InferenceEngine.unmerge_adapter`."""
        with self._shared.lock:
            self._shared.handle()
            self._require_settled()
            name = self._live.merged
            if name is None:
                raise AdapterError("no adapter is merged.")
            self._require_quiet(name)
            with self._refusing(name):
                return self._write(name, self._originals, None, {})

    @contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Requests for adapters are refused meanwhile; afterwards updates may come again, unless an
        adapter is merged.
        """
        self._live.merging = name
        try:
            yield
        finally:
            with self._shared.lock:
                self._live.merging = None
                if self._live.merged is None:
                    self._updates.manager.reserved = None

    def _write(
        self, name: str, weights: dict[str, Tensor], after: str | None, originals: dict[str, Tensor]
    ) -> int:
        """Write these weights, and note in the same hold of the lock which adapter they hold and
        what they were before. Both or, also after Ctrl-C, neither; returns the version.
        """
        manager = self._updates.manager
        with self._shared.lock:
            self._require_awake(name)
            before = manager.version
            try:
                update = manager.stage_reserved(weights, kv_policy="recompute")
                self._shared.handle()  # nothing keeps it waiting: no update, no sleep
                return update.result(0)
            finally:
                for left in manager.pending.all():  # no other update can be there
                    manager.withdraw(left, WeightUpdateError("it was interrupted."))
                if manager.version != before:
                    self._live.merged, self._originals = after, originals

    def _require_settled(self) -> None:
        """Raise `AdapterError` while another thread merges one."""
        if (merging := self._live.merging) is not None:
            raise AdapterError(f"{being_merged(merging)}; wait for it.")

    def _require_awake(self, name: str) -> None:
        """Raise `AdapterError` while there are no weights to read, or to write."""
        if not self._shared.life.has_weights:
            raise AdapterError(
                f"adapter {name!r} cannot be merged, or unmerged, while the weights are asleep; "
                "wake() the engine first."
            )

    def _mergeable(self, name: str) -> Adapter:
        """Raise `AdapterError` for an adapter, or a model, that cannot be merged."""
        self._require_settled()
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
        self._require_awake(name)
        for seq in self._live.by_id.values():
            if seq.adapter is not None or seq.is_of_merged:
                own = name if seq.adapter is None else seq.adapter.name
                raise AdapterError(
                    f"adapter {name!r} cannot be merged, or unmerged, while request "
                    f"{seq.request_id} is computed with adapter {own!r}; wait for it, or abort it."
                )

    def _reserve(self, name: str) -> None:
        why = f"adapter {name!r} is merged into the weights; unmerge_adapter() it first."
        if not self._updates.manager.reserve(why):
            raise AdapterError(f"adapter {name!r} cannot be merged while an update is on its way.")


def merged(weight: Tensor, part: LoraPart) -> Tensor:
    """A weight [out, in] with what an adapter adds to it. Added up one rank after the other, number
    by number, so that neither threads nor sizes decide the order.
    """
    added = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for row, column in zip(part.a, part.b, strict=True):  # [in], [out]
        added += column[:, None] * row[None, :]
    return (weight.float() + added * part.scale).to(weight.dtype)
