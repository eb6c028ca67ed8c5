"""The cases that a card runs under compute-sanitizer start, step and train in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu.sanitize import IN_FP8, MODELS, exercise


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="a card runs the script itself")
@pytest.mark.parametrize("family", MODELS)
def test_sanitize_runs_coded_weights_of_a_family(family: str) -> None:
    assert exercise(family, "float32", "cpu", family not in IN_FP8) > 1
