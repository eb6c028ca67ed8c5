"""Packed files: what is read is what was written, whatever happens to the file in between."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nano_inference.arrays import host
from nano_inference.checkpoints import packed_files
from nano_inference.checkpoints.packed_files import PackedFile, packed_file
from nano_inference.ops.cpu.memory import MappedArena, RecordedArena

SHAPES = [((3, 5), "float32"), ((7,), "uint8"), ((2, 2, 16, 2), "bfloat16"), ((0,), "float32")]
NOTES = {"formats": {"layers.0.down": "int8"}}


def pieces(seed: int = 0) -> list[Any]:
    arena, rng = RecordedArena(), np.random.default_rng(seed)
    for shape, dtype in SHAPES:
        piece = arena.take(shape, getattr(host, dtype))
        piece.copy_(rng.integers(0, 100, shape))
    return arena.pieces


def contents(arena: MappedArena) -> list[Any]:
    return [arena.take(shape, getattr(host, dtype)) for shape, dtype in SHAPES]


def require_equal(file: PackedFile, seed: int = 0) -> None:
    opened = file.open()
    assert opened is not None
    arena, notes = opened
    assert notes == NOTES
    for read, written in zip(contents(arena), pieces(seed), strict=True):
        assert read.dtype == written.dtype
        assert read.tobytes() == written.tobytes()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def written(tmp_path: Path, source: Path) -> PackedFile:
    file = packed_file([source], {"layout": 1}, tmp_path / "cache")
    assert file.write(pieces(), NOTES)
    return file


def test_packed_file_returns_what_was_written(written: PackedFile) -> None:
    require_equal(written)


def test_packed_file_pieces_begin_at_cache_lines(written: PackedFile) -> None:
    opened = written.open()
    assert opened is not None
    assert [piece.data_ptr() % 64 for piece in contents(opened[0])] == [0] * len(SHAPES)


def test_packed_file_keeps_its_content_when_a_piece_is_written(written: PackedFile) -> None:
    opened = written.open()
    assert opened is not None
    contents(opened[0])[0].fill_(-1)
    require_equal(written)


def test_packed_file_name_follows_content_and_layout(tmp_path: Path, source: Path) -> None:
    root = tmp_path / "cache"
    first = packed_file([source], {"layout": 1}, root)
    assert packed_file([source], {"layout": 2}, root).path != first.path
    moved = source.rename(tmp_path / "renamed.safetensors")
    assert packed_file([moved], {"layout": 1}, root).path == first.path
    moved.write_bytes(b"WEIGHTS")
    os.utime(moved, ns=(1, 1))
    assert packed_file([moved], {"layout": 1}, root).path != first.path


def test_packed_file_hashes_an_unchanged_source_once(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    first = packed_file([source], {}, root)
    monkeypatch.setattr(packed_files.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert packed_file([source], {}, root).path == first.path


@pytest.mark.parametrize("where", [0.0, 0.001, 0.3, 0.9999])
def test_packed_file_with_a_flipped_bit_is_removed(written: PackedFile, where: float) -> None:
    written.path.chmod(0o644)
    size, times = written.path.stat().st_size, written.path.stat()
    offset = int(where * size) if where != 0.001 else 60  # in the header
    if offset > 60:
        offset = max(offset, packed_files._PAGE)  # padding of the header is not part of the file
    with written.path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    os.utime(written.path, ns=(times.st_atime_ns, times.st_mtime_ns))  # a silent fault
    assert written.open() is None
    assert not written.path.exists()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_packed_file_that_was_cut_is_removed(written: PackedFile, share: float) -> None:
    written.path.chmod(0o644)
    os.truncate(written.path, int(share * written.path.stat().st_size))
    assert written.open() is None
    assert not written.path.exists()


def test_packed_file_of_another_model_is_removed(
    written: PackedFile, source: Path, tmp_path: Path
) -> None:
    other = packed_file([source], {"layout": 2}, tmp_path / "cache")
    written.path.rename(other.path)
    assert other.open() is None


def test_mapped_arena_rejects_pieces_in_another_order(written: PackedFile) -> None:
    opened = written.open()
    assert opened is not None
    with pytest.raises(ValueError, match="no piece uint8"):
        opened[0].take((7,), host.uint8)


def test_packed_file_missing_is_none(tmp_path: Path, source: Path) -> None:
    assert packed_file([source], {}, tmp_path / "cache").open() is None


def test_packed_file_reports_a_full_disk_and_leaves_nothing(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed_files.os, "posix_fallocate", full)
    file = packed_file([source], {}, tmp_path / "cache")
    assert not file.write(pieces(), NOTES)
    assert "No space left on device" in caplog.text
    assert not list((tmp_path / "cache").glob("*.packed*"))
    assert not list((tmp_path / "cache").glob(".*"))


def test_packed_file_reports_a_folder_that_cannot_be_written(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    file = packed_file([source], {}, tmp_path / "cache")
    assert not file.write(pieces(), NOTES)
    assert "packs them again" in caplog.text
    assert file.open() is None


def test_packed_file_is_read_from_a_read_only_folder(
    written: PackedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    written.path.with_suffix(".stamp").unlink()
    monkeypatch.setattr(packed_files, "_record", refuse)
    require_equal(written)


def test_packed_file_larger_than_its_disk_share_is_not_written(
    written: PackedFile,
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(packed_files, "MOST_SHARE", 0.0)
    other = packed_file([source], {"layout": 2}, tmp_path / "cache")
    assert not other.write(pieces(), NOTES)
    assert "exceed the limit of 0" in caplog.text
    require_equal(written)  # others are not removed in vain


def test_packed_file_needs_no_reserved_space(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    file = packed_file([source], {}, tmp_path / "cache")
    assert file.write(pieces(), NOTES)
    require_equal(file)


def test_packed_file_is_left_to_a_process_that_writes_it(
    tmp_path: Path, source: Path, written: PackedFile
) -> None:
    import fcntl

    written.remove()
    with written.path.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not written.write(pieces(), NOTES)
    assert written.write(pieces(), NOTES)
    require_equal(written)


def test_packed_files_make_room_for_new_ones(
    tmp_path: Path, source: Path, written: PackedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = packed_file([source], {"layout": 2}, tmp_path / "cache")
    assert newer.write(pieces(), NOTES)
    os.utime(written.path.with_suffix(".stamp"), (1, 1))
    size = written.path.stat().st_size
    total = packed_files.shutil.disk_usage(tmp_path).total
    monkeypatch.setattr(packed_files, "MOST_SHARE", (2 * size + 10) / total)
    newest = packed_file([source], {"layout": 3}, tmp_path / "cache")
    assert newest.write(pieces(), NOTES)
    assert not written.path.exists()
    require_equal(newer)
    require_equal(newest)


# Kill the writer when it calls one of these for the n-th time.
STAGES = [
    ("os.posix_fallocate", 1),
    ("hashlib.sha256", 3),  # after two for the names: while the pieces are written
    ("os.fsync", 1),
    ("pathlib.Path.chmod", 1),
    ("pathlib.Path.rename", 1),
    ("nano_inference.checkpoints.packed_files.sync", 1),
    ("nano_inference.checkpoints.packed_files._record", 2),  # the first one is of the source
    ("os.replace", 2),
]
WRITER = """
import os, signal, sys
from pathlib import Path
import hashlib, pathlib
from tests.checkpoints import test_packed_files as here
from nano_inference.checkpoints import packed_files

