"""The program and commands of docs/training-service.md, in its client's environment (`make
test-tinker` builds it).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nano_inference import EngineConfig
from nano_training_service.config import TrainServiceConfig
from nano_training_service.losses import LOSSES
from nano_training_service.main import running_service
from tests.cli.running import run
from tests.docs.test_docs import ROOT

TEXT = (ROOT / "docs" / "training-service.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.M | re.S)
PYTHON = Path(sys.prefix) / "tinker" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-tinker makes it")
def test_program_runs(tmp_path: Path) -> None:
    config = TrainServiceConfig(port=0, state_dir=str(tmp_path / "state"))
    quiet = os.environ | {"HF_HUB_OFFLINE": "1"}
    with running_service(
        EngineConfig("smollm2-135m", max_model_len=512, num_threads=1), config
    ) as url:
        program = "\n".join(BLOCKS).replace("http://127.0.0.1:8001", url)
        command = [PYTHON, "-W", "ignore", "-c", program]
        ran = subprocess.run(
            command, cwd=tmp_path, env=quiet, capture_output=True, text=True, timeout=600
        )
    assert ran.returncode == 0, ran.stderr[-4000:]
    losses = [float(line.split()[0]) for line in ran.stdout.splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert list((tmp_path / "state").glob("runs/*/weights/after-3/adapter_config.json"))


def test_options_named_by_the_page_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")  # a narrow terminal shortens names
    known = run("train-service", "--help").output
    named = set(re.findall(r"--[a-z-]+[a-z]", TEXT))
    assert {"--state-dir", "--request-timeout"} <= named
    assert named <= set(re.findall(r"--[a-z-]+[a-z]", known))


def test_page_names_every_loss() -> None:
    (row,) = (line for line in TEXT.splitlines() if line.startswith("| `forward_backward`"))
    assert set(LOSSES) == set(re.findall(r"`(\w+)`", row.split("|")[2])) - {"optim_step"}
