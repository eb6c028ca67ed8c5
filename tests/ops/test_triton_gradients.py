"""Gradients of the CUDA kernels: near those of torch's autograd in float64, in Triton's interpreter
on machines without a GPU.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.gradients import PathRows, Rotated, RouteShape
from nano_inference.ops.settings import Routing
from tests.depth import at_depth
from tests.ops.gradient_cases import Attentions, Case, Experts, cases, numbers

pytest.importorskip("triton")

from nano_inference.ops.cuda import gradient_experts, gradient_products
from nano_inference.ops.cuda.gradient_attention import key_tiles, query_tiles
from nano_inference.ops.cuda.gradient_products import add_matrices
from nano_inference.ops.cuda.gradients import CudaGradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = settings(
    max_examples=at_depth(12), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# the interpreter multiplies matrices of bfloat16 wrongly
CASES = cases(st.sampled_from([torch.float32, torch.float16]), most=30)


def results_of(case: Case) -> Sequence[Tensor]:
    return [each.cpu() for each in case.run(CudaGradients(case.dtype, DEVICE))]


@pytest.mark.thorough(cases=["rotation", "attention"])
@pytest.mark.parametrize("operation", CASES)
@FEW
@given(st.data())
def test_cuda_gradients_equal_autograd(operation: str, data: Any) -> None:
    case = data.draw(CASES[operation])
    case.require(results_of(case))


@pytest.mark.thorough
@FEW
@given(CASES["attention"])
def test_attention_rows_depend_only_on_their_paths(case: Attentions) -> None:
    """The bits of outputs and of gradients of queries are those of each path by itself."""
    out, d_queries, *_ = results_of(case)
    parts, d_out, sinks = case.inputs()
    start = 0
    for path, num_rows in case.segments():
        alone = Rotated(*(each[path] for each in parts)), d_out[path], sinks
        segments = [PathRows(torch.arange(len(path)), len(path))]
        results = case.results(CudaGradients(case.dtype, DEVICE), segments, alone)
        rows = slice(start, start + num_rows)
        assert torch.equal(results[0][-num_rows:].cpu(), out[rows])
        assert torch.equal(results[1][-num_rows:].cpu(), d_queries[rows])
        start += num_rows


@FEW
@given(CASES["experts"])
def test_gradients_of_an_expert_depend_only_on_its_rows(case: Experts) -> None:
    """The bits are those of a micro-batch of these rows, and of one product of a dense layer."""
    side, ids = CudaGradients(case.dtype, DEVICE), case.ids()
    x, stack, bias, d_out, factors, total, total_bias = case.inputs()
    whole = case.results(side, ids, case.inputs())
    out, d_inputs = (each.unflatten(0, ids.shape) for each in whole[:2])
    d_by_row = d_out.unflatten(0, ids.shape)
    for expert in range(case.count):
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        part = slice(expert * case.rows, (expert + 1) * case.rows)
        if not len(rows):
            assert torch.equal(whole[4][part].cpu(), total[part])
            assert torch.equal(whole[5][part].cpu(), total_bias[part])
            continue
        alone = x[rows], stack, bias, d_by_row[rows].flatten(0, 1), factors[rows], total, total_bias
        results = case.results(side, ids[rows], alone)
        here = torch.arange(len(rows)), choice
        assert torch.equal(results[0].unflatten(0, (len(rows), -1))[here], out[rows, choice])
        assert torch.equal(results[1].unflatten(0, (len(rows), -1))[here], d_inputs[rows, choice])
        assert torch.equal(results[4][part], whole[4][part])
        assert torch.equal(results[5][part], whole[5][part])
        dense, dense_bias = total[part].to(DEVICE), total_bias[part].to(DEVICE)
        of_expert = d_by_row[rows, choice].to(DEVICE)
        side.add_outer(of_expert, x[rows].to(DEVICE), dense)
        side.add_columns(of_expert, dense_bias)
        assert torch.equal(dense, whole[4][part])
        assert torch.equal(dense_bias, whole[5][part])


@FEW
@given(CASES["attention"], st.sampled_from([1, 7, 64]))
def test_attention_tiles_hold_every_visible_pair_once(case: Attentions, size: int) -> None:
    segments = case.segments()
    paths = [int(row) for path, _ in segments for row in path]
    expected = {
        (int(query), int(key))
        for path, num_rows in segments
        for place, query in enumerate(path[-num_rows:], len(path) - num_rows)
        for key in path[: place + 1]
    }
    walked = [
        (first + i, paths[place + key])
        for place, first, rows, position in query_tiles(segments, size)
        for i in range(rows)
        for key in range(position + i + 1)
    ]
    assert sorted(walked) == sorted(expected)
    tiles, readers = key_tiles(segments, size)
    read = [
        (start + row, first + key)
        for first, _, position, first_reader, end in tiles
        for start, num_rows, start_position, seen in readers[first_reader:end]
        for row in range(num_rows)
        for key in range(seen)
        if position + key <= start_position + row
    ]
    assert sorted(read) == sorted(expected)


def test_long_sums_are_added_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one accumulator, small numbers would be lost after a large one."""
    monkeypatch.setattr(gradient_products, "SEGMENT", 256)
    left, right = torch.full((1, 5 * 256), 2.0**-6), torch.ones(5 * 256, 1)
    left[0, :256] = 0
    left[0, 0] = 2.0**24
    out = torch.zeros(1, 1, device=DEVICE)
    add_matrices(left.to(DEVICE), right.to(DEVICE), out)
    assert float(out) == 2.0**24 + 4 * 4


