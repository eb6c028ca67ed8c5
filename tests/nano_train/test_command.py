"""`train` and `runs` from the command line."""

import shutil
from pathlib import Path

import pytest

from tests.cli.running import run
from tests.nano_train.tiny import tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs `first`, `other` and `edited`."""
    folder = tmp_path_factory.mktemp("runs")
    file = tiny_run(folder / "task", steps=2)
    for name, seed in (("first", 0), ("other", 1)):
        done = run("train", str(file), "--out", str(folder / name), "--set", f"seed={seed}")
        assert done.exit_code == 0, done.output
        assert "step   1: " in done.stdout
        assert "SHA-256 of the parameters: " in done.stdout
    done = run(
        *("runs", "edit", str(folder / "first"), "1", "--out", str(folder / "edited")),
        *("--reward", "3=1", "--set", "optimizer.learning_rate=1e-3"),
    )
    assert done.exit_code == 0, done.output
    return folder


def test_train_resumes_the_folder_of_a_run(folder: Path) -> None:
    done = run("train", str(folder / "edited"))
    assert done.exit_code == 0, done.output
    assert done.stdout.count("step ") == 1  # the other one is the parent's


def test_runs_list_names_state_and_parent(folder: Path) -> None:
    done = run("runs", "list", str(folder))
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "complete" in rows["first"]
    assert "first, step" in " ".join(done.stdout.split())


def test_runs_show_prints_steps_and_samples(folder: Path) -> None:
    steps = run("runs", "show", str(folder / "first"))
    assert steps.exit_code == 0, steps.output
    assert [line.split()[0] for line in steps.stdout.splitlines()[1:] if line[:1].isdigit()] == [
        "0",
        "1",
    ]
    samples = run("runs", "show", str(folder / "first"), "--step", "1")
    rows = [line for line in samples.stdout.splitlines() if line[:1].isdigit()]
    assert len(rows) == 12


def test_runs_show_draws_curves(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("runs", "show", str(folder / "first"), "--plot", str(tmp_path / "a" / "curves.png"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_runs_open_prints_the_hash_of_the_run(folder: Path, tmp_path: Path) -> None:
    whole = run("train", str(folder / "first")).stdout.split()[-1]
    done = run("runs", "open", str(folder / "first"), "2", "--out", str(tmp_path / "model"))
    assert done.exit_code == 0, done.output
    assert done.stdout.split()[-1] == whole


def test_runs_bisect_answers_by_its_exit_code(folder: Path, tmp_path: Path) -> None:
    same = run("runs", "bisect", str(folder / "first"))
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    apart = run("runs", "bisect", str(folder / "first"), str(folder / "other"))
    assert apart.exit_code == 1, apart.output
    assert apart.stdout.startswith("step 0, sample 0, samples: the prompts differ")
    assert apart.stdout.count(" agrees with a repetition of step 0") == 2
    wrong = run("runs", "bisect", str(folder / "first"), str(folder / "other"), "--first", "1")
    assert wrong.exit_code == 2
    assert run("runs", "bisect", str(tmp_path)).exit_code == 2


def test_runs_bisect_names_the_shorter_run(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "first", tmp_path / "short")
    steps = tmp_path / "short" / "steps.jsonl"
    steps.write_text(steps.read_text().splitlines(keepends=True)[0])
    done = run("runs", "bisect", str(folder / "first"), str(tmp_path / "short"))
    assert done.exit_code == 0, done.output
    text = f"no difference in the first 1 steps; {tmp_path / 'short'} ends there"
    assert done.stdout.replace("\n", "") == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "steps"], "'steps' must be KEY=VALUE"),
        (["--set", "stpes=3"], "stpes is not a key; did you mean steps?"),
        (["--set", "seed=7"], "is another run: seed was 0 there and is 7 now"),
    ],
)
def test_train_reports_wrong_input_with_code_2(
    folder: Path, arguments: list[str], message: str
) -> None:
    file = folder / "task" / "run.toml"
    done = run("train", str(file), "--out", str(folder / "first"), *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not isinstance(done.exception, AssertionError)


@pytest.mark.parametrize(
    "arguments", [["--reward", "x=1"], ["--reward", "1=x"], ["--completion", "1"]]
)
def test_runs_edit_reports_wrong_values(folder: Path, tmp_path: Path, arguments: list[str]) -> None:
    done = run("runs", "edit", str(folder / "first"), "1", "--out", str(tmp_path / "x"), *arguments)
    assert done.exit_code == 2
    assert not (tmp_path / "x").exists()


def test_runs_page_writes_a_file_of_two_runs(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = run("runs", "page", str(folder / "first"), str(folder / "edited"), "--out", str(out))
    assert done.exit_code == 0, done.output
    text = out.read_text()
    assert "<title>first and edited</title>" in text
    assert f"Continues {(folder / 'first').resolve()} from step 1." in text
    assert "Edited in step 1: reward of sample 3 = 1." in text
    alone = run("runs", "page", str(folder / "other"))
    assert alone.exit_code == 0, alone.output
    assert "<title>other</title>" in (folder / "other.html").read_text()
    assert run("runs", "page", str(tmp_path), "--out", str(out)).exit_code == 2
    assert out.read_text() == text
