"""Loggers receive each step's figures, and a missing package is reported before any work."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nano_inference.errors import ConfigError
from nano_train import loggers
from nano_train.run import read_run, train
from tests.nano_train.tiny import tiny_run


class Recorder:
    """A logger that keeps its figures."""

    made: list["Recorder"] = []  # noqa: RUF012

    def __init__(self, folder: Path, config: Any, identity: str, first: int) -> None:
        self.first, self.rows, self.closed = first, list[tuple[int, Mapping[str, float]]](), False
        self.made.append(self)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.rows.append((step, figures))

    def close(self) -> None:
        self.closed = True


def test_logger_receives_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", ("json", Recorder))
    monkeypatch.setattr(Recorder, "made", [])
    file = tiny_run(tmp_path, steps=2, more="[log]\ntensorboard = true")
    train(read_run(file, tmp_path / "out"))
    train(read_run(file, tmp_path / "out", {"steps": 3}))
    first, second = Recorder.made
    assert [step for step, _ in first.rows] == [0, 1]
    assert (second.first, [step for step, _ in second.rows]) == (2, [2])
    assert first.closed
    assert {"reward", "loss", "mismatch", "seconds", "held_out"} <= first.rows[0][1].keys()
    assert "kl" not in first.rows[0][1]  # unknown without a reference


@pytest.mark.parametrize("key", ["tensorboard", "wandb"])
def test_missing_logger_is_reported_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    _, logger = loggers.LOGGERS[key]
    monkeypatch.setitem(loggers.LOGGERS, key, ("no_such_package", logger))
    value = "true" if key == "tensorboard" else '"project"'
    file = tiny_run(tmp_path, more=f"[log]\n{key} = {value}")
    with pytest.raises(ConfigError, match=rf"log\.{key} requires no_such_package"):
        train(read_run(file, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_wandb_continues_under_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            calls.append((step, figures["reward"]))

        def finish(self) -> None:
            calls.append("finished")

    module = ModuleType("wandb")
    module.init = lambda **options: calls.append(options) or Run()  # pyright: ignore
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(loggers, "require_loggers", lambda _: None)
    monkeypatch.setitem(loggers.LOGGERS, "wandb", ("json", loggers.Wandb))
    file = tiny_run(tmp_path, steps=1, more='[log]\nwandb = "mine"')
    run = read_run(file, tmp_path / "out")
    train(run)
    options, (step, _), end = calls
    assert (options["project"], options["id"], options["resume"]) == (
        "mine",
        run.identity[:16],
        "allow",
    )
    assert (step, end) == (0, "finished")
