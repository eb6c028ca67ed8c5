"""The end of `train-service` after one or two interrupts."""

from types import SimpleNamespace
from typing import Any

import pytest

from nano_inference import EngineConfig
from nano_training_service import main
from nano_training_service.config import TrainServiceConfig


@pytest.mark.parametrize("again", [False, True])
def test_serve_ends_quietly_after_the_first_interrupt_only(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    def run() -> None:
        raise KeyboardInterrupt

    server: Any = SimpleNamespace(run=run, force_exit=again, started=True)
    monkeypatch.setattr(main, "_service", lambda *_: None)
    monkeypatch.setattr(main, "_server", lambda *_: server)
    config = TrainServiceConfig(state_dir="unused")
    if again:
        with pytest.raises(KeyboardInterrupt):
            main.serve(EngineConfig("smollm2-135m"), config)
    else:
        main.serve(EngineConfig("smollm2-135m"), config)
