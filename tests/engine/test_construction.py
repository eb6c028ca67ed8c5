"""A failed engine constructor releases everything."""

from pathlib import Path
from typing import Any

import pytest

from nano_inference import ConfigError, EngineConfig, InferenceEngine
from nano_inference.core.sequence import POLICY
from nano_inference.engine import engine as engine_module
from nano_inference.engine.build import assemble_all
from nano_inference.errors import AdapterError
from nano_inference.ranks.parts import Parts
from tests.models.tiny import tiny_llama
from tests.ranks.rank_threads import ThreadLauncher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny")))


def config(folder: str, **options: Any) -> EngineConfig:
    defaults = {"device": "cpu", "num_threads": 1, "kv_cache_memory": 2**21}
    return EngineConfig(folder, **(defaults | options))


def fail(*_: Any) -> None:
    raise ConfigError("this fails late.")


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> list[Parts]:
    """Return the parts of the engines that are built, without a lockstep."""
    parts: list[Parts] = []

    def assemble(config: EngineConfig, launcher: Any, _: Any) -> Parts:
        parts.append(assemble_all(config, launcher))
        return parts[-1]

    monkeypatch.setattr(engine_module, "assemble_all", assemble)
    return parts


def test_failed_construction_ends_the_ranks(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ThreadLauncher()
    monkeypatch.setattr(engine_module, "make_drafter", fail)
    with pytest.raises(ConfigError, match="fails late"):
        InferenceEngine(config(folder, tensor_parallel=2), launcher)
    for handle in launcher.handles:
        handle._thread.join(30)
        assert not handle.alive()


def test_failed_construction_releases_the_weights(
    folder: str, tmp_path: Path, assembled: list[Parts]
) -> None:
    with pytest.raises(AdapterError):
        InferenceEngine(config(folder, loras=(f"own={tmp_path / 'missing'}",)))
    (parts,) = assembled
    assert not parts.runner.models[POLICY].params


class Left:
    """Fake lockstep (and its own bell) that records if the engine has left."""

    group = None
    is_left = False

    @property
    def bell(self) -> "Left":
        return self

    def listen(self, wake: Any) -> None:
        pass

    def heard(self) -> int:
        return -1

    def close(self) -> None:
        self.is_left = True


def test_failed_construction_leaves_the_lockstep(
    folder: str, tmp_path: Path, assembled: list[Parts]
) -> None:
    lockstep: Any = Left()
    with pytest.raises(AdapterError):
        InferenceEngine(config(folder, loras=(f"own={tmp_path / 'missing'}",)), lockstep=lockstep)
    assert lockstep.is_left


def test_failed_construction_removes_offloaded_files(folder: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with pytest.raises(AdapterError):
        InferenceEngine(
            config(folder, kept_cache_folder=str(kept), loras=(f"own={tmp_path / 'missing'}",))
        )
    assert not [each for each in kept.iterdir() if each.is_dir()]


def test_failed_assembly_leaves_the_lockstep(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lockstep: Any = Left()
    monkeypatch.setattr(engine_module, "assemble_all", fail)
    with pytest.raises(ConfigError, match="fails late"):
        InferenceEngine(config(folder), lockstep=lockstep)
    assert lockstep.is_left


def test_built_engine_keeps_its_parts(folder: str, assembled: list[Parts]) -> None:
    lockstep: Any = Left()
    with InferenceEngine(config(folder), lockstep=lockstep):
        assert not lockstep.is_left
        assert assembled[0].runner.models[POLICY].params
    assert lockstep.is_left
