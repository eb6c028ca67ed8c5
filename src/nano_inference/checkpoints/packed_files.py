"""Packed weights on disk: parameters in the memory layout of the kernels, written once and mapped
at later starts.

A packed file holds a header and one piece of memory per parameter, in the order of allocation.
Loading maps the file and hands out its pieces, without a copy: processes share the pages, and a
weight update writes to private copies. The file's name is a hash of the model's content, the
layout of the kernels and the formats of the weights, so an outdated file is never read.

A file is written under a temporary name, synced and renamed. Its checksum is verified whenever its
size or times differ from those of the last verification. A file that does not pass is removed, and
the weights are loaded from the checkpoint. Failures to write cost one log line.
"""

import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from nano_inference.arrays import HostArray
from nano_inference.ops.cpu.memory import MappedArena
from nano_inference.system.cache_folder import cache_folder, locked
from nano_inference.system.progress import Progress
from nano_inference.system.regular_files import open_regular, sync

logger = logging.getLogger("nano_inference")

MAGIC = b"nano-inference packed weights 1\n"
MOST_SHARE = 0.1  # largest part of the disk that all packed files may take
ALIGNMENT = 64  # bytes, of every piece
_PAGE = 1 << 16  # alignment of the first piece
_MOST_HEADER = 1 << 24
_PART = 1 << 24  # bytes hashed or written between two updates of the progress


