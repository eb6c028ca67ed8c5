"""Layers with a state at the widths of real models, compared with the reference in float32 on the
same device.
"""

from typing import Any

import pytest
import torch

from nano_inference.ops.cuda.backend import CudaOps
from nano_inference.ops.reference import state as reference
from tests.gpu.target import STATES, TEXTS, TOY_STATES, Target, numbers
from tests.ops.state_cases import Texts, computed, storage

pytestmark = pytest.mark.gpu

NEAR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("name", STATES)
def test_states(target: Target, dtype: torch.dtype, name: str, size: int) -> None:
    """Compare results and everything that is stored, which keeps float32 in every dtype."""
    if target.dry and (size, dtype) not in ((16, torch.float32), (32, torch.float16)):
        pytest.skip("a dry run has two cases")
    spec = (TOY_STATES if target.dry else STATES)[name]
    texts = (Texts() if target.dry else TEXTS)._replace(size=size, device=target.device)
    views = [storage(spec, dtype, texts) for _ in range(2)]
    results = [
        computed(spec, dtype, states, texts=texts, view=view)[0]
        for states, view in zip((CudaOps(batch_invariant=False), reference), views, strict=True)
    ]
    near: dict[str, Any] = {"rtol": NEAR[dtype], "atol": NEAR[dtype], "equal_nan": True}
    for rows, expected in zip(*results, strict=True):
        torch.testing.assert_close(rows, expected, **near)
    for column, kept in views[0].tensors.items():
        torch.testing.assert_close(kept, views[1].tensors[column], **near)


def test_gate_of_attention(target: Target, dtype: torch.dtype) -> None:
    for rows in (1, 7) if target.dry else (1, 7, 2048):
        x = numbers(1, rows, 4096, device=target.device, dtype=dtype)
        wide = numbers(2, rows, 9216, device=target.device, dtype=dtype, scale=8.0)
        got = CudaOps(batch_invariant=False).sigmoid_gate(x, wide[:, :4096])
        expected = reference.sigmoid_gate(x, wide[:, :4096])
        torch.testing.assert_close(got, expected, rtol=NEAR[dtype], atol=1e-6)
