"""Adapters of an engine: loaded, updated while requests run, unloaded, and merged into the weights.

A request keeps the adapter version that it began with, unless `kv_policy` moves it to a new one.
The memory of a version is released when its last request has ended.

A merge computes W + scale * B A in float32, in a fixed order, and rounds once to the dtype of W.
Steps then compute no adapter.

Merged weights differ numerically from weights with a separate adapter, so their samples have other
bits. Merging is therefore explicit, never automatic. It is an ordinary update of the weights: the
version rises, and no cached block of the old version matches.

`Sequences.merging` names the adapter being merged or unmerged, and `Sequences.merged` the merged
one. Both change only under the loop's lock, and `merged` changes together with the weights.
`settle_adapter` resolves the adapter of a request when the request enters the loop, under the same
lock.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from safetensors import safe_open
from safetensors.numpy import save_file

from nano_inference.arrays import Tensor, as_host, namespace, of_kind
from nano_inference.checkpoints.loading import read_tensors
from nano_inference.checkpoints.lora import (
    BASE,
    AdapterMemory,
    LoraSettings,
    Pair,
    pairs_in,
    pairs_of,
    read_folder,
    settings_of,
    split_head,
    targets_of,
)
from nano_inference.core.versions import being_merged
from nano_inference.device.runner import AdapterRanks
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
from nano_inference.ops.lora import Adapter
from nano_inference.types import AdapterInfo, KvPolicy
from nano_inference.weights.staging import taken
from nano_inference.weights.update import WeightSet

MOST_NAME = 256  # maximum characters of a name
POLICIES = tuple(policy for policy in get_args(KvPolicy) if policy != "wait")


class Adapters:
    """Adapters of one engine.

    Args:
        model: Model that they adapt, or this rank's part of it.
        shared: Loop that computes their requests.
        weights: Weights of the whole model.
        ranks: Other ranks that compute parts of the model. None: there are none.
        most: Maximum number of loaded adapters. 0 disables adapters.
        most_rank: Highest rank of their matrices.
    """

    def __init__(
        self,
        model: Decoder,
        shared: SharedLoop,
        weights: WeightSet,
        ranks: AdapterRanks | None,
        most: int,
        most_rank: int,
    ) -> None:
        self._model, self._shared, self._weights, self._ranks = model, shared, weights, ranks
        self._most, self._most_rank = most, most_rank
        self._memory = AdapterMemory(model.part, model.device, model.ops.placed)
        self._loaded = shared.loop.sequences.adapters
        self._newest: dict[str, int] = {}  # newest version by name, also of unloaded adapters
        self._infos: dict[str, AdapterInfo] = {}
        # whole matrices of loaded adapters, if other ranks compute parts of them
        self._whole: dict[str, dict[str, Pair]] = {}
        self._lock = threading.Lock()  # held while an adapter is loaded or unloaded

    def load(
        self,
        name: str,
        source: Mapping[str, Tensor] | str | PathLike[str],
        settings: LoraSettings | None = None,
        version: int | None = None,
        kv_policy: KvPolicy = "finish_old",
    ) -> AdapterInfo:
        """Load an adapter as `InferenceEngine.load_adapter` documents."""
        self._shared.require_alive()
        self._require(name, kv_policy)
        if isinstance(source, Mapping):
            tensors, settings, folder = dict(source), settings or LoraSettings(), None
        else:
            folder = str(source)
            tensors, config = read_folder(Path(folder))
            settings = settings or settings_of(config)
        device = self._model.device
        tensors, head = split_head({key: taken(each, device) for key, each in tensors.items()})
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
        """Load an adapter from a local safetensors file, which is read once, and the content of
        PEFT's `adapter_config.json`. Raises `AdapterError`.
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
        """Serve a copy of checked matrices. `folder` is the folder that they were read from."""
        self._require(name, kv_policy)
        with self._lock:
            self._require_place(name)
            number = self._next_version(name, version)
            made = self._memory.make(name, number, pairs)
            info = AdapterInfo(name, number, made.rank, made.kinds, made.num_bytes, folder)
            return self._serve(made.adapter, pairs, info, kv_policy)

    def unload(self, name: str) -> None:
        """Unload an adapter as `InferenceEngine.unload_adapter` documents."""
        with self._lock:
            if name not in self._loaded:
                loaded = ", ".join(map(repr, sorted(self._loaded))) or "none"
                raise AdapterNotFound(f"adapter {name!r} is not loaded; loaded adapters: {loaded}.")
            with self._shared.lock:
                self._require_apart(name)
                gone = self._loaded.pop(name)
                self._shared.loop.cache.let_go_adapter(adapter_key(gone.name, gone.version))
            del self._infos[name]
            self._whole.pop(name, None)

    def infos(self) -> list[AdapterInfo]:
        """Return the adapters that requests can name, sorted by name."""
        with self._lock:
            return [self._infos[name] for name in sorted(self._infos)]

    # -- copies between engines of one model -------------------------------------------------------

    def copy_to(self, name: str, path: str) -> None:
        """Write the current version of an adapter bit for bit, for `copy_from` of another engine.
        Raises `AdapterError`.
        """
        with self._lock:
            if name not in self._infos:
                raise AdapterNotFound(f"adapter {name!r} is not loaded.")
            pairs, info = self.pairs(name), self._infos[name]
        tensors: dict[str, Tensor] = {}
        places: list[tuple[str, float]] = []  # JSON preserves numbers exactly
        for key, (a, b, scale) in pairs.items():
            tensors |= {f"{len(places)}.a": a, f"{len(places)}.b": b}
            places.append((key, scale))
        arrays = {key: as_host(tensor).contiguous() for key, tensor in tensors.items()}
        save_file(arrays, path, {"info": json.dumps(asdict(info)), "places": json.dumps(places)})

    def copy_from(self, path: str, kv_policy: KvPolicy = "finish_old") -> AdapterInfo:
        """Serve an adapter that `copy_to` of another engine wrote, with the same version. Raises
        `AdapterError`.
        """
        self._shared.require_alive()
        pairs: dict[str, Pair] = {}
        device = self._model.device
        with safe_open(path, framework="np") as file:
            metadata: dict[str, str] = file.metadata()
            for index, (key, scale) in enumerate(json.loads(metadata["places"])):
                a, b = (
                    of_kind(device, as_host(file.get_tensor(f"{index}.{half}")).clone())
                    for half in "ab"
                )
                pairs[key] = Pair(a, b, scale)
        values: dict[str, Any] = json.loads(metadata["info"])
        values["targets"] = tuple(values["targets"])
        info = AdapterInfo(**values)
        with self._lock:
            self._require_place(info.name)
            made = self._memory.make(info.name, info.version, pairs)
            return self._serve(made.adapter, pairs, info, kv_policy)

    def pairs(self, name: str) -> dict[str, Pair]:
        """Return the whole matrices of a loaded adapter by the names of `targets_of`."""
        if self._ranks is not None:
            return self._whole[name]
        adapter = self._loaded[name]
        assert isinstance(adapter, Adapter)
        return pairs_in(adapter, self._model.part.whole)

    # -- inside ------------------------------------------------------------------------------------

    def _require(self, name: str, kv_policy: KvPolicy) -> None:
        """Raise `AdapterError` for an invalid name or policy."""
        if not self._most:
            raise AdapterError("adapters are disabled; set max_loras to the number to allow.")
        is_text = isinstance(name, str)  # pyright: ignore
        if not is_text or not 0 < len(name) <= MOST_NAME or not name.isprintable():
            raise AdapterError(
                f"name={name!r} must be a printable string of 1 to {MOST_NAME} characters."
            )
        if kv_policy not in POLICIES:
            raise AdapterError(
                f"kv_policy={kv_policy!r} must be one of {', '.join(map(repr, POLICIES))}."
            )

    def _serve(
        self, adapter: Adapter, pairs: Mapping[str, Pair], info: AdapterInfo, kv_policy: KvPolicy
    ) -> AdapterInfo:
        if self._ranks is not None:
            # the caller may change its matrices afterwards, and a card has no room for them
            pairs = {key: Pair(_kept(a), _kept(b), scale) for key, (a, b, scale) in pairs.items()}
            self._ranks.give(adapter, pairs)
        with self._shared.lock:
            self._require_apart(info.name)
            self._shared.change_adapter(adapter, kv_policy)
        if self._ranks is not None:
            self._whole[info.name] = dict(pairs)
        self._newest[info.name] = info.version
        self._infos[info.name] = info
        return info

    def _require_own_head(self, head: Tensor) -> None:
        """Raise `AdapterError` for a head that differs from the model's."""
        with self._shared.lock:
            if not self._shared.life.has_weights:
                return
            try:
                is_own = self._weights.holds("lm_head.weight", head)
            except WeightUpdateError as problem:
                raise AdapterError(
                    f"{problem} Or save the adapter with save_embedding_layers=False."
                ) from problem
        if not is_own:
            raise AdapterError(
                f"lm_head{BASE} differs from the model's head; load the base model that "
                "the adapter was trained with, or save the adapter with "
                "save_embedding_layers=False."
            )

    def _require_apart(self, name: str) -> None:
        """Raise `AdapterError` for an adapter that is merged or being merged. Call it with the
        loop's lock, which prevents a merge meanwhile.
        """
        live = self._shared.loop.sequences
        if name in (live.merged, live.merging):
            raise AdapterError(
                f"adapter {name!r} is merged into the weights; call unmerge_adapter() first."
            )

    def _require_place(self, name: str) -> None:
        if name not in self._loaded and len(self._loaded) >= self._most:
            raise AdapterError(
                f"max_loras={self._most} adapters are already loaded; unload "
                f"one of {', '.join(map(repr, sorted(self._loaded)))}."
            )

    def _next_version(self, name: str, version: int | None) -> int:
        newest = self._newest.get(name, 0)
        if version is None:
            return newest + 1
        if not is_whole(version, 0) or version <= newest:
            raise AdapterError(
                f"version={version!r} of adapter {name!r} must be an integer above {newest}."
            )
        return version


