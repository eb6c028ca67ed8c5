"""Weights as files: a folder of safetensors, and a marker that is written last, by an atomic
rename.
"""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from nano_inference.arrays import Tensor, as_host
from nano_inference.errors import WeightUpdateError
from nano_inference.system.regular_files import read_text
from nano_inference.weights.sources import BUCKET_BYTES, cut_into_buckets, read_copies
from nano_inference.weights.staging import Bucket, version_of
from nano_inference.weights.transports.interface import Deadline, Incoming, Shapes

MARKER = "complete.json"
LOOK = 0.02  # seconds between checks for the marker


def write_folder(
    folder: str | Path,
    weights: Mapping[str, Tensor],
    *,
    version: int | None = None,
    max_file_bytes: int = 16 * BUCKET_BYTES,
) -> Path:
    """Write an update for `WeightFolder` to read, and return the folder. Files of an earlier update
    are replaced. The weights are torch tensors on any device, or numpy arrays.

    The update is complete only when the marker exists, and each file appears as a whole, so a
    reader never sees a partial file.
    """
    folder = Path(folder)
    if not weights:
        raise WeightUpdateError("the state dict is empty; pass at least one tensor.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).unlink(missing_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    sizes: dict[str, int] = {}
    for number, bucket in enumerate(cut_into_buckets(weights, max_file_bytes), start=1):
        name = f"weights-{number:05d}.safetensors"
        unfinished = folder / f".{name}.unfinished"
        save_file({key: as_host(each).contiguous() for key, each in bucket.items()}, unfinished)
        sizes[name] = unfinished.stat().st_size
        unfinished.rename(folder / name)
    unfinished = folder / f".{MARKER}.unfinished"
    unfinished.write_text(json.dumps({"version": version, "files": sizes}), encoding="utf-8")
    os.replace(unfinished, folder / MARKER)
    return folder


class WeightFolder:
    """Transport that reads the output of `write_folder` once its marker exists."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Wait for the marker. Raises `WeightUpdateError` that names a missing, truncated or
        unreadable file.
        """
        marker = self.folder / MARKER
        while not marker.exists():
            deadline.check(f"{marker} was not written")
            time.sleep(deadline.at_most(LOOK))
        before, contents = _identity(marker), _read_marker(marker)
        for name, size in contents["files"].items():
            path = self.folder / name
            if Path(name).name != name or not path.is_file():
                raise WeightUpdateError(f"{path} is listed in {MARKER} but missing.")
            if path.stat().st_size != size:
                raise WeightUpdateError(
                    f"{path} has {path.stat().st_size} bytes, but {MARKER} lists {size}; the file "
                    "is truncated."
                )
        files = [self.folder / name for name in contents["files"]]
        return Incoming(contents["version"], self._buckets(files, deadline, before))

    def close(self) -> None:
        """Do nothing, since no connection is open."""

    def _buckets(
        self, files: list[Path], deadline: Deadline, before: tuple[int, int] | None
    ) -> Iterator[Bucket]:
        for file in files:
            for bucket in read_copies(file):
                deadline.check(f"{file} was not read")
                yield bucket
        if before is None or _identity(self.folder / MARKER) != before:
            raise WeightUpdateError(
                f"{self.folder} was rewritten while being read, so the tensors mix two updates."
            )


class WeightFiles:
    """Transport of existing files: a safetensors file, or a folder of them, with or without a
    marker.

    Errors name files without their folder.
    """

    def __init__(self, path: str | Path) -> None:
        # absolute, because removing "." from a message would damage other words
        self.path = Path(path).absolute()

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Open the files. Raises `WeightUpdateError`."""
        if not _exists(self.path):
            raise WeightUpdateError(
                "the path does not exist on the engine's machine; pass a file or folder there."
            )
        with self._without_folder():
            if (self.path / MARKER).is_file():
                incoming = WeightFolder(self.path).receive(shapes, deadline)
            else:
                incoming = Incoming(None, read_copies(self.path))
        return Incoming(incoming.version, self._buckets(incoming.buckets, deadline))

    def close(self) -> None:
        """Do nothing, since no connection is open."""

    def _buckets(self, buckets: Iterator[Bucket], deadline: Deadline) -> Iterator[Bucket]:
        with self._without_folder():
            for bucket in buckets:
                deadline.check("the weights were not read")
                yield bucket

    @contextmanager
    def _without_folder(self) -> Iterator[None]:
        try:
            yield
        except WeightUpdateError as problem:
            folder = self.path if self.path.is_dir() else self.path.parent
            raise type(problem)(_without_path(str(problem), str(folder))) from problem


def _without_path(message: str, folder: str) -> str:
    """Return a message without the path of a folder, unless it is part of a longer word."""
    named = rf"(?<![\w./-]){re.escape(folder)}"
    inside = re.sub(rf"{named}{re.escape(os.sep)}+(?=[^\s{re.escape(os.sep)}])", "", message)
    return re.sub(rf"{named}(?![\w./-])", "the folder", inside)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        # a path that is too long, has a loop of links, or holds a zero byte
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    """Return values that differ between a marker and the next one, or None without a marker."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _read_marker(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(read_text(path))
    except (OSError, ValueError) as problem:
        raise WeightUpdateError(f"{path} cannot be read: {problem}") from problem
    files = contents.get("files") if isinstance(contents, dict) else None
    if (
        not isinstance(files, dict)
        or not files
        or not all(isinstance(size, int) for size in files.values())
    ):
        raise WeightUpdateError(f"{path} must list files and their sizes.")
    return {"version": version_of(contents.get("version"), path), "files": files}
