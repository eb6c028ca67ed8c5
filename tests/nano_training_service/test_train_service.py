"""`train-service`: options reach both configurations, keys come from files."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError
from nano_training_service.config import TrainServiceConfig
from tests.cli.running import run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, TrainServiceConfig]]:
    results: list[tuple[EngineConfig, TrainServiceConfig]] = []
    monkeypatch.setattr(
        "nano_training_service.main.serve",
        lambda engine, config: results.append((engine, config)),
    )
    return results


def test_config_fields_are_options_that_arrive(started: list[Any], tmp_path: Path) -> None:
    wanted: dict[str, Any] = {
        each.name: each.default + 1
        for each in fields(TrainServiceConfig)
        if isinstance(each.default, int | float)
    }
    wanted |= {"host": "127.0.0.2", "state_dir": str(tmp_path), "served_model_name": "name"}
    wanted |= {"max_checkpoint_bytes": 5 << 30}
    wanted |= {"api_keys": ("tml-a", "tml-b", "tml-c"), "recompute_activations": True}
    keys = tmp_path / "keys"
    keys.write_text("tml-b\n\ntml-c\n")
    arguments = [
        part
        for name, value in wanted.items()
        if name not in ("api_keys", "recompute_activations")
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    arguments += ["--api-key", "tml-a", "--api-key-file", str(keys), "--max-model-len", "512"]
    arguments += ["--recompute-activations"]
    result = run("train-service", "smollm2-135m", *arguments)
    assert result.exit_code == 0, result.output
    engine, config = started[0]
    assert config == TrainServiceConfig(**wanted)
    assert {each.name for each in fields(TrainServiceConfig)} == set(wanted)
    assert (engine.model_path, engine.max_model_len) == ("smollm2-135m", 512)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_keys": ("secret",)}, "tml-"),
        ({"max_models": 0}, "max_models=0"),
        ({"request_timeout": float("nan")}, "request_timeout"),
        ({"session_timeout": 0}, "session_timeout=0"),
        ({"state_dir": ""}, "state_dir is empty"),
        ({"state_dir": __file__}, "not a folder"),
        ({"max_checkpoint_bytes": 0}, "max_checkpoint_bytes=0"),
        ({"max_model": 1}, "max_models"),
        ({"recompute_activations": "no"}, "recompute_activations='no' must be True, False or None"),
    ],
)
def test_configurations_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainServiceConfig(**options)
