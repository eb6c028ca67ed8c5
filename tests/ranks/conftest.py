"""Fixtures shared with the engine tests, and the runners of an engine's ranks."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.conftest import (
    build as build,
)
from tests.engine.conftest import (
    model as model,
)
from tests.engine.conftest import (
    tied as tied,
)

if TYPE_CHECKING:
    from nano_inference.device.cuda_runner import CudaRunner


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> "list[CudaRunner]":
    """Runners of all ranks."""
    pytest.importorskip("triton")
    from nano_inference.device.cuda_runner import CudaRunner

    made: list[CudaRunner] = []
    begin = CudaRunner.__init__

    def noted(self: CudaRunner, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(CudaRunner, "__init__", noted)
    return made
