"""No request waits for Triton: the engine compiles all serving kernels at its start. They can also
be precompiled on a machine without a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run(module: str, *options: str, **environment: str) -> str:
    """Run in a subprocess, because this process uses Triton's interpreter."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{module}", *options],
        capture_output=True,
        text=True,
        timeout=600,
        env=inherited | environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.thorough
def test_serving_compiles_no_kernel_after_the_start() -> None:
    report = json.loads(run("kernel_sets"))
    for name, least in (("training", 15), ("training experts", 25)):
        training = report.pop(name)
        assert training["at start"] > least, name
        assert training["later"] == [], name
    assert len(report) == 16
    for name, kernels in report.items():
        assert kernels["at start"] > 50, name
        assert kernels["later"] == [], name


@pytest.mark.thorough
def test_precompile_fills_the_cache_that_triton_reads(tmp_path: Path) -> None:
    counts: list[dict[Path, int]] = []
    for _ in range(2):
        said = run("precompile", "--dry-run", TRITON_CACHE_DIR=str(tmp_path))
        assert said == "verdict: 3 kernels"
        counts.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")})
    assert len(counts[0]) == 3
    assert counts[0] == counts[1], "compiled again"
