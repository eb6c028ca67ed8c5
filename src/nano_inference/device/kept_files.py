"""Files of evicted kept blocks: written before their memory is reused, read back when a prompt
begins with them.

A file's name is a hash of everything that its contents depend on: the model, the numerics, the
chain of tokens, the weight version, the adapter, the salt. The file holds a checksum and is renamed
into place when complete. Only the engine that wrote a file reads it, never another or a later
engine with the same folder.
"""

import contextlib
import fcntl
import hashlib
import itertools
import logging
import math
import os
import re
import secrets
import shutil
import stat
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nano_inference.arrays import Tensor, dtype_name, namespace, without_gradients
from nano_inference.device.blocks import MOST_BYTES, put_blocks
from nano_inference.device.runner import ModelRunner
from nano_inference.errors import ConfigError
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.kept import Mark
from nano_inference.kv_cache.manager import EvictedBlock, KVCacheManager
from nano_inference.system.cache_folder import locked
from nano_inference.system.regular_files import open_regular

logger = logging.getLogger("nano_inference")

DEFAULT_BYTES = 4 << 30
# names: prefix of an engine's folder, lock file within it, lock file common to all engines
_PREFIX, _LOCK, _COMMON_LOCK = "nano-kept-", "lock", "nano-kept.lock"
_OWN = re.compile(_PREFIX + "[0-9a-f]{32}")
_PATIENCE = 10.0  # seconds to wait for the common lock, which is held only briefly
_PAUSE = 30.0  # seconds without writes after a failed write
_MAGIC = b"nano-kv2"
_DIGEST = 32
_FARTHEST = 3600.0  # maximum seconds of a timer


@dataclass(frozen=True, slots=True)
class _Entry:
    """Record of one file."""

    path: Path
    size: int
    namespace: Namespace
    mark: Mark


