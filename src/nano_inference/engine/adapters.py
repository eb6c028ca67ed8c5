"""The adapters of an engine: loaded, updated while requests run, and unloaded.

An adapter belongs to those who use it: a request keeps the version that it began with (or goes on
with a new one, by `kv_policy`), and the memory of a version goes when the last of them has ended.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.errors import AdapterError
from nano_inference.models.decoder import Decoder
from nano_inference.models.lora import (
    LoraSettings,
    Pair,
    adapter_of,
    pairs_of,
    read_folder,
    settings_of,
    targets_of,
)
from nano_inference.ops.lora import Adapter
from nano_inference.options import is_whole
from nano_inference.types import KvPolicy

MOST_NAME = 256  # characters
POLICIES = tuple(policy for policy in get_args(KvPolicy) if policy != "wait")


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that requests may ask for.

    Attributes:
        name: by which they do.
        version: that serves.
        rank: the largest of its matrices.
        targets: kinds of modules that it changes.
        num_bytes: of its numbers.
    """

    name: str
    version: int
    rank: int
    targets: tuple[str, ...]
    num_bytes: int


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
        spec = self._model.part.whole
        if not self._most:
            raise AdapterError("this engine takes no adapters; set max_loras to how many it may.")
        if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:  # pyright: ignore
            raise AdapterError(f"name={name!r} must be a text of 1 to {MOST_NAME} characters.")
        if kv_policy not in POLICIES:
            raise AdapterError(
                f"kv_policy={kv_policy!r} is none of {', '.join(map(repr, POLICIES))}."
            )
        if isinstance(source, Mapping):
            tensors, settings = dict(source), settings or LoraSettings()
        else:
            tensors, config = read_folder(Path(source))
            settings = settings or settings_of(config)
        pairs = pairs_of(tensors, settings, spec, self._most_rank)
        return self.take(name, pairs, version, kv_policy)

    def take(
        self,
        name: str,
        pairs: Mapping[str, Pair],
        version: int | None = None,
        kv_policy: KvPolicy = "finish_old",
    ) -> AdapterInfo:
        """Serve checked matrices; they are copied."""
        with self._lock:
            if name not in self._loaded and len(self._loaded) >= self._most:
                raise AdapterError(
                    f"{len(self._loaded)} adapters are loaded, as many as max_loras allows; unload "
                    f"one of {', '.join(map(repr, sorted(self._loaded)))}."
                )
            number = self._next_version(name, version)
            spec = self._model.part.whole
            adapter = adapter_of(name, number, pairs, spec, self._model.device)
            self._shared.change_adapter(adapter, kv_policy)
            self._newest[name] = number
            self._infos[name] = self._info(adapter, pairs)
            return self._infos[name]

    def unload(self, name: str) -> None:
        """See `InferenceEngine.unload_adapter`."""
        with self._lock:
            if name not in self._loaded:
                loaded = ", ".join(map(repr, sorted(self._loaded))) or "none is"
                raise AdapterError(f"adapter {name!r} is not loaded; these are: {loaded}.")
            with self._shared.lock:
                del self._loaded[name]
            del self._infos[name]

    def infos(self) -> list[AdapterInfo]:
        """Those that requests may ask for, by name."""
        with self._lock:
            return [self._infos[name] for name in sorted(self._infos)]

    def _next_version(self, name: str, version: int | None) -> int:
        newest = self._newest.get(name, 0)
        if version is None:
            return newest + 1
        if not is_whole(version, 0) or version <= newest:
            raise AdapterError(
                f"version={version!r} of adapter {name!r} must be a whole number above {newest}."
            )
        return version

    def _info(self, adapter: Adapter, pairs: Mapping[str, Pair]) -> AdapterInfo:
        targets: dict[str, Any] = targets_of(self._model.part.whole)
        kinds = sorted({targets[place].kind for place in pairs})
        rank = max(len(pair.a) for pair in pairs.values())
        return AdapterInfo(adapter.name, adapter.version, rank, tuple(kinds), adapter.num_bytes)
