"""Every kernel compiles for the supported GPUs, fits in their shared memory, and spills no
registers.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.compile import CALLS
from tests.gpu.compiled import SHARED_MEMORY

pytest.importorskip("triton")

ROW_BY_ROW = (
    "embed",
    "rms_norm",
    "gate",
    "rope_and_store",
    "draw",
    "draw, filtered",
    "score",
    "gradients of products",
    "gradients of rows",
    "gradients of experts",
)  # called with several row counts
# call, shape and architecture of kernels that spill: float32 is for comparisons
SPILL = {
    ("adapters", "Qwen3-0.6B fp32", 100),
    ("attention, float32", "Qwen3-0.6B fp32", 80),
    *(("attention, float32", "Gemma-3-270m fp32", arch) for arch in (80, 90, 100)),
    ("attention, latents, float32", "DeepSeek-V3 fp32", 100),
}


def compiled(path: Path, *options: str) -> list[dict]:
    """Compile in a subprocess, because this process uses Triton's interpreter."""
    command = [sys.executable, "-m", "tests.gpu.compile", "--json", str(path), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(path.read_text())


def check(kernels: list[dict], calls: list[str]) -> None:
    assert [name for name in calls if name not in {k["call"] for k in kernels}] == []
    spill = {(k["call"], k["shape"], k["arch"]) for k in kernels if k["stack"] + k["local"]}
    archs = {k["arch"] for k in kernels}
    assert spill == {row for row in SPILL if row[0] in calls and row[2] in archs}
    assert [k for k in kernels if k["fuses"]] == [], "ops/cuda/__init__.py: without contraction"
    of_trunk = [k for k in kernels if "overlapping" in k["call"] and "quantise" not in k["kernel"]]
    products = [k for k in of_trunk if k["constants"].get("K")]
    assert all(k["ahead"] for k in products), "the weight is requested before the wait"
    of_rows = [
        (k["call"], k["shape"], k["arch"], k["kernel"], str(k["constants"]))
        for k in kernels
        if k["call"] in ROW_BY_ROW
    ]
    assert len(set(of_rows)) == len(of_rows), "a row count compiled its own kernel"
    assert [k for k in kernels if k["shared"] > SHARED_MEMORY[k["arch"]]] == []


@pytest.mark.thorough
def test_few_kernels_compile_without_spills(tmp_path):
    check(
        compiled(tmp_path / "kernels.json", "--small", "--arch", "90"),
        [call.name for call in CALLS if call.small],
    )


@pytest.mark.thorough
def test_norm_with_codes_adds_up_like_the_plain_norm():
    command = [sys.executable, "-m", "tests.gpu.norm_layouts"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout) == {"cases": 96, "others": []}


@pytest.mark.slow
def test_kernels_all_compile_without_spills(tmp_path):
    check(compiled(tmp_path / "kernels.json"), [call.name for call in CALLS])
