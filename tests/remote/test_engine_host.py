"""An engine that fails to build reports the reason to waiting callers."""

from typing import Any

import pytest

from nano_inference.errors import NO_MEMORY
from nano_inference.remote.engine_host import EngineHost
from nano_inference.remote.messages import CannotStart


def test_engine_host_reports_a_lack_of_memory_in_one_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def build() -> Any:
        raise MemoryError

    told: list[Any] = []
    assert not EngineHost(told.append).run(build)
    assert told == [CannotStart("ConfigError", NO_MEMORY)]
    assert "Traceback" not in caplog.text
