"""Comparison with the quantisation tools, in a separate environment (`make test-slow`
builds it).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nano_inference.checkpoints.quantised_weights import quantised_weight
from nano_inference.models.spec.quantisation import quantisation_of

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.prefix) / "quantisers" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it"
    ),
]


def test_numbers_equal_those_of_the_quantisation_tools(tmp_path: Path) -> None:
    """The tools are compressed-tensors (also for AutoAWQ's layout), bitsandbytes and gptqmodel."""
    command = [PYTHON, "-W", "ignore", "-m", "tests.checkpoints.with_quantisers", tmp_path]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 23
    for folder in folders:
        numbers = load_file(folder / "numbers.safetensors")["m.weight"]
        with safe_open(folder / "model.safetensors", framework="pt") as opened:
            tensors = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            said = quantisation_of(folder)
            assert said is not None
            shape = tuple(numbers.shape)
            weight = quantised_weight("m.weight", shape, tensors, said, torch.float32)
            assert weight is not None, folder.name
            assert weight.tensors == tensors.keys(), folder.name
            assert torch.allclose(weight[:], numbers, rtol=1e-6, atol=0), folder.name
