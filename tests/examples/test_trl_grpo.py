"""The TRL example: reward, plot, the documented run, and a short run if TRL is installed."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from examples.trl_grpo import plot, right_answer

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "trl-grpo.json"
PYTHON = Path(sys.prefix) / "trl" / "bin" / "python"


def test_reward_is_only_for_the_bare_answer() -> None:
    answers = ["52", " 52.\n", "52 52", "31", ""]
    assert right_answer(answers, ["52"] * len(answers)) == [1, 1, 0, 0, 0]


@pytest.mark.thorough
def test_documented_run_holds_the_bound_and_learned(tmp_path: Path) -> None:
    runs = json.loads(RESULTS.read_text())["runs"]
    exact, rounded = runs["float32"], runs["bfloat16"]
    for run in (exact, rounded):
        assert len(run["steps"]) >= 20
        assert run["tests"][-1]["reward"] > run["tests"][0]["reward"] + 0.25
    assert max(step["max_difference"] for step in exact["steps"]) < 1e-3
    assert max(step["max_difference"] for step in rounded["steps"]) > 0.1
    plot(runs, tmp_path / "drawn" / "runs.png")
    assert (tmp_path / "drawn" / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_run_over_http_holds_the_bound_and_learned(tmp_path: Path) -> None:
    record = json.loads((RESULTS.parent / "trl-lora.json").read_text())
    assert record["recipe"]["lora"] == 16
    (run,) = record["runs"].values()
    assert len(run["steps"]) >= 15
    assert max(step["max_difference"] for step in run["steps"]) < 1e-3
    assert max(step["trainer_max_difference"] for step in run["steps"]) < 1e-3
    versions = [step["weight_version"] for step in run["steps"]]
    # a new version per step, except when all rewards of a batch were equal
    assert all(0 <= after - before <= 1 for before, after in pairwise(versions))
    assert len(set(versions)) >= 15
    assert run["tests"][-1]["reward"] > run["tests"][0]["reward"] + 0.1


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it")
def test_example_runs_two_steps(tmp_path: Path) -> None:
    size = ["--steps", "2", "--prompts", "1", "--samples", "4", "--dtype", "float32"]
    command = [PYTHON, "-W", "ignore", "-m", "examples.trl_grpo", *size, "--out", tmp_path]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    (run,) = json.loads((tmp_path / "trl-grpo.json").read_text())["runs"].values()
    assert [step["weight_version"] for step in run["steps"]] == [1, 2]
    assert all(0 < step["max_difference"] < 1e-3 for step in run["steps"])
    assert all(0 < step["trainer_max_difference"] < 1e-3 for step in run["steps"])
