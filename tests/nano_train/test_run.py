"""A run's folder: interruptions, damage, other runs, locks."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nano_inference.errors import ConfigError
from nano_train.records import RunError, StepRecord
from nano_train.run import read_run, train
from tests.nano_train.tiny import files_of, tiny_run
from tests.rl.test_activations import counted


class Interrupted(Exception):
    """End of a run in the middle."""


def stop_after(step: int) -> Callable[[StepRecord], None]:
    def show(record: StepRecord) -> None:
        if record.step == step:
            raise Interrupted

    return show


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run.toml whose run in `out` is complete."""
    file = tiny_run(tmp_path_factory.mktemp("quiet"))
    train(read_run(file, file.parent / "out"))
    return file


@pytest.fixture
def copied(quiet: Path, tmp_path: Path) -> Path:
    """Return the folder of a complete run that a test may damage."""
    shutil.copytree(quiet.parent / "out", tmp_path / "out")
    return tmp_path / "out"


def test_interrupted_run_resumes_to_the_same_files(quiet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step in (0, 1, 3, 4):  # before and after checkpoints, which follow steps 1, 3 and 5
        with pytest.raises(Interrupted):
            train(read_run(quiet, out), stop_after(step))
    sha256 = train(read_run(quiet, out))
    assert files_of(out) == files_of(quiet.parent / "out")
    about = json.loads((out / "checkpoints" / "6" / "state.json").read_text())
    assert sha256 == about["parameters_sha256"]
    assert about["step"] == 6
    assert about["version"] == 6


def test_half_written_files_do_not_change_the_end(quiet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        train(read_run(quiet, out), stop_after(3))
    with (out / "steps.jsonl").open("ab") as log:
        log.write(b'{"step": 4, "ver')
    (out / "samples" / "4.jsonl.part").write_text("{")
    (out / "checkpoints" / ".unfinished-4").mkdir()
    (out / "checkpoints" / ".unfinished-4" / "parameters.safetensors").write_bytes(b"\0" * 9)
    train(read_run(quiet, out))
    assert files_of(out) == files_of(quiet.parent / "out")


def test_engine_options_do_not_change_the_end(quiet: Path, tmp_path: Path) -> None:
    tight = {
        "engine.max_batch_size": 5,
        "engine.block_size": 4,
        "engine.cache_type": "radix",
        "engine.num_threads": 1,
        "recompute_activations": True,
    }
    with pytest.raises(Interrupted):
        train(read_run(quiet, tmp_path / "out"), stop_after(2))
    train(read_run(quiet, tmp_path / "out", tight))
    names = ("steps.jsonl", "checkpoints/6/state.json")
    mine, other = files_of(tmp_path / "out"), files_of(quiet.parent / "out")
    assert {name: mine[name] for name in names} == {name: other[name] for name in names}


@pytest.mark.parametrize("rank", [0, 2])
def test_recomputing_run_ends_in_the_same_files(tmp_path: Path, rank: int) -> None:
    file = tiny_run(tmp_path, steps=1, every=1)
    passes: list[int] = []
    for choice in (False, True):
        changes = {"lora.rank": rank, "recompute_activations": choice}
        with counted() as computed:
            train(read_run(file, tmp_path / str(choice), changes))
        passes.append(len(computed))
    assert 0 < 2 * passes[0] == passes[1]
    assert files_of(tmp_path / "False") == files_of(tmp_path / "True")


def test_complete_run_is_left_as_it_is(copied: Path) -> None:
    before = files_of(copied)
    train(read_run(copied))
    assert files_of(copied) == before


def test_longer_run_continues_a_complete_one(copied: Path) -> None:
    train(read_run(copied, changes={"steps": 7}))
    assert len((copied / "steps.jsonl").read_text().splitlines()) == 7
    with pytest.raises(ConfigError, match="steps=3 is less than the 7 steps done"):
        train(read_run(copied, changes={"steps": 3}))


@pytest.mark.parametrize("name", ["parameters.safetensors", "optimizer.safetensors", "state.json"])
def test_damaged_checkpoint_is_reported_by_name(copied: Path, name: str) -> None:
    path = copied / "checkpoints" / "6" / name
    content = bytearray(path.read_bytes())
    at = len(content) // 2
    content[at] ^= 1
    path.write_bytes(content)
    run = read_run(copied, changes={"steps": 8})
    before = files_of(copied)
    with pytest.raises(RunError, match=rf"checkpoints/6 is damaged: {name}"):
        train(run)
    assert files_of(copied).keys() >= before.keys()  # nothing was cut
    shutil.rmtree(path.parent)
    train(run)  # resumes from step 4


def test_missing_file_of_a_checkpoint_is_reported(copied: Path) -> None:
    (copied / "checkpoints" / "6" / "optimizer.safetensors").unlink()
    with pytest.raises(RunError, match="checkpoints/6 is damaged: optimizer"):
        train(read_run(copied, changes={"steps": 8}))


def test_checkpoint_of_another_run_is_reported(copied: Path, tmp_path: Path) -> None:
    other = tiny_run(tmp_path / "other", more="seed = 5")
    train(read_run(other, other.parent / "out"))
    target = copied / "checkpoints" / "6"
    shutil.rmtree(target)
    shutil.copytree(other.parent / "out" / "checkpoints" / "6", target)
    with pytest.raises(RunError, match="checkpoints/6 is foreign: its run is"):
        train(read_run(copied, changes={"steps": 8}))


def test_renamed_checkpoint_is_reported(copied: Path) -> None:
    (copied / "checkpoints" / "4").rename(copied / "checkpoints" / "7")
    with pytest.raises(RunError, match="checkpoints/7 is foreign: its step is 4"):
        train(read_run(copied, changes={"steps": 8}))


def test_changed_log_is_reported(copied: Path) -> None:
    log = copied / "steps.jsonl"
    log.write_text(log.read_text().replace('"version": 2', '"version": 3', 1))
    with pytest.raises(RunError, match="is not that of checkpoint"):
        train(read_run(copied, changes={"steps": 8}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, r"is another run: seed was 0 there and is 1 now"),
        ({"optimizer.learning_rate": 1e-3}, r"optimizer\.learning_rate was 0\.002"),
    ],
)
def test_folder_of_another_configuration_is_rejected(
    copied: Path, quiet: Path, changes: dict[str, Any], message: str
) -> None:
    before = files_of(copied)
    with pytest.raises(ConfigError, match=message):
        train(read_run(quiet, copied, changes))
    assert files_of(copied) == before


def test_folder_with_changed_code_is_rejected(copied: Path) -> None:
    code = copied / "low_ids.py"
    code.write_text(code.read_text().replace("150", "140"))
    with pytest.raises(ConfigError, match=r"is another run: code\.low_ids\.py was"):
        train(read_run(copied))


def test_folder_with_other_files_is_rejected(quiet: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"is not a run, but contains notes\.txt"):
        train(read_run(quiet, tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_second_process_on_a_run_is_rejected(copied: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from nano_train.tree import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).locked(): print('locked', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(copied)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match=rf"is in use by process {holder.pid}"):
            train(read_run(copied))
        holder.kill()
    train(read_run(copied))  # the lock of a killed process is not stale