class KeptFiles:
    """Files of one engine, in its own folder within `folder`.

    One thread calls `take` and `bring_back`. Any thread may call `sweep`.

    Args:
        folder: Parent folder, created with mode 0700 if missing. Folders left by killed engines are
            removed.
        most_bytes: Size limit of all files. The oldest files are removed first.
        cache: Cache of the blocks.
        runner: Runner that holds the blocks' contents.
        identity: Name of model and numerics.
        clock: The cache's clock, which `Mark.until` refers to.

    Raises `ConfigError` if the folder cannot be used.
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
        facts = (identity, dtype_name(runner.storage.keys.dtype), self._shape, cache.block_size)
        self._identity = hashlib.sha256(repr(facts).encode()).digest()
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}  # by block name, the oldest first
        self._timer: threading.Timer | None = None
        self._wakes = 0.0
        self._writes_again = float("-inf")  # time on the clock
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

    @without_gradients
    def take(self, block: EvictedBlock) -> None:
        """Write a block unless its file exists.

        A block that cannot be written is lost and recomputed.
        """
        with self._lock:
            entry = self._entries.pop(block.name, None)
            if entry is not None:  # equal names have equal contents
                self._entries[block.name] = replace(entry, mark=block.mark)
                self._wake_by(block.mark.until)
                return
        if self._clock() < self._writes_again:
            return
        (data,) = self._runner.read_blocks([block.block_id])
        content = self._content(block.name, block.token_ids, data)
        path = self.folder / hashlib.sha256(self._key(block.name)).hexdigest()
        with self._lock:
            if self._closed or len(content) > self._most_bytes:
                return
            self._make_room(len(content))
            if not self._write(path, content):
                return
            self._entries[block.name] = _Entry(path, len(content), block.namespace, block.mark)
            self.num_bytes += len(content)
            self.num_written += 1
            self._wake_by(block.mark.until)

    def forget(self, is_dead: Callable[[Namespace], bool]) -> None:
        """Remove the files whose namespace is dead."""
        with self._lock:
            self._remove([name for name, e in self._entries.items() if is_dead(e.namespace)])

    def sweep(self) -> None:
        """Remove the files that have expired."""
        with self._lock:
            now = self._clock()
            self._remove([name for name, e in self._entries.items() if e.mark.until <= now])

    def close(self) -> None:
        """Remove all files and the folder."""
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
        """Return the chain indices of blocks in files that directly follow the cached blocks."""
        if not self._entries:
            return range(0)
        here, now = self._cache.count(names), self._clock()
        with self._lock:
            on_disk = itertools.takewhile(
                lambda name: (e := self._entries.get(name)) is not None and e.mark.until > now,
                names[here:],
            )
            return range(here, here + sum(1 for _ in on_disk))

    @without_gradients
    def bring_back(self, token_ids: Sequence[int], prefix: PrefixKeys, places: range) -> list[int]:
        """Restore these blocks of a chain to the cache. No step may be in flight.

        Return a block table of the restored blocks and their prefix, which the caller deallocates.
        A damaged file ends the restored range.
        """
        held: list[int] = []
        at, size = places.start, self._cache.block_size
        most = max(1, MOST_BYTES // self._block_bytes)
        while at < places.stop:
            names = prefix.hashes[at : min(at + most, places.stop)]
            marks: list[Mark] = []
            parts: list[Tensor] = []
            for index, name in enumerate(names, at):
                read = self._read(name, token_ids[index * size : (index + 1) * size])
                if read is None:
                    break
                marks.append(read[0])
                parts.append(read[1])
            if parts:
                table = self._put(token_ids, prefix, at, marks, parts)
                self._cache.deallocate(held)
                held = table
            at += len(names)
            if len(held) < at:
                break
        return held

    def _put(
        self,
        token_ids: Sequence[int],
        prefix: PrefixKeys,
        start: int,
        marks: Sequence[Mark],
        parts: Sequence[Tensor],
    ) -> list[int]:
        """Insert blocks from index `start` on, as far as they fit. Return their block table."""
        data = namespace(parts[0]).stack(list(parts))
        table, _ = put_blocks(self._cache, self._runner, token_ids, prefix, start, [data])
        taken = max(0, len(table) - start)
        for end, mark in enumerate(marks[:taken], start + 1):
            if end == start + taken or marks[end - start] != mark:
                self._cache.keep_again(prefix.hashes[:end], mark)
        with self._lock:
            # Blocks without a mark would not be written again on eviction, so their files stay.
            back = self._cache.kept.marks.keys() & self._entries.keys()
            self._remove([name for name in prefix.hashes[start : start + taken] if name in back])
        self.num_read += taken
        return table

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
        xp = namespace(self._runner.storage.keys)
        data = xp.frombuffer(bytearray(content[head:] or b"\0"), dtype=xp.uint8)
        if content != self._content(name, token_ids, data):
            logger.warning("Ignoring the damaged file of a kept block.")
            with self._lock:
                self._remove([name] if name in self._entries else [])
            return None
        return entry.mark, data

    # -- files -------------------------------------------------------------------------------------

    @property
    def _block_bytes(self) -> int:
        return self._runner.storage.keys.itemsize * math.prod(self._shape)

    def _key(self, name: int) -> bytes:
        # a block's name is a hash of tokens, weight set, version, adapter and salt
        return self._identity + name.to_bytes(_DIGEST, "little")

    def _content(self, name: int, token_ids: Sequence[int], data: Tensor) -> bytes:
        """Return a file's bytes: magic, checksum of the rest, name, token ids, block."""
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
            with contextlib.suppress(OSError):  # this engine's end or the next start removes it
                entry.path.unlink()

    def _write(self, path: Path, content: bytes) -> bool:
        """Write a file atomically. Return False on failure, and suspend writes for a while."""
        part = path.with_suffix(".part")
        try:
            part.write_bytes(content)
            part.replace(path)
        except OSError as problem:
            logger.warning(
                "Cannot write a kept block: %s. Blocks evicted in the next %g seconds are lost.",
                problem,
                _PAUSE,
            )
            self._writes_again = self._clock() + _PAUSE
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        return True

    def _wake_by(self, until: float) -> None:
        """Sweep at that time, even if no step runs."""
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


def _own_folder(folder: Path) -> tuple[Path, int]:
    """Create a private folder within `folder`. Return its path and the descriptor that holds its
    lock.

    Folders that no process holds are removed. Raises `OSError`.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError("it is not a directory (links are not followed); name a directory")
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("other users own it or may write there; use your own (chmod go-w)")
    common = _open_lock(folder / _COMMON_LOCK, os.O_CREAT)
    try:
        if not locked(common, _PATIENCE):
            raise TimeoutError(f"another process has held {_COMMON_LOCK} for {_PATIENCE:g} seconds")
        for path in folder.glob(_PREFIX + "*"):
            _remove_if_left(path)
        engine_folder = folder / f"{_PREFIX}{secrets.token_hex(16)}"
        engine_folder.mkdir(mode=0o700)
        held = _open_lock(engine_folder / _LOCK, os.O_CREAT)
        fcntl.flock(held, fcntl.LOCK_EX)
    finally:
        os.close(common)
    return engine_folder, held


def _open_lock(path: Path, flags: int = 0) -> int:
    """Open a regular file without blocking. Links are rejected. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def _remove_if_left(path: Path) -> None:
    """Remove a folder that an engine of this user created and no longer holds."""
    with contextlib.suppress(OSError):  # removed already, without a lock, or in use
        status = path.lstat()
        private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
        if not (private and status.st_uid == os.getuid() and _OWN.fullmatch(path.name)):
            return
        lock = _open_lock(path / _LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
