"""Kernels of recurrent layers: the same bits on every instruction set, thread count and chunking,
and close to the reference.
"""

from typing import Any

import pytest
import torch

from nano_inference.models.spec.states import DeltaNet, StateSpec
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.cpu.state import CpuStates
from nano_inference.ops.reference import state as reference_state
from tests.ops.cpu_kernels import available, kernels
from tests.ops.state_cases import (
    CONV,
    CUTS,
    DELTA,
    LENGTHS,
    SIZE,
    TABLES,
    TILES,
    computed,
    numbers,
    storage,
)


@pytest.fixture(params=available())
def each_set(request: pytest.FixtureRequest) -> Any:
    return kernels(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [CONV, DELTA])
def test_instruction_sets_and_threads_agree(
    each_set: Any, spec: StateSpec, dtype: torch.dtype
) -> None:
    best, kept = computed(spec, dtype, CpuStates(kernels(), 1))
    for threads in (1, 3):
        got, memory = computed(spec, dtype, CpuStates(each_set, threads))
        assert all(torch.equal(*pair) for pair in zip([*got, *memory], [*best, *kept], strict=True))


@pytest.mark.parametrize("spec", [CONV, DELTA])
def test_state_kernels_agree_with_reference(spec: StateSpec) -> None:
    got, _ = computed(spec, torch.float32, CpuStates(kernels(), 2))
    expected, _ = computed(spec, torch.float32, reference_state)
    for pair in zip(got, expected, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_heads_in_tiles_are_the_same_numbers(backend: str) -> None:
    states = CpuStates(kernels(), 2) if backend == "cpu" else reference_state
    results = [computed(spec, torch.float32, states) for spec in (DELTA, TILES)]
    (outputs, kept), (in_tiles, kept_too) = results
    for rows, expected in zip(in_tiles, outputs, strict=True):
        heads = rows.unflatten(1, (4, 48))[:, [0, 2, 1, 3]]
        assert torch.equal(heads.flatten(1), expected)
    assert all(map(torch.equal, kept, kept_too))


@pytest.mark.thorough(cases=["spec1-reference"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("spec", [CONV, DELTA])
def test_state_is_bitwise_independent_of_chunks(spec: StateSpec, backend: str) -> None:
    states = CpuStates(kernels(), 2) if backend == "cpu" else reference_state
    whole, kept = computed(spec, torch.float32, states)
    for cuts in CUTS:
        got, memory = computed(spec, torch.float32, states, cuts)
        assert all(
            torch.equal(*pair) for pair in zip([*got, *memory], [*whole, *kept], strict=True)
        )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("spec", [CONV, DELTA])
def test_state_kernels_read_only_the_window(spec: StateSpec, backend: str) -> None:
    """Memory outside the window may be reused: the scheduler frees it."""
    states: Any = CpuStates(kernels(), 1) if backend == "cpu" else reference_state
    operation = states.delta_net if isinstance(spec, DeltaNet) else states.short_conv
    whole, _ = computed(spec, torch.float32, states)
    projected, weights = numbers(spec, torch.float32)
    view = storage(spec, torch.float32)
    for position in range(LENGTHS[0]):
        behind = max(0, position - spec.window(SIZE) + 1) // SIZE
        for tensor in view.tensors.values():
            tensor[:, list(TABLES[0][:behind])] = torch.nan
        batch = batch_of_rows([Rows([0], position, TABLES[0])], SIZE)
        row = operation(projected[position : position + 1], weights, batch, view, 0)
        assert torch.equal(row[0], whole[0][position])


def test_block_without_a_unit_is_not_read() -> None:
    projected, weights = numbers(CONV, torch.float32)
    view = storage(CONV, torch.float32)
    view.unit_row = lambda: torch.tensor([0, 1, 2, -1, 4, 5, 6, 7, 8, 9])
    batch = batch_of_rows([Rows([0] * 3, 9, TABLES[0])], SIZE)
    with pytest.raises(ValueError, match="no unit"):
        CpuStates(kernels(), 1).short_conv(projected[:3], weights, batch, view, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_instruction_sets_agree_on_the_gate(each_set: Any, dtype: torch.dtype) -> None:
    x, gate = torch.randn(5, 48).to(dtype), torch.randn(5, 96) * 30
    best = CpuStates(kernels(), 1).sigmoid_gate(x, gate[:, 48:])
    assert torch.equal(CpuStates(each_set, 2).sigmoid_gate(x, gate[:, 48:]), best)
    expected = reference_state.sigmoid_gate(x, gate[:, 48:])
    torch.testing.assert_close(
        best, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6
    )
