"""TRL's real, unmodified trainer in a separate environment (created by `make test-slow`)."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import tiny_llama

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.prefix) / "trl" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it"
    ),
]


def trained(kind: str, folder: Path, *, processes: int = 1) -> list[dict[str, Any]]:
    """Return the records of each process after six steps."""
    model = tiny_llama(folder / "model", vocab_size=259, std=0.1)
    launch = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes > 1
        else []
    )
    command = [PYTHON, "-W", "ignore", *launch, "-m", "tests.rl.with_trl", kind, model, folder]
    quiet = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    ran = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(processes)]


def check(seen: dict[str, Any]) -> None:
    assert seen["steps"] == 6
    training = [each for each in seen["rollouts"] if each["training"]]
    # Two batches per step, two steps per rollout, evaluations at the third and the last step.
    assert [each["step"] for each in training] == [0, 2, 4]
    assert {each["step"] for each in seen["rollouts"] if not each["training"]} == {3, 6}
    # the required bound is 1e-3
    assert all(each["difference"] < 1e-4 for each in seen["rollouts"])
    assert all(
        each["computed_once"] and each["distinct"] < each["entries"] for each in seen["rollouts"]
    )
    assert all(len(each["versions"]) == 1 for each in seen["rollouts"])
    # an update only if the step has advanced
    for one, other in pairwise(seen["rollouts"]):
        assert other["versions"][0] - one["versions"][0] == (other["step"] != one["step"])
    assert len(seen["logged"]) == 3
    assert all(0 < each < 1e-4 for each in seen["logged"])


@pytest.mark.parametrize("kind", ["full", "lora", "adapter"])
def test_rollouts_use_the_current_trainer_weights(kind: str, tmp_path: Path) -> None:
    (seen,) = trained(kind, tmp_path)
    check(seen)
    assert seen["base_kept"]  # merging leaves untrained tensors unchanged
    assert len(set(seen["rewards"])) > 1


def test_trainer_masks_the_turns_of_a_tool(tmp_path: Path) -> None:
    (seen,) = trained("turns", tmp_path)
    assert seen["steps"] == 6
    assert all(each["difference"] < 1e-4 for each in seen["rollouts"])
    assert all(turns == 2 for each in seen["rollouts"] for turns in each["turns"])
    assert len({tuple(each["versions"]) for each in seen["rollouts"]}) > 1


def test_processes_have_separate_engines(tmp_path: Path) -> None:
    one, other = trained("full", tmp_path, processes=2)
    check(one)
    check(other)
    for mine, theirs in zip(one["rollouts"], other["rollouts"], strict=True):
        assert mine["completions"] != theirs["completions"]