@dataclass(frozen=True)
class PackedFile:
    """The packed file of one model, whether or not it exists.

    Attributes:
        path: Path of the file.
        about: Description of the content: model, layout, formats.
    """

    path: Path
    about: dict[str, Any]

    def open(self) -> tuple[MappedArena, dict[str, Any]] | None:
        """Map the file. Return its pieces and its notes, or None if it is missing or damaged."""
        try:
            with open_regular(self.path) as file:
                header, start = _read_header(file)
                if header["about"] != self.about:
                    raise ValueError("it belongs to another model")
                stamp = _stamp(file)
                if stamp != _recorded(self._stamp_path):
                    _verify(file, header, start)
                with suppress(OSError):  # a read-only folder: the file is verified at each start
                    _record(self._stamp_path, stamp)  # its time is that of the last use
                pieces = [(tuple(shape), dtype) for shape, dtype in header["pieces"]]
                memory = mmap.mmap(file.fileno(), start + header["size"], access=mmap.ACCESS_COPY)
            return MappedArena(memory, start, pieces), header["notes"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as problem:
            logger.warning("removing the packed weights %s: %s", self.path, problem)
            self.remove()
            return None

    def write(self, pieces: Sequence[HostArray], notes: dict[str, Any]) -> bool:
        """Write the file unless another process is writing it. Return True if it was written.

        Old packed files are removed if all of them would take too much of the disk. A failure is
        logged, not raised, and so is a single file that would take too much.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_suffix(".lock").open("ab") as lock:
                if not locked(lock.fileno(), 0):
                    return False
                if not self.path.exists():
                    _remove_leftovers(self.path)
                    _make_room(self.path.parent, sum(piece.nbytes for piece in pieces))
                    self._write(pieces, notes)
            return True
        except OSError as problem:
            logger.warning(
                "the packed weights were not kept in %s, so the next start packs them again: %s",
                self.path.parent,
                problem.strerror or problem,
            )
            return False

    def remove(self) -> None:
        """Remove the file. Processes that have mapped it keep their memory."""
        for path in (self.path, self._stamp_path):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    @property
    def _stamp_path(self) -> Path:
        return self.path.with_suffix(".stamp")

    def _write(self, pieces: Sequence[HostArray], notes: dict[str, Any]) -> None:
        header = {
            "about": self.about,
            "notes": notes,
            "pieces": [[piece.shape, piece.dtype.name] for piece in pieces],
            "size": sum(_aligned(piece.nbytes) for piece in pieces),
            "sha256": "0" * 64,
        }
        start = _start(_header_bytes(header))
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}-", dir=self.path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                if hasattr(os, "posix_fallocate"):  # macOS has no such call
                    os.posix_fallocate(file.fileno(), 0, start + header["size"])
                file.seek(start)
                header["sha256"] = _write_pieces(file, pieces, self.path, header["size"])
                file.seek(0)
                file.write(_header_bytes(header))
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o444)
            temporary.rename(self.path)
            sync(self.path.parent)
        finally:
            temporary.unlink(missing_ok=True)
        with open_regular(self.path) as file:
            _record(self._stamp_path, _stamp(file))


def packed_file(
    sources: Sequence[Path], about: dict[str, Any], root: Path | None = None
) -> PackedFile:
    """Return the packed file of a model.

    Args:
        sources: Files of the weights. They are read once to hash them, and again when their size
            or times change.
        about: Everything else that decides the packed bytes, as JSON values.
        root: Folder of the packed files. None: `cache_folder("packed")`.

    Raises `OSError` if a source cannot be read.
    """
    root = cache_folder("packed") if root is None else root
    about = {**about, "sources": [_content(source, root) for source in sources]}
    about = json.loads(json.dumps(about))  # tuples become lists, as in a header
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return PackedFile(root / f"{name}.packed", about)


def packed_files(root: Path | None = None) -> Iterator[tuple[Path, str]]:
    """Yield the path of each packed file, and the path of the model that it was written for."""
    root = cache_folder("packed") if root is None else root
    for path in sorted(root.glob("*.packed")):
        try:
            with open_regular(path) as file:
                header, _ = _read_header(file)
            yield path, str(header["notes"]["model"])
        except (OSError, ValueError, LookupError, TypeError):
            yield path, ""


# -- the file --------------------------------------------------------------------------------------


def _header_bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(8, "little") + text


def _start(header: bytes) -> int:
    """Return the offset of the first piece."""
    return -(-len(header) // _PAGE) * _PAGE


def _read_header(file: BufferedReader) -> tuple[dict[str, Any], int]:
    """Return the header of a file and the offset of its first piece. Raises `ValueError`."""
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it is not a file of packed weights of this version")
    length = int.from_bytes(file.read(8), "little")
    if length > _MOST_HEADER:
        raise ValueError("its header is damaged")
    text = file.read(length)
    return json.loads(text), _start(MAGIC + bytes(8) + text)


def _write_pieces(file: IO[bytes], pieces: Sequence[HostArray], path: Path, size: int) -> str:
    """Write the pieces from the file's position on. Return the SHA-256 of their bytes."""
    digest = hashlib.sha256()
    with Progress(f"writing packed weights to {path}", size) as progress:
        for piece in pieces:
            data = piece.contiguous().reshape(-1).view("uint8")
            padding = bytes(_aligned(len(data)) - len(data))
            for first in range(0, len(data), _PART):
                part = data[first : first + _PART].data
                file.write(part)
                digest.update(part)
                progress.add(len(part))
            file.write(padding)
            digest.update(padding)
    return digest.hexdigest()


def _verify(file: BufferedReader, header: dict[str, Any], start: int) -> None:
    """Raise `ValueError` unless the pieces have the recorded size and checksum."""
    if os.fstat(file.fileno()).st_size != start + header["size"]:
        raise ValueError("its size is wrong")
    file.seek(start)
    if hashlib.file_digest(file, "sha256").hexdigest() != header["sha256"]:
        raise ValueError("its checksum is wrong")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# -- what was verified, and what the sources contain -----------------------------------------------


def _stamp(file: IO[bytes]) -> list[int]:
    """Return numbers that change when a file is written or replaced."""
    status = os.fstat(file.fileno())
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _recorded(path: Path) -> Any:
    """Return the JSON value of a small file, or None if it cannot be read."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _record(path: Path, value: Any) -> None:
    """Replace a small file by a JSON value."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(name, path)


def _content(source: Path, root: Path) -> str:
    """Return the SHA-256 of a file, which is remembered until its size or times change."""
    path = source.resolve()
    memory = root / f"source-{hashlib.sha256(os.fsencode(path)).hexdigest()[:24]}.json"
    with open_regular(path) as file:
        stamp = _stamp(file)
        known = _recorded(memory)
        if isinstance(known, dict) and known.get("stamp") == stamp:
            return known["sha256"]
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _stamp(file) != stamp:
            raise OSError(f"{path} changed while it was read")
    with suppress(OSError):  # a read-only cache: the file is hashed at each start
        root.mkdir(parents=True, exist_ok=True)
        _record(memory, {"stamp": stamp, "sha256": digest, "path": str(path)})
    return digest


# -- room on the disk ------------------------------------------------------------------------------


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of killed writers. The caller holds the file's lock."""
    for leftover in path.parent.glob(f".{path.stem}.*-*"):
        leftover.unlink(missing_ok=True)


def _make_room(root: Path, size: int) -> None:
    """Remove the packed files that were not used for the longest time, until another one of `size`
    bytes keeps all of them within `MOST_SHARE` of the disk. Raise `OSError` if it is too large.
    """
    most = int(MOST_SHARE * shutil.disk_usage(root).total)
    if size > most:
        raise OSError(f"{size:,} bytes exceed the limit of {most:,}")
    files = sorted(root.glob("*.packed"), key=_last_use)
    total = size + sum(file.stat().st_size for file in files)
    for file in files:
        if total <= most:
            break
        total -= file.stat().st_size
        logger.info("removing the packed weights %s to make room", file)
        PackedFile(file, {}).remove()


def _last_use(path: Path) -> float:
    stamp = path.with_suffix(".stamp")
    return stamp.stat().st_mtime if stamp.exists() else 0.0
