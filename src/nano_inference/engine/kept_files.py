"""Kept blocks that were evicted, in files: written when their memory is reused, read back when a
prompt begins with them.

A file is named by everything that its contents depend on: the model, the arithmetic, the chain of
tokens, the weight version, the adapter, the salt. It holds a checksum of all, is renamed into place
when it is whole, and is known to the engine that wrote it alone: another one, also a later one of
the same folder, never reads it.
"""

import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nano_inference.engine.block_exchange import MOST_BYTES
from nano_inference.engine.runner import ModelRunner
from nano_inference.errors import ConfigError
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.kept import Mark
from nano_inference.kv_cache.manager import EvictedBlock, KVCacheManager
from nano_inference.regular_files import open_regular

logger = logging.getLogger("nano_inference")

DEFAULT_BYTES = 4 << 30
PREFIX, LOCK = "kept-", "lock"
_MAGIC = b"nano-kv1"
_DIGEST = 32
_FARTHEST = 3600.0  # seconds that a timer waits at most


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is known of a file."""

    path: Path
    size: int
    namespace: Namespace
    mark: Mark


class KeptFiles:
    """The files of one engine, in a folder of its own within `folder`. One thread takes and brings
    back; `sweep` is for any.

    Args:
        folder: made, private, where it is missing. What engines that were killed left is removed.
        most_bytes: of all files; beyond that the oldest go.
        cache: whose blocks these are.
        runner: has the blocks.
        identity: names model and arithmetic.
        clock: the cache's, by which marks end.

    Raises `ConfigError` where the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        cache: KVCacheManager,
        runner: ModelRunner,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._runner, self._clock = cache, runner, clock
        self._most_bytes = most_bytes
        (self._shape,) = runner.block_shapes()
        told = (identity, str(runner.storage.keys.dtype), self._shape, cache.block_size)
        self._identity = hashlib.sha256(repr(told).encode()).digest()
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}  # by the block's name, the oldest first
        self._timer: threading.Timer | None = None
        self._wakes = 0.0
        self._closed = False
        self.num_bytes = 0
        self.num_written = 0
        self.num_read = 0
        try:
            self.folder, self._held = _own_folder(folder)
        except OSError as problem:
            raise ConfigError(
                f"kept_cache_folder={str(folder)!r} cannot be used: {problem}"
            ) from problem

    def __len__(self) -> int:
        return len(self._entries)

    # -- out of the cache --------------------------------------------------------------------------

    @torch.inference_mode()
    def take(self, block: EvictedBlock) -> None:
        """Write a block. What cannot be written is lost, and computed again."""
        (data,) = self._runner.read_blocks([block.block_id])
        content = self._content(block.name, block.token_ids, data)
        path = self.folder / hashlib.sha256(self._key(block.name)).hexdigest()
        with self._lock:
            self._remove([block.name] if block.name in self._entries else [])
            if self._closed or len(content) > self._most_bytes:
                return
            self._make_room(len(content))
            if not _write(path, content):
                return
            self._entries[block.name] = _Entry(path, len(content), block.namespace, block.mark)
            self.num_bytes += len(content)
            self.num_written += 1
            self._wake_by(block.mark.until)

    def forget(self, is_dead: Callable[[Namespace], bool]) -> None:
        """Remove the files of these namespaces."""
        with self._lock:
            self._remove([name for name, e in self._entries.items() if is_dead(e.namespace)])

    def sweep(self) -> None:
        """Remove the files whose time is over."""
        with self._lock:
            now = self._clock()
            self._remove([name for name, e in self._entries.items() if e.mark.until <= now])

    def close(self) -> None:
        """Remove all files, and the folder."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            self._entries.clear()
            self.num_bytes = 0
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._held)
            self._held = os.open(os.devnull, os.O_RDONLY)

    # -- back into the cache -----------------------------------------------------------------------

    def missing(self, names: Sequence[int]) -> range:
        """The places in a chain, behind what the cache has, whose blocks are in files."""
        if not self._entries:
            return range(0)
        here, now = self._cache.count(names), self._clock()
        with self._lock:
            found = itertools.takewhile(
                lambda name: (e := self._entries.get(name)) is not None and e.mark.until > now,
                names[here:],
            )
            return range(here, here + sum(1 for _ in found))

    @torch.inference_mode()
    def bring_back(self, token_ids: Sequence[int], prefix: PrefixKeys, places: range) -> None:
        """Put these blocks of a chain into the cache again. Nothing may be in flight.

        A file that is not as it was written, and those behind it, are not read.
        """
        at, size = places.start, self._cache.block_size
        most = max(1, MOST_BYTES // self._block_bytes)
        while at < places.stop:
            names = prefix.hashes[at : min(at + most, places.stop)]
            marks: list[Mark] = []
            parts: list[Tensor] = []
            for place, name in enumerate(names, at):
                read = self._read(name, token_ids[place * size : (place + 1) * size])
                if read is None:
                    break
                marks.append(read[0])
                parts.append(read[1])
            taken = self._put(token_ids, prefix, at, marks, parts) if parts else 0
            at += taken
            if taken < len(names):
                return

    def _put(
        self,
        token_ids: Sequence[int],
        prefix: PrefixKeys,
        start: int,
        marks: Sequence[Mark],
        parts: Sequence[Tensor],
    ) -> int:
        """Blocks from place `start` on; returns how many there was room for."""
        table, cached = self._cache.reserve(token_ids, prefix, start, start + len(parts))
        if len(table) > cached:
            data = torch.stack(list(parts[cached - start : len(table) - start]))
            self._runner.write_blocks(table[cached:], [data])
            self._cache.publish(table, token_ids, prefix, range(cached, len(table)))
        taken = max(0, len(table) - start)
        for end, mark in enumerate(marks[:taken], start + 1):
            if end == start + taken or marks[end - start] != mark:
                self._cache.keep_again(prefix.hashes[:end], mark)
        self._cache.deallocate(table)
        with self._lock:
            self._remove([n for n in prefix.hashes[start : start + taken] if n in self._entries])
        self.num_read += taken
        return taken

    def _read(self, name: int, token_ids: Sequence[int]) -> tuple[Mark, Tensor] | None:
        with self._lock:
            entry = self._entries.get(name)
        if entry is None:
            return None
        try:
            with open_regular(entry.path) as file:
                content = file.read(entry.size + 1)
        except OSError:
            content = b""
        head = len(_MAGIC) + 2 * _DIGEST + 8 * len(token_ids)
        data = torch.frombuffer(bytearray(content[head:] or b"\0"), dtype=torch.uint8)
        if content != self._content(name, token_ids, data):
            logger.warning("The file of a kept block is not as it was written: it is not read.")
            with self._lock:
                self._remove([name] if name in self._entries else [])
            return None
        return entry.mark, data

    # -- files -------------------------------------------------------------------------------------

    @property
    def _block_bytes(self) -> int:
        return self._runner.storage.keys.itemsize * _product(self._shape)

    def _key(self, name: int) -> bytes:
        # the name is a hash of tokens, weight set, version, adapter and salt
        return self._identity + name.to_bytes(_DIGEST, "little")

    def _content(self, name: int, token_ids: Sequence[int], data: Tensor) -> bytes:
        """Of a file: the magic, a checksum of what follows, the name, the token ids, the block."""
        body = hashlib.sha256(self._key(name)).digest() + array("q", token_ids).tobytes()
        body += data.numpy().tobytes()
        return _MAGIC + hashlib.sha256(body).digest() + body

    def _make_room(self, size: int) -> None:
        while self._entries and self.num_bytes + size > self._most_bytes:
            self._remove([next(iter(self._entries))])

    def _remove(self, names: Sequence[int]) -> None:
        for name in names:
            entry = self._entries.pop(name)
            self.num_bytes -= entry.size
            entry.path.unlink(missing_ok=True)

    def _wake_by(self, until: float) -> None:
        """Sweep at that time, also where no step is run until then."""
        if self._timer is not None and self._wakes <= until:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes = until
        wait = min(max(0.0, until - self._clock()), _FARTHEST)
        self._timer = threading.Timer(wait, self._on_time)
        self._timer.daemon = True
        self._timer.start()

    def _on_time(self) -> None:
        with self._lock:
            self._timer = None
            self.sweep()
            if self._entries and not self._closed:
                self._wake_by(min(e.mark.until for e in self._entries.values()))


def _product(shape: Sequence[int]) -> int:
    count = 1
    for each in shape:
        count *= each
    return count


def _write(path: Path, content: bytes) -> bool:
    """Write a file, which is there when it is whole. False: it could not be written."""
    part = path.with_suffix(".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as problem:
        logger.warning("A kept block cannot be written, and is lost: %s", problem)
        part.unlink(missing_ok=True)
        return False
    return True


def _own_folder(folder: Path) -> tuple[Path, int]:
    """A new private folder in this one, and the descriptor that holds its lock; those that nobody
    holds are removed.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / LOCK).open("a", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for path in folder.glob(PREFIX + "*"):
            _remove_if_left(path)
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))  # mode 0700
        held = os.open(own / LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
    return own, held


def _remove_if_left(path: Path) -> None:
    try:
        with (path / LOCK).open("r", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except OSError:  # another engine holds it, or it is none of ours
        return
