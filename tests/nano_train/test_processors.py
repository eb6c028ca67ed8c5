"""A run that began on another kind of processor."""

from pathlib import Path

import pytest

from tests.nano_train.kills import finish, spawn
from tests.nano_train.tiny import files_of, tiny_run
from tests.ops.compiler import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
RUNS = {
    "ratios and divergence": ("grpo", 'updates = 2\nreference = "{model}"\n[loss]\nkl = 0.1\n', {}),
    "sequences with an adapter": ("gspo", "updates = 2\n[lora]\nrank = 4\n", {}),
    "answers": ("sft", "", {"task.samples": 1, "task.train": '"low_ids.py:answers"'}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS)
def test_run_continues_on_another_processor(tmp_path: Path, name: str) -> None:
    method, more, changes = RUNS[name]
    model = tmp_path / "task" / "model"
    file = tiny_run(tmp_path / "task", steps=4, method=method, more=more.format(model=model))
    changes = {"test_every": 1, **changes}  # the last step of a part is tested in both runs
    options = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    finish(spawn(file, tmp_path / "one", *options))
    finish(spawn(file, tmp_path / "both", *options, "--set", "steps=2", other_processor=True))
    finish(spawn(file, tmp_path / "both", *options))
    assert files_of(tmp_path / "both") == files_of(tmp_path / "one")