module, name = sys.argv[3].rsplit(".", 1)
owner = {"os": os, "hashlib": hashlib, "pathlib.Path": pathlib.Path}.get(module, packed_files)
original, left = getattr(owner, name), [int(sys.argv[4])]

def dies(*args, **options):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **options)

setattr(owner, name, dies)
file = packed_files.packed_file([Path(sys.argv[1])], {}, Path(sys.argv[2]))
file.write(here.pieces(), here.NOTES)
print("ended")
"""


@pytest.mark.parametrize(("stage", "count"), STAGES)
def test_packed_file_survives_a_killed_writer(
    tmp_path: Path, source: Path, stage: str, count: int
) -> None:
    root = tmp_path / "cache"
    args = [str(source), str(root), stage, str(count)]
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRITER), *args], capture_output=True, text=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    file = packed_file([source], {}, root)
    if file.open() is None:  # killed before the rename
        assert file.write(pieces(), NOTES)
    require_equal(file)
    assert not list(root.glob(".*.packed-*"))


def test_packed_file_header_names_its_content(written: PackedFile) -> None:
    header = written.path.read_bytes().split(b"\n", 1)[1][8:]
    about = json.JSONDecoder().raw_decode(header.decode("utf-8", "replace"))[0]["about"]
    assert about == written.about
