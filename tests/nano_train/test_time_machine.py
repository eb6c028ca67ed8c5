"""Opening a step, finding a difference, editing a step."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nano_inference.errors import ConfigError
from nano_inference.rl import LoraPolicy
from nano_train.bisect import compare_runs, first_computed, repeat
from nano_train.edit import edit
from nano_train.hashes import sha256_of_tensors
from nano_train.rebuild import open_step, rebuilt
from nano_train.records import RunError
from nano_train.run import Run, read_run, train
from nano_train.trainer import Trainer
from tests.nano_train.faults import FAULTS, Fault, check, fault_run, run_with
from tests.nano_train.tiny import files_of, tiny_run

QUICK = (
    "a prompt has another token",
    "a reward is off by one bit",
    "a logprob is off by one bit",
    "backward of layer 0 is off",
    "a moment is lost",
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run.toml of the planted faults. The run without a fault is in `clean`."""
    file = fault_run(tmp_path_factory.mktemp("faults"))
    run_with(None, file, file.parent / "clean")
    return file


@pytest.fixture
def clean(task: Path) -> Run:
    return read_run(task.parent / "clean")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a complete run, and the SHA-256 of its parameters after each number of steps."""
    file = tiny_run(tmp_path_factory.mktemp("traced"))
    run = read_run(file, file.parent / "out")
    with Trainer(run.config, run.task) as trainer:
        hashes = [trainer.sha256(), *(trainer.sha256() for _ in trainer.steps())]
    train(run)
    return file.parent / "out", hashes


# -- opening a step --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 3, 4, 5])  # checkpoints: 4 and 6
def test_opened_step_has_the_parameters_of_the_run(
    traced: tuple[Path, list[str]], tmp_path: Path, step: int
) -> None:
    folder, hashes = traced
    sha256 = open_step(read_run(folder), step, tmp_path / "model")
    assert sha256 == hashes[step]
    assert (
        sha256_of_tensors(load_file(tmp_path / "model" / "masters" / "model.safetensors")) == sha256
    )


def test_opened_step_samples_like_the_run(traced: tuple[Path, list[str]]) -> None:
    run = read_run(traced[0])
    with rebuilt(run, 3) as trainer:
        assert trainer.collect().samples == run.folder.read_batch(3)[0].samples


def test_unknown_step_and_used_folder_are_rejected(
    traced: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run = read_run(traced[0])
    with pytest.raises(ConfigError, match=r"step 7 is not in .*, which has 0 to 6"):
        open_step(run, 7, tmp_path / "model")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        open_step(run, 1, tmp_path)


def test_changed_sample_is_noticed_when_a_step_opens(
    traced: tuple[Path, list[str]], tmp_path: Path
) -> None:
    copy = tmp_path / "out"
    shutil.copytree(traced[0], copy)
    path = copy / "batches" / "4.json"
    content = json.loads(path.read_text())
    content["advantages"][0] += 1.0
    path.write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"step 4 of .* has other bits when it is repeated"):
        open_step(read_run(copy), 5, tmp_path / "model")
    finding = repeat(read_run(copy), first=4)
    assert finding is not None
    assert (finding.step, finding.part) == (4, "advantages")
    assert "not those that steps.jsonl describes" in finding.text


# -- the first difference --------------------------------------------------------------------------


def test_run_equals_its_repetition(traced: tuple[Path, list[str]], clean: Run) -> None:
    assert repeat(clean) is None
    assert repeat(read_run(traced[0]), 3, 4) is None


def assert_found(fault: Fault, task: Path, clean: Run, out: Path) -> None:
    stopped = run_with(fault, task, out)
    assert (stopped is not None) == fault.stops
    if fault.stops:
        assert f"step {1 + fault.late}, sample" in (stopped or "")
        return
    run = read_run(out)
    assert check(fault, compare_runs(clean, run)) is None
    if not fault.late:
        assert check(fault, repeat(run)) is None


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in QUICK], ids=lambda f: f.name)
def test_planted_fault_is_found(fault: Fault, task: Path, clean: Run, tmp_path: Path) -> None:
    assert_found(fault, task, clean, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name not in QUICK], ids=lambda f: f.name)
def test_other_planted_fault_is_found(fault: Fault, task: Path, clean: Run, tmp_path: Path) -> None:
    assert_found(fault, task, clean, tmp_path / "out")


def test_first_computed_layer_is_the_last_with_another_gradient() -> None:
    names = ["model.embed_tokens.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1))]
    assert first_computed(names) == 1
    assert first_computed(names[:1]) == -1
    assert first_computed([*names, "model.norm.weight"]) == -1


# -- editing a step --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rewards": {2: 0.75}}, "rewards"),
        ({"seed": 9}, "samples"),
        ({"completions": {1: [7, 8, 9]}}, "samples"),
        ({"changes": {"optimizer.learning_rate": 1e-3}}, "parameters"),
    ],
)
def test_edited_run_parts_from_its_parent_at_the_step(
    traced: tuple[Path, list[str]], tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    parent = read_run(traced[0])
    out = tmp_path / "edited"
    edit(parent, 3, out, **changes)
    train(read_run(out))
    child = read_run(out)
    finding = compare_runs(parent, child)
    assert finding is not None
    assert (finding.step, finding.part) == (3, part)
    assert child.parent is not None
    assert child.parent["folder"] == str(traced[0].resolve())
    assert repeat(child) is None  # from the step at which it begins
    assert 3 in child.checkpoints.steps()
    if "completions" in changes:
        sample = child.folder.read_batch(3)[0].samples[1]
        assert sample.completion_tokens == (7, 8, 9)
        assert child.folder.steps()[3]["mismatch"] == 0


def test_run_without_edits_equals_its_parent(
    traced: tuple[Path, list[str]], tmp_path: Path
) -> None:
    edit(read_run(traced[0]), 2, tmp_path / "same")
    train(read_run(tmp_path / "same"))
    mine, other = files_of(tmp_path / "same"), files_of(traced[0])
    for name in ("steps.jsonl", "checkpoints/6/parameters.safetensors"):
        assert mine[name] == other[name]


@pytest.mark.parametrize("changes", [{"rewards": {12: 1.0}}, {"completions": {-1: [3]}}])
def test_edit_of_an_unknown_sample_is_rejected(
    traced: tuple[Path, list[str]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="does not exist; a step has 0 to 11"):
        edit(read_run(traced[0]), 3, tmp_path / "edited", **changes)
    assert not (tmp_path / "edited").exists()


# -- other methods ---------------------------------------------------------------------------------


def of_method(folder: Path, method: str, **values: str) -> Path:
    """Return the run.toml of a method without rewards."""
    file = tiny_run(folder, method=method)
    lines = [
        line for line in file.read_text().splitlines() if not line.startswith(("reward", "held"))
    ]
    text = "\n".join(lines)
    for old, new in values.items():
        text = text.replace(f"{old} = ", f"{old} = {new} # ")
    file.write_text(text)
    return file


def losses(run: Run) -> list[float]:
    return [step["loss"] for step in run.folder.steps()]


def test_sft_learns_the_answers_and_repeats(tmp_path: Path) -> None:
    file = of_method(tmp_path, "sft", train='"low_ids.py:answers"', samples="1", max_tokens="64")
    run = read_run(file, tmp_path / "out", {"steps": 12})
    train(run)
    assert losses(run)[-1] < losses(run)[0] - 0.5
    assert repeat(run, 9) is None


@pytest.mark.thorough
def test_distillation_approaches_the_teacher_and_repeats(tmp_path: Path) -> None:
    from tests.models.tiny import tiny_llama

    teacher = tiny_llama(tmp_path / "teacher", seed=1)
    file = of_method(tmp_path, "distill")
    run = read_run(file, tmp_path / "out", {"steps": 12, "teacher.model": str(teacher)})
    train(run)
    assert losses(run)[-1] < losses(run)[0]
    assert repeat(run, 9) is None


@pytest.mark.thorough(but=["rloo"])
@pytest.mark.parametrize("method", ["dr-grpo", "dapo", "rloo", "gspo"])
def test_method_trains_and_repeats(tmp_path: Path, method: str) -> None:
    file = tiny_run(tmp_path, steps=3, method=method)
    run = read_run(file, tmp_path / "out", {"updates": 2, "optimizer.max_grad_norm": 0.5})
    train(run)
    assert len({step["updates"][-1]["parameters"] for step in run.folder.steps()}) == 3
    assert run.folder.steps()[0]["updates"][0]["gradient_norm"] > 0
    assert repeat(run) is None


def test_adapter_run_resumes_and_opens_at_any_step(tmp_path: Path) -> None:
    file = tiny_run(tmp_path, steps=3, more="[lora]\nrank = 4")
    file.write_text(file.read_text().replace("test_every = 2", "test_every = 1"))
    train(read_run(file, tmp_path / "out", {"steps": 2}))
    train(read_run(tmp_path / "out", changes={"steps": 3}))
    whole = read_run(file, tmp_path / "whole")
    train(whole)
    assert files_of(tmp_path / "out")["steps.jsonl"] == files_of(tmp_path / "whole")["steps.jsonl"]
    open_step(whole, 2, tmp_path / "adapter")
    with rebuilt(whole, 2) as trainer:
        assert isinstance(trainer.policy, LoraPolicy)
        before = {name: param.detach().clone() for name, param in trainer.policy.named_parameters()}
        trainer.policy.load(tmp_path / "adapter")
        for name, param in trainer.policy.named_parameters():
            assert torch.equal(param, before[name])
