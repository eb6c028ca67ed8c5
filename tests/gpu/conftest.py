"""Skip tests that need a card if there is none, unless `--gpu-dry-run` asks for toy sizes in the
interpreter.
"""

import pytest
import torch

from tests.gpu.target import Target

ON_A_CARD = torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ON_A_CARD and not config.getoption("--gpu-dry-run"):
        return
    dry = config.getoption("--gpu-dry-run")
    reason = "a dry run has no card" if dry else f"torch {torch.__version__} sees no CUDA device"
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and (not dry or marker.kwargs.get("card")):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    dry = request.config.getoption("--gpu-dry-run") or not ON_A_CARD
    return Target("cpu" if dry else "cuda", bool(dry))
