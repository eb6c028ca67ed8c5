"""The folder of checkpoints: it belongs to one service at a time, and a crash loses nothing."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig
from nano_inference.errors import ConfigError
from nano_training_service.checkpoints import ADAPTER, Checkpoints, Run
from nano_training_service.config import TrainServiceConfig
from nano_training_service.main import running_service
from tests.nano_training_service.asking import Asker
from tests.nano_training_service.bigrams import Bigrams
from tests.nano_training_service.conftest import Services
from tests.nano_training_service.test_service import TOKENS, sequences

RUN = Run("run", "bigrams", 4, 1, True, True, True, None, 1.0, 1.0)


class Crash(BaseException):
    """The machine has lost power."""


class Machine:
    """Disk that counts operations and raises `Crash` from operation `last` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
        self.count, self.last = 0, last
        for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def deed(*arguments: Any, **options: Any) -> Any:
            if self.count >= self.last:
                raise Crash
            self.count += 1
            return real(*arguments, **options)

        return deed


def fill(content: bytes) -> Callable[[Path], None]:
    """Return a function that writes an adapter of one file."""

    def write(folder: Path) -> None:
        (folder / ADAPTER).write_bytes(content)

    return write


def test_checkpoint_survives_a_crash_amid_an_overwrite(tmp_path: Path) -> None:
    seen, crashed = set(), True
    for last in range(60):
        folder = tmp_path / str(last)
        kept = Checkpoints(folder)
        kept.write_run(RUN)
        kept.write("run", "weights", "a", fill(b"old"), 3)
        with pytest.MonkeyPatch.context() as patch:
            machine = Machine(patch, last)
            try:
                kept.write("run", "weights", "a", fill(b"new"), 3, overwrite=True)
                crashed = False
            except Crash:
                crashed = True
        kept.close()
        later = Checkpoints(folder)
        found = later.find("tinker://run/weights/a")
        content = found.files[ADAPTER].read_bytes()
        assert content in (b"old", b"new"), last
        assert [each.name for each in later.of("run")] == ["a"]
        assert sorted(each.name for each in (folder / "runs/run/weights").iterdir()) == ["a"]
        later.close()
        seen.add(content)
        if not crashed:
            assert content == b"new"
            assert machine.count == last
            break
    assert not crashed
    assert seen == {b"old", b"new"}


def test_overwrite_that_fails_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Checkpoints(tmp_path)
    kept.write_run(RUN)
    kept.write("run", "weights", "a", fill(b"old"), 3)
    real, count = os.rename, iter(range(9))

    def rename(source: Any, target: Any) -> None:
        if next(count) == 1:
            raise OSError("the disk is gone")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="the disk is gone"):
        kept.write("run", "weights", "a", fill(b"new"), 3, overwrite=True)
    assert kept.find("tinker://run/weights/a").files[ADAPTER].read_bytes() == b"old"
    kept.close()


def test_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, synced = Checkpoints(tmp_path), []
    kept.write_run(RUN)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    kept.write("run", "weights", "a", fill(b"new"), 3)
    kept.close()
    names = [Path(path).name for path in synced]
    before, after = names[:4], names[4:]
    assert sorted(before) == [".unfinished-a", ADAPTER, "checkpoint.json", "run.json"]
    assert after == ["weights", "run", "runs", tmp_path.name]


def test_second_service_on_a_folder_is_rejected_without_damage(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        asker.create()
        sampler = asker.sampler()
        path = asker.save("a")["path"]
        config = TrainServiceConfig(port=0, state_dir=str(service.folder))
        for base in (Bigrams(), EngineConfig("no-such-model")):  # does not even look for it
            began = time.monotonic()
            with (
                pytest.raises(ConfigError, match=r"state_dir=.* is in use.*--state-dir"),
                running_service(base, config),
            ):
                raise AssertionError("it started")
            assert time.monotonic() - began < 30
        assert isinstance(asker.sample(sampler, TOKENS), bytes)
        asker.send_batch(sequences(1))
        assert "metrics" in asker.step()
        assert asker.post("/weights_info", tinker_path=path)["lora_rank"] == 4
    with service() as url:  # released again
        assert "model_id" in Asker(url).create()


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "runs").write_text("no folder")
    with pytest.raises(ConfigError, match=r"state_dir=.* cannot be written"):
        Checkpoints(tmp_path / "state")
