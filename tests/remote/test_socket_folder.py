"""Socket folders without a listener are removed."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nano_inference.remote import process_client, time_limits
from nano_inference.remote.process_client import (
    MAX_ADDRESS,
    PREFIX,
    private_folder,
    remove_abandoned,
)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replace the system's folder for sockets by a path that is short enough."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def aged(folder: Path, *, by: float = 2 * time_limits.ABANDONED) -> Path:
    now = folder.stat().st_mtime
    os.utime(folder, (now - by, now - by))
    return folder


def listening(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(path))
    one.listen()
    return one


def test_sockets_without_listener_are_removed(place: Path) -> None:
    abandoned = private_folder()
    listening(abandoned / "api").close()
    listening(abandoned / "engine").close()
    empty = aged(private_folder())
    remove_abandoned()
    assert abandoned.exists()  # young
    aged(abandoned)
    fresh = private_folder()
    assert list(place.iterdir()) == [fresh]
    assert not abandoned.exists()
    assert not empty.exists()


def test_files_in_use_are_not_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = private_folder()
    with listening(used / "api"):
        listening(used / "engine").close()  # the engine has died and is about to be replaced
        aged(used)
        holding = private_folder()
        (holding / "letters").write_text("of somebody")
        aged(holding)
        open_to_all = private_folder()
        open_to_all.chmod(0o755)
        aged(open_to_all)
        elsewhere = place / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        (place / f"{PREFIX}link").symlink_to(aged(elsewhere))
        (place / f"{PREFIX}file").touch()
        strangers = aged(private_folder())
        before = sorted(place.iterdir())
        with monkeypatch.context() as patch:
            patch.setattr(process_client.os, "getuid", lambda: -1)
            remove_abandoned()
        assert sorted(place.iterdir()) == before
        remove_abandoned()
        assert sorted({*place.iterdir(), strangers}) == before
        assert not strangers.exists()


def test_long_path_is_not_for_a_socket(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = place / ("x" * MAX_ADDRESS)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = private_folder()
    assert folder.parent == Path("/tmp")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    assert list(long.iterdir()) == []
