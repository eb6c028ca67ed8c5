"""A run that is killed twenty times ends like a quiet one."""

from pathlib import Path

import pytest

from tests.nano_train.kills import finish, kill_often, killed_run, life, spawn
from tests.nano_train.tiny import files_of, tiny_run


@pytest.mark.thorough
def test_killed_process_resumes_to_the_same_files(tmp_path: Path) -> None:
    file = tiny_run(tmp_path / "task", steps=4)
    finish(spawn(file, tmp_path / "quiet"))
    assert life(file, tmp_path / "killed", 12) is not None
    finish(spawn(file, tmp_path / "killed"))
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "quiet")


@pytest.mark.slow
def test_run_killed_twenty_times_ends_like_a_quiet_one(tmp_path: Path) -> None:
    file = killed_run(tmp_path / "task")
    finish(spawn(file, tmp_path / "quiet"))
    lasts = kill_often(file, tmp_path / "killed", 20, seed=1)
    assert len(lasts) == 20
    assert len(set(lasts)) > 5  # at different points
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "quiet")