# -- merging ---------------------------------------------------------------------------------------


class Merging:
    """Merged adapter of one engine, or none. Any thread may use it.

    Args:
        adapters: Adapters of the engine.
        model: Model that is adapted.
        updates: Updates that write the weights.
        shared: Loop that computes its requests.
    """

    def __init__(
        self, adapters: Adapters, model: Decoder, updates: Updates, shared: SharedLoop
    ) -> None:
        self._adapters = adapters
        self._model, self._updates, self._shared = model, updates, shared
        self._live = shared.loop.sequences
        self._originals: dict[str, Tensor] = {}

    def merge(self, name: str) -> int:
        """Merge an adapter as `InferenceEngine.merge_adapter` documents."""
        with ExitStack() as stack:
            with self._shared.lock:
                self._shared.handle()
                self._require_mergeable(name)
                pairs = self._pairs(name)
                self._require_quiet(name)
                self._reserve(name)
                stack.enter_context(self._refusing(name))
                tensor = self._updates.manager.weights.tensor
                originals = {key: tensor(key).clone() for key in pairs}
            # slow, so without the lock: requests without an adapter continue meanwhile
            weights = {key: merged(originals[key], pair) for key, pair in pairs.items()}
            return self._write(name, weights, name, originals)

    def unmerge(self) -> int:
        """Restore the weights as `InferenceEngine.unmerge_adapter` documents."""
        with self._shared.lock:
            self._shared.handle()
            self._require_settled()
            name = self._live.merged
            if name is None:
                raise AdapterError("no adapter is merged; call merge_adapter() first.")
            self._require_quiet(name)
            with self._refusing(name):
                return self._write(name, self._originals, None, {})

    @contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Reject requests for adapters during the context. At its end updates are allowed again,
        unless an adapter is merged.
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
        """Write weights and record, under one hold of the lock, the adapter that they contain and
        the original weights. Return the version. Even after Ctrl-C either both are done or neither.
        """
        manager = self._updates.manager
        with self._shared.lock:
            self._require_awake(name)
            before = manager.version
            try:
                update = manager.stage_reserved(weights, kv_policy="recompute")
                self._shared.handle()  # applied now, since no update and no sleep can delay it
                return update.result(0)
            finally:
                for left in manager.pending.all():  # only this update can be pending
                    manager.withdraw(left, WeightUpdateError("the update was interrupted."))
                if manager.version != before:
                    self._live.merged, self._originals = after, originals

    def _require_settled(self) -> None:
        """Raise `AdapterError` while another thread merges an adapter."""
        if (merging := self._live.merging) is not None:
            raise AdapterError(f"{being_merged(merging)}; try again afterwards.")

    def _require_awake(self, name: str) -> None:
        """Raise `AdapterError` while the weights are asleep, because they can then be neither read
        nor written.
        """
        if not self._shared.life.has_weights:
            raise AdapterError(
                f"adapter {name!r} cannot be merged or unmerged while the weights are asleep; "
                "call wake() first."
            )

    def _require_mergeable(self, name: str) -> None:
        """Raise `AdapterError` if an adapter or the model does not allow a merge."""
        self._require_settled()
        if self._live.merged is not None:
            raise AdapterError(
                f"adapter {self._live.merged!r} is already merged; call unmerge_adapter() first."
            )
        if name not in self._live.adapters:
            raise AdapterNotFound(f"adapter {name!r} is not loaded; load it first.")
        spec = self._model.part.whole
        if "lm_head" in self._adapters.pairs(name) and spec.tie_word_embeddings:
            raise AdapterError(
                f"adapter {name!r} adapts the head, which this model shares with the embedding, so "
                "a merge would change both; serve it unmerged."
            )

    def _pairs(self, name: str) -> dict[str, Pair]:
        """Return the adapter's matrices by checkpoint name."""
        targets = targets_of(self._model.part.whole)
        pairs = {
            f"{targets[key].module}.weight": pair
            for key, pair in self._adapters.pairs(name).items()
        }
        known = {
            f"{target.module}.weight" for target in targets.values() if target.slot.parts is None
        } & self._updates.manager.shapes.keys()
        unknown = [weight for weight in pairs if weight not in known]
        if unknown:
            raise AdapterError(
                f"adapter {name!r} adapts a weight that is not a separate tensor of the "
                f"checkpoint ({unknown[0]}); serve it unmerged."
            )
        return pairs

    def _require_quiet(self, name: str) -> None:
        """Raise `AdapterError` while a request with an adapter could see only part of the merge.
        Call it with the lock.
        """
        self._require_awake(name)
        for seq in self._live.by_id.values():
            if seq.adapter is not None or seq.is_of_merged:
                used = name if seq.adapter is None else seq.adapter.name
                raise AdapterError(
                    f"adapter {name!r} cannot be merged or unmerged while request "
                    f"{seq.request_id} uses adapter {used!r}; wait for the request, or abort it."
                )

    def _reserve(self, name: str) -> None:
        why = f"adapter {name!r} is merged into the weights; call unmerge_adapter() first."
        if not self._updates.manager.reserve(why):
            raise AdapterError(
                f"adapter {name!r} cannot be merged during a weight update; wait for the update."
            )


def _kept(matrix: Tensor) -> Tensor:
    """Return a copy on the CPU, float32."""
    return matrix.detach().to(device="cpu", dtype=namespace(matrix).float32, copy=True)


def merged(weight: Tensor, pair: Pair) -> Tensor:
    """Return a weight [out, in] with an adapter merged into it. The rank-1 products are added one
    after the other, element by element, so that neither threads nor sizes change the order.
    """
    xp = namespace(weight)
    added = xp.zeros(weight.shape, dtype=xp.float32, device=weight.device)
    for row, column in zip(pair.a, pair.b.T, strict=True):  # [in], [out]
        added += column[:, None] * row[None, :]
    return (weight.float() + added * pair.scale).to(weight.dtype)
