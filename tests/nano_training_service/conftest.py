"""A bigram service on a thread of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_training_service.config import TrainServiceConfig
from nano_training_service.main import running_service
from tests.cli.conftest import folders as folders
from tests.nano_training_service.asking import Asker
from tests.nano_training_service.bigrams import Bigrams


class Services:
    """Factory of services that share one folder of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = TrainServiceConfig()  # configuration of the latest service

    @contextmanager
    def __call__(self, base: Bigrams | None = None, **options: Any) -> Iterator[str]:
        self.config = TrainServiceConfig(port=0, state_dir=str(self.folder), **options)
        with running_service(base or Bigrams(), self.config) as url:
            try:
                yield url
            finally:
                while Asker.opened:
                    Asker.opened.pop().close()

    @contextmanager
    def in_haste(self, seconds: float = 1.0) -> Iterator[None]:
        """Limit the requests of this block to `seconds`, but not earlier or later ones."""
        patient = self.config.request_timeout
        object.__setattr__(self.config, "request_timeout", seconds)
        yield
        object.__setattr__(self.config, "request_timeout", patient)


@pytest.fixture
def service(tmp_path: Path) -> Services:
    """Return a factory of services: use it in a `with` block, which yields the URL."""
    # The first optimizer of a process imports torch's compiler for seconds; sessions would expire.
    torch.optim.AdamW([torch.zeros(1)])
    return Services(tmp_path / "state")