def test_long_sums_of_an_expert_are_added_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the second of three experts begin after one row of the first."""
    monkeypatch.setattr(gradient_experts, "SEGMENT", 256)
    d_out = torch.full((1 + 5 * 256, 1), 2.0**-6)
    d_out[:257] = 0
    d_out[0] = d_out[1] = 2.0**24
    side, ids = CudaGradients(torch.float32, DEVICE), torch.ones(len(d_out), 1, dtype=torch.int64)
    ids[0] = 0
    total = torch.zeros(3, 1, device=DEVICE)
    choices = side.choices(ids.to(DEVICE), 3)
    side.add_expert_outers(d_out.to(DEVICE), torch.ones_like(d_out).to(DEVICE), choices, total)
    assert total.flatten().tolist() == [2.0**24, 2.0**24 + 4 * 4, 0]


def test_mismatched_rows_of_experts_are_rejected() -> None:
    side = CudaGradients(torch.float32, torch.device("cpu"))
    choices = side.choices(torch.tensor([[0, 2], [1, 2]]), 3)
    weights = side.packed_experts(numbers(1, 3 * 8, 16), 3)
    with pytest.raises(ValueError, match="do not fit 4 choices"):
        side.expert_products(numbers(2, 3, 16), weights, choices)
    with pytest.raises(ValueError, match="do not give"):
        side.add_expert_outers(numbers(2, 4, 8), numbers(3, 4, 16), choices, torch.zeros(8, 16))
    with pytest.raises(ValueError, match="do not fit rows"):
        side.row_products(numbers(2, 4, 8), numbers(2, 4, 9))
    shape = RouteShape(3, Routing(2, True), "gated")
    with pytest.raises(ValueError, match="do not fit 3 experts"):
        side.route_weights(numbers(1, 2, 3), torch.tensor([[0, 2], [1, 2]]), shape)


def test_mismatched_matrices_are_rejected() -> None:
    out = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="does not give"):
        add_matrices(numbers(1, 3, 15), numbers(2, 16, 8), out)
    with pytest.raises(ValueError, match="does not give"):
        add_matrices(numbers(1, 3, 16).half(), numbers(2, 16, 8), out)
    with pytest.raises(ValueError, match="copy it first"):
        add_matrices(numbers(1, 3, 32)[:, ::2], numbers(2, 16, 8), out)
    with pytest.raises(ValueError, match="adjacent columns"):
        add_matrices(numbers(1, 3, 16), numbers(2, 16, 8), out.half())


def test_attention_plan_is_made_once_for_all_layers() -> None:
    case = Attentions((5, 3), (0, 3), 16, (2, 1), 0, 0.0, False, torch.float32, 0)
    side = CudaGradients(torch.float32, DEVICE)
    paths = side.paths(case.segments())
    assert paths.query_tiles(4) is paths.query_tiles(4)
    assert paths.key_tiles(4)[0] is paths.key_tiles(4)[0]
