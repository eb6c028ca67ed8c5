"""Adapters in service. A few are loaded at a time, from disk when a sample needs them."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nano_training_service.base import Base
from nano_training_service.errors import Refused


@dataclass
class Weights:
    """Weights of a sampling session.

    Attributes:
        folder: PEFT folder, which changes for weights of kind "inflight". None: the base model.
        path: The client's `tinker://` path. None: unnamed.
        digest: Digest of the adapter if the folder may be overwritten, otherwise empty.
    """

    folder: Path | None
    path: str | None = None
    digest: str = ""


@dataclass
class _Slot:
    name: str
    users: int = 0
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    problem: BaseException | None = None
    loading: asyncio.Task[None] | None = None


class Samplers:
    """Adapter slots of the engine, by folder and digest. The least recently used idle slot is
    evicted. An adapter name is never reused, so cached prefixes never match other weights.
    """

    def __init__(self, base: Base, most: int) -> None:
        self._base, self._most = base, most
        self._slots: OrderedDict[tuple[Path, str], _Slot] = OrderedDict()
        self._count = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def use(self, weights: Weights) -> AsyncIterator[str | None]:
        """Wait for a slot and yield the adapter's name, or None for the base model. The adapter
        stays loaded until the block ends.
        """
        folder = weights.folder
        if folder is None:
            yield None
            return
        slot = await self._take(folder, weights.digest)
        try:
            await slot.loaded.wait()
            if slot.problem is not None:
                raise slot.problem
            yield slot.name
        finally:
            async with self._changed:
                slot.users -= 1
                self._changed.notify_all()

    async def _take(self, folder: Path, digest: str) -> _Slot:
        key = folder, digest
        async with self._changed:
            while True:
                if (slot := self._slots.get(key)) is not None:
                    slot.users += 1
                    self._slots.move_to_end(key)
                    return slot
                unused = next((at for at, each in self._slots.items() if not each.users), None)
                if len(self._slots) < self._most or unused is not None:
                    break
                await self._changed.wait()
            old = None if len(self._slots) < self._most or unused is None else unused
            leaving = None if old is None else self._slots.pop(old).name
            self._count += 1
            slot = self._slots[key] = _Slot(f"sampler-{self._count}", users=1)
        # a separate task, since other requests need the slot even if this one is cancelled
        slot.loading = asyncio.create_task(self._load(key, slot, leaving))
        return slot

    async def _load(self, key: tuple[Path, str], slot: _Slot, leaving: str | None) -> None:
        folder, _ = key
        try:
            if leaving is not None:
                await asyncio.to_thread(self._base.unload_adapter, leaving)
            if not folder.is_dir():
                raise Refused(
                    "these sampler weights were deleted: their model has newer ones "
                    "(max_snapshots), or their session has ended.",
                    410,
                )
            await asyncio.to_thread(self._base.load_adapter, slot.name, folder)
        except BaseException as problem:
            slot.problem = problem
            async with self._changed:
                self._slots.pop(key, None)
                self._changed.notify_all()
        finally:
            slot.loaded.set()
