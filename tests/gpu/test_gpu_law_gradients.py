"""The law for operations of a backward pass at the widths of real models: a row's gradient has the
same bits in any batch.
"""

import pytest
import torch

from nano_inference.ops.cuda.gradients import CudaGradients
from nano_inference.ops.gradients import PathRows, Rotated
from tests.gpu.target import Target, numbers
from tests.ops.gradient_cases import Attentions, Logits

pytestmark = pytest.mark.gpu

HEADS = {"qwen3-8b": (32, 8, 128), "gpt-oss-20b": (64, 8, 64)}
# rows and columns of a weight: gate and up, down
WEIGHTS = ((24_576, 4096), (4096, 12_288))


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, target: Target) -> torch.dtype:
    if target.dry and request.param == "bfloat16":
        pytest.skip("the interpreter multiplies matrices of bfloat16 wrongly")
    return getattr(torch, request.param)


def test_product_gradient_row_is_independent_of_its_batch(
    target: Target, dtype: torch.dtype
) -> None:
    """Compare products, gradients of inputs, and rows of a weight's gradient."""
    side, most = CudaGradients(dtype, torch.device(target.device)), target.size(400, 70)
    for rows, columns in ((40, 24),) if target.dry else WEIGHTS:
        weight = numbers(1, rows, columns, device=target.device, dtype=dtype, scale=0.05)
        x = numbers(2, most, columns, device=target.device, dtype=dtype)
        d_out = numbers(3, most, rows, device=target.device, dtype=dtype)
        before = numbers(4, most, columns, device=target.device)
        product, d_x = side.product(x, side.packed(weight)), before.clone()
        side.add_product(d_out, side.packed_turned(weight), d_x)
        total = torch.zeros(rows, columns, device=target.device)
        side.add_outer(d_out, x, total)
        for count in (1, 2, target.size(129, 65)):
            part = slice(count, 2 * count)
            assert torch.equal(side.product(x[part], side.packed(weight)), product[part])
            d_part = before[part].clone()
            side.add_product(d_out[part], side.packed_turned(weight), d_part)
            assert torch.equal(d_part, d_x[part]), f"{count} rows of [{rows}, {columns}]"
        some = torch.zeros(8, columns, device=target.device)
        side.add_outer(d_out[:, 16:24].contiguous(), x, some)
        assert torch.equal(some, total[16:24]), "rows of the weight"


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("model", HEADS)
def test_attention_gradient_row_depends_only_on_its_path(
    target: Target, dtype: torch.dtype, model: str, window: int
) -> None:
    """Compare a tree of a prompt and two samples with a path at a time."""
    if target.dry and (model != "gpt-oss-20b" or window):
        pytest.skip("a dry run has one shape")
    heads, kv_heads, size = (4, 2, 16) if target.dry else HEADS[model]
    lengths, branches = ((5, 3, 7), (0, 5, 3)) if target.dry else ((300, 40, 130), (0, 300, 130))
    case = Attentions(lengths, branches, size, (heads, kv_heads), window, 0.0, True, dtype, 0)
    side = CudaGradients(dtype, torch.device(target.device))
    out, d_queries, *_ = case.run(side)
    parts, d_out, sinks = case.inputs()
    start = 0
    for path, count in case.segments():
        alone = Rotated(*(each[path] for each in parts)), d_out[path], sinks
        got = case.results(side, [PathRows(torch.arange(len(path)), len(path))], alone)
        rows = slice(start, start + count)
        assert torch.equal(got[0][-count:], out[rows]), f"{count} rows after row {start}"
        assert torch.equal(got[1][-count:], d_queries[rows]), f"queries after row {start}"
        start += count


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_head_gradient_row_is_bitwise_independent_of_its_batch(target: Target, cap: float) -> None:
    case = Logits(target.size(40, 6), target.size(151_936, 4100), cap, True, torch.float32, 0)
    side, device = CudaGradients(torch.float32, torch.device(target.device)), target.device
    (whole,) = case.run(side)
    logits, (starts, ids, gradients), (mask_rows, words) = case.inputs()
    for first, count in ((0, 1), (case.n - 1, 1), (1, case.n // 2)):
        end = first + count
        targets = slice(int(starts[first]), int(starts[end]))
        part = logits[first:end].to(device)
        moved = starts[first : end + 1] - starts[first], ids[targets], gradients[targets]
        masks = mask_rows[first:end].to(device), words.to(device)
        side.logit_gradient(part, tuple(each.to(device) for each in moved), masks, case.rule)
        assert torch.equal(part, whole[first:end]), f"{count} rows from {first} on"
