"""Miles' rollout code, unmodified, in a separate environment (`make test-slow` creates it)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = Path(sys.prefix) / "trl" / "bin" / "python"
SCRIPT = Path(__file__).with_name("with_miles.py")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it")
def test_miles_samples(rl_server: str) -> None:
    ran = subprocess.run(
        [PYTHON, SCRIPT, rl_server], capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["tokens"] == [5, 6, 7, *report["sent"]]
    assert report["response"] == "".join(report["texts"])
    assert report["response_length"] == len(report["loss_mask"]) == len(report["logprobs"]) == 10
    assert report["versions"] == ["0", "0"]
    assert report["status"] == "truncated"
    assert report["cached"] > 0  # the second turn reuses the first turn's prefix
    # At temperature 1 Miles takes its logprobs as those of the whole vocabulary, even at top_p <
    # 1.
    assert report["logprobs"] == pytest.approx(report["scored"], abs=1e-4)
