"""Special files that would block their reader forever are rejected by model loading and updates."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nano_inference.checkpoints.folders import load_spec, resolve_model
from nano_inference.checkpoints.loading import load_params, read_tensors
from nano_inference.errors import ModelLoadError, NanoInferenceError, WeightUpdateError
from nano_inference.system.regular_files import open_regular, read_text
from nano_inference.weights.sources import read_folder
from nano_inference.weights.transports import Deadline
from nano_inference.weights.transports.files import MARKER, WeightFiles, WeightFolder, write_folder
from tests.models.tiny import tiny_llama

WEIGHTS = {"model.norm.weight": torch.ones(64)}
SHAPES = {"model.norm.weight": (64,)}


def in_time(call: Callable[[], object]) -> Exception:
    """Return the error of a call that must not wait for a writer."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as problem:
            raised.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    assert raised, "it was taken"
    return raised[0]


def replaced(path: Path, kind: str) -> None:
    """Replace a file by one of another kind."""
    path.unlink()
    {
        "fifo": os.mkfifo,
        "device": lambda at: at.symlink_to("/dev/zero"),
        "loop": lambda at: at.symlink_to(at),
    }[kind](path)


KINDS = ("fifo", "device", "loop")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_model_load_does_not_block_on_a_fifo(tmp_path: Path, name: str, kind: str) -> None:
    folder = tiny_llama(tmp_path / "model")
    spec = load_spec(folder)
    replaced(folder / name, kind)

    def load() -> None:
        load_spec(folder)
        load_params(folder, spec, torch.float32, torch.device("cpu"))

    problem = in_time(load)
    assert isinstance(problem, ModelLoadError), problem
    assert name in str(problem) or "no .safetensors file" in str(problem)


def test_gguf_load_does_not_block_on_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    assert isinstance(in_time(lambda: resolve_model(str(tmp_path / "model.gguf"))), ModelLoadError)


def all_of(path: Path, kind: type[WeightFiles | WeightFolder]) -> list[Any]:
    deadline = Deadline(5.0)
    return list(kind(path).receive(SHAPES, deadline).buckets)


@pytest.mark.thorough(cases=["WeightFolder-complete.json-loop"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["weights-00001.safetensors", MARKER])
@pytest.mark.parametrize("transport", [WeightFiles, WeightFolder])
def test_file_update_does_not_block_on_a_fifo(
    tmp_path: Path, transport: Any, name: str, kind: str
) -> None:
    folder = write_folder(tmp_path / "w", WEIGHTS)
    replaced(folder / name, kind)
    if name == MARKER and transport is WeightFiles:  # a folder without a marker
        assert all_of(folder, transport)
        return
    problem = in_time(lambda: all_of(folder, transport))
    assert isinstance(problem, WeightUpdateError), problem


@pytest.mark.parametrize(
    "name", [".", "..", "/", "~", "a.b", "x" * 300, "x/" * 3000, "a\0b", "\ud800"]
)
def test_error_omits_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Replacing `.` removed every dot of the sentence."""
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    problem = in_time(lambda: all_of(Path(name), WeightFiles))
    assert isinstance(problem, NanoInferenceError), problem
    assert str(problem) in (
        "the folder has no .safetensors file; convert it, other formats are not supported.",
        "the folder is empty; a model folder holds config.json and .safetensors files.",
        "the path does not exist on the engine's machine; pass a file or folder there.",
    )


def test_error_names_only_the_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(WEIGHTS, "a.safetensors")
    Path("b.safetensors").write_bytes(b"x" * 100)
    for path in (Path(), tmp_path, Path("b.safetensors"), tmp_path / "b.safetensors"):
        said = str(in_time(lambda path=path: all_of(path, WeightFiles)))
        assert said.startswith("b.safetensors cannot be read as safetensors: "), said


def test_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(WEIGHTS, path)
    (tmp_path / "link.safetensors").symlink_to(path)
    assert [name for name, _ in read_tensors(path)] == [
        name for name, _ in read_tensors(tmp_path / "link.safetensors")
    ]
    assert len(list(read_folder(tmp_path))) == len(WEIGHTS)
    with open_regular(path) as file:
        assert len(file.read()) == path.stat().st_size
    (tmp_path / "t").write_text("ü", encoding="utf-8")
    assert read_text(tmp_path / "t") == "ü"
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(path)


@pytest.mark.parametrize("version", [-5, -1, 2**63, 10**30, 1.0, True, "7"])
def test_marker_must_name_a_valid_version(tmp_path: Path, version: Any) -> None:
    folder = write_folder(tmp_path / "w", WEIGHTS, version=version)
    for transport in (WeightFiles, WeightFolder):
        with pytest.raises(WeightUpdateError, match=r"must be an integer from 0 to 2\^63 - 1"):
            all_of(folder, transport)
