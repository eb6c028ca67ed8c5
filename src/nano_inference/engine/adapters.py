"""The adapters of an engine: loaded, updated while requests run, and unloaded.

An adapter belongs to those who use it: a request keeps the version that it began with (or goes on
with a new one, by `kv_policy`), and the memory of a version goes when the last of them has ended.

An adapter can be merged into the weights: W + scale * B A, computed in float32 in one order and
rounded once to the dtype of W. A step then computes no adapter.

Merged weights are other numbers than weights with an adapter beside them, so samples of the two
have other bits. That is why it is a setting and never done by itself. It is an update of the
weights like any other: the version rises, and no cached block of the old one matches.

`Sequences.merging` and `merged` say which adapter that is; they change under the loop's lock alone,
`merged` in the same hold of it as the weights. What a request for an adapter means is asked when it
enters the loop (`settle_adapter`), under that lock too.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nano_inference.checkpoints.loading import read_tensors
from nano_inference.checkpoints.lora import (
    BASE,
    AdapterMemory,
    LoraSettings,
    Pair,
    pairs_of,
    read_folder,
    settings_of,
    split_head,
    targets_of,
)
from nano_inference.core.versions import being_merged
from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.engine.weight_updates import Updates
from nano_inference.errors import (
    AdapterError,
    AdapterNotFound,
    ModelLoadError,
    WeightUpdateError,
)
from nano_inference.fields.options import is_whole
from nano_inference.kv_cache.block_hash import adapter_key
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.slots import named_slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import as_held, read
from nano_inference.ops.lora import HEAD, Adapter, LoraPart
from nano_inference.types import AdapterInfo, KvPolicy

MOST_NAME = 256  # characters
POLICIES = tuple(policy for policy in get_args(KvPolicy) if policy != "wait")


class Adapters:
    """Those of one engine.

    Args:
        model: that they adapt.
        shared: the loop whose requests they compute.
        most: how many may be loaded; 0: the engine takes none.
        most_rank: of their matrices.
    """

    def __init__(self, model: Decoder, shared: SharedLoop, most: int, most_rank: int) -> None:
        self._model, self._shared = model, shared
        self._most, self._most_rank = most, most_rank
        self._memory = AdapterMemory(model.part.whole, model.device, model.ops.placed)
        self._loaded = shared.loop.sequences.adapters
        self._newest: dict[str, int] = {}  # also of those that were unloaded
        self._infos: dict[str, AdapterInfo] = {}
        self._lock = threading.Lock()  # held while one is loaded or unloaded

    def load(
        self,
        name: str,
        source: Mapping[str, Tensor] | str | PathLike[str],
        settings: LoraSettings | None = None,
        version: int | None = None,
        kv_policy: KvPolicy = "finish_old",
    ) -> AdapterInfo:
        """See `InferenceEngine.load_adapter`."""
        self._shared.require_alive()
        self._require(name, kv_policy)
        if isinstance(source, Mapping):
            tensors, settings, folder = dict(source), settings or LoraSettings(), None
        else:
            folder = str(source)
            tensors, config = read_folder(Path(folder))
            settings = settings or settings_of(config)
        tensors, head = split_head(tensors)
        pairs = pairs_of(tensors, settings, self._model.part.whole, self._most_rank)
        if head is not None:
            self._require_own_head(head)
        return self.take(name, pairs, version, kv_policy, folder)

    def load_file(
        self,
        name: str,
        path: str,
        config: Mapping[str, Any],
        version: int | None = None,
        kv_policy: KvPolicy = "finish_old",
    ) -> AdapterInfo:
        """As `load`, of a safetensors file of this machine, which is read once, and of what PEFT's
        `adapter_config.json` says. Raises `AdapterError`.
        """
        self._shared.require_alive()
        self._require(name, kv_policy)
        settings = settings_of(config)
        try:
            tensors = dict(read_tensors(Path(path)))
        except ModelLoadError as problem:
            raise AdapterError(str(problem).replace(path, "the adapter's file")) from problem
        return self.load(name, tensors, settings, version, kv_policy)

    def take(
        self,
        name: str,
        pairs: Mapping[str, Pair],
        version: int | None = None,
        kv_policy: KvPolicy = "finish_old",
        folder: str | None = None,
    ) -> AdapterInfo:
        """Serve checked matrices; they are copied. `folder`: that they were read from."""
        self._require(name, kv_policy)
        with self._lock:
            self._require_place(name)
            number = self._next_version(name, version)
            adapter, rank, kinds, size = self._memory.make(name, number, pairs)
            info = AdapterInfo(name, number, rank, kinds, size, folder)
            return self._serve(adapter, info, kv_policy)

    def unload(self, name: str) -> None:
        """See `InferenceEngine.unload_adapter`."""
        with self._lock:
            if name not in self._loaded:
                loaded = ", ".join(map(repr, sorted(self._loaded))) or "none is"
                raise AdapterNotFound(f"adapter {name!r} is not loaded; these are: {loaded}.")
            with self._shared.lock:
                self._require_apart(name)
                gone = self._loaded.pop(name)
                self._shared.loop.cache.let_go_adapter(adapter_key(gone.name, gone.version))
            del self._infos[name]

    def infos(self) -> list[AdapterInfo]:
        """Those that requests may ask for, by name."""
        with self._lock:
            return [self._infos[name] for name in sorted(self._infos)]

    # -- between engines of one model --------------------------------------------------------------

    def copy_to(self, name: str, path: str) -> None:
        """Write the version of an adapter that serves, to the bit, for `copy_from` of another
        engine. Raises `AdapterError`.
        """
        with self._lock:
            if name not in self._infos:
                raise AdapterNotFound(f"adapter {name!r} is not loaded.")
            adapter, info = self._loaded[name], self._infos[name]
        assert isinstance(adapter, Adapter)
        tensors: dict[str, Tensor] = {}
        places: list[tuple[str, int, float]] = []  # as JSON a number is the same again
        for param, parts in adapter.parts.items():
            for part in parts:
                tensors |= {f"{len(places)}.a": part.a, f"{len(places)}.b": part.b}
                places.append((param, part.first, part.scale))
        save_file(tensors, path, {"info": json.dumps(asdict(info)), "places": json.dumps(places)})

    def copy_from(self, path: str, kv_policy: KvPolicy = "finish_old") -> AdapterInfo:
        """Serve what `copy_to` of another engine wrote, as the same version. Raises
        `AdapterError`.
        """
        self._shared.require_alive()
        parts: dict[str, list[LoraPart]] = {}
        with safe_open(path, framework="pt", device=str(self._model.device)) as file:
            told: dict[str, str] = file.metadata()
            for place, (param, first, scale) in enumerate(json.loads(told["places"])):
                a, b = (file.get_tensor(f"{place}.{half}").clone() for half in "ab")
                parts.setdefault(param, []).append(LoraPart(first, a, b, scale))
        values: dict[str, Any] = json.loads(told["info"])
        values["targets"] = tuple(values["targets"])
        info = AdapterInfo(**values)
        every = {param: tuple(own) for param, own in parts.items()}
        adapter = Adapter(info.name, info.version, every)
        with self._lock:
            self._require_place(info.name)
            return self._serve(adapter, info, kv_policy)

    # -- inside ------------------------------------------------------------------------------------

    def _require(self, name: str, kv_policy: KvPolicy) -> None:
        """Raise `AdapterError` for what no adapter can be called, or updated by."""
        if not self._most:
            raise AdapterError("this engine takes no adapters; set max_loras to how many it may.")
        is_text = isinstance(name, str)  # pyright: ignore
        if not is_text or not 0 < len(name) <= MOST_NAME or not name.isprintable():
            raise AdapterError(
                f"name={name!r} must be a text of 1 to {MOST_NAME} characters that can be printed."
            )
        if kv_policy not in POLICIES:
            raise AdapterError(
                f"kv_policy={kv_policy!r} is none of {', '.join(map(repr, POLICIES))}."
            )

    def _serve(self, adapter: Adapter, info: AdapterInfo, kv_policy: KvPolicy) -> AdapterInfo:
        with self._shared.lock:
            self._require_apart(info.name)
            self._shared.change_adapter(adapter, kv_policy)
        self._newest[info.name] = info.version
        self._infos[info.name] = info
        return info

    def _require_own_head(self, head: Tensor) -> None:
        """Raise `AdapterError` for another head than the model's."""
        slot = named_slots(param_table(self._model.part.whole))["lm_head.weight"]
        with self._shared.lock:
            if not self._shared.life.has_weights:
                return
            own = self._model.params
            is_own = head.shape == slot.shape and torch.equal(
                read(own, slot), as_held(own, slot, head)
            )
        if not is_own:
            raise AdapterError(
                f"lm_head{BASE} has other numbers than the model's head; load the base model that "
                "the adapter was trained with, or save the adapter with "
                "save_embedding_layers=False."
            )

    def _require_apart(self, name: str) -> None:
        """Raise `AdapterError` for an adapter that is part of the weights, or about to be. With the
        loop's lock: so it stays.
        """
        live = self._shared.loop.sequences
        if name in (live.merged, live.merging):
            raise AdapterError(
                f"adapter {name!r} is merged into the weights; unmerge_adapter() it first."
            )

    def _require_place(self, name: str) -> None:
        if name not in self._loaded and len(self._loaded) >= self._most:
            raise AdapterError(
                f"{len(self._loaded)} adapters are loaded, as many as max_loras allows; unload "
                f"one of {', '.join(map(repr, sorted(self._loaded)))}."
            )

    def _next_version(self, name: str, version: int | None) -> int:
        newest = self._newest.get(name, 0)
        if version is None:
            return newest + 1
        if not is_whole(version, 0) or version <= newest:
            raise AdapterError(
                f"version={version!r} of adapter {name!r} must be a whole number above {newest}."
            )
        return version


# -- an adapter in the weights ---------------------------------------------------------------------


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
