"""No request waits for Triton: what serving launches was compiled when the engine started."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_serving_compiles_no_kernel_after_the_start() -> None:
    """By a process of its own: in this one Triton's kernels are the interpreter's."""
    command = [sys.executable, "-m", "tests.gpu.kernel_sets"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found) == 2
    for name, kernels in found.items():
        assert kernels["at start"] > 50, name
        assert kernels["later"] == [], name
