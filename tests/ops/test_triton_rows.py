"""Row kernels compared with the reference backend, in Triton's interpreter on machines without a
GPU.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.reference import backend as reference
from nano_inference.ops.rowwise import Norm
from nano_inference.sampling.noise import stream_keys
from tests.depth import at_depth
from tests.ops.exactness import assert_close

pytest.importorskip("triton")

from nano_inference.ops.cuda import rows as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALM = settings(deadline=None, max_examples=at_depth(25))
WIDTHS = st.sampled_from([1, 2, 64, 96, 127, 1000])
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
ACTIVATIONS = st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"])
SEEDS = st.integers(0, 2**20)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@CALM
@given(
    num=st.integers(0, 3),
    width=WIDTHS,
    dtype=DTYPES,
    added=st.sampled_from([None, "float32", "own"]),
    weighted=st.booleans(),
    out=st.sampled_from([None, torch.float32]),
    offset=st.sampled_from([0.0, 1.0]),
    scale=st.sampled_from([1.0, 0.22]),
    seed=SEEDS,
)
def test_rms_norm(num, width, dtype, added, weighted, out, offset, scale, seed):
    residual = randn(num, width, seed=seed)
    x = (
        None
        if added is None
        else randn(num, width, seed=seed + 1, dtype=torch.float32 if added == "float32" else dtype)
    )
    norm = Norm(
        randn(width, seed=seed + 2, dtype=dtype) if weighted else None, 1e-5, offset, out or dtype
    )
    before = residual.clone()
    normed, new = kernels.rms_norm(x, residual, norm, scale)
    expected, residual_expected = reference.rms_norm(x, residual, norm, scale)
    assert normed.dtype == norm.dtype
    assert_close(normed, expected)
    assert torch.equal(new, residual_expected)
    assert torch.equal(residual, before), "the input residual was written"


@CALM
@given(width=st.sampled_from([96, 3584]), dtype=DTYPES, seed=SEEDS)
def test_rms_norm_of_a_block_output(width, dtype, seed):
    """Norms of a block's output read the weights' dtype and return float32."""
    x = randn(2, width, seed=seed, dtype=dtype)
    norm = Norm(randn(width, seed=seed + 1), 1e-6, 1.0, torch.float32)
    assert_close(kernels.rms_norm(None, x, norm)[0], reference.rms_norm(None, x, norm)[0])


def test_rms_norm_of_the_widest_rows():
    residual, norm = randn(2, 16_384, seed=1), Norm(randn(16_384, seed=2), 1e-6, 0.0, torch.float32)
    assert_close(
        kernels.rms_norm(residual, residual, norm)[0],
        reference.rms_norm(residual, residual, norm)[0],
    )
    with pytest.raises(ValueError, match="65,537"):
        kernels.rms_norm(
            None, torch.zeros(1, 65_537, device=DEVICE), Norm(None, 0.0, 0.0, torch.float32)
        )


def test_padding_rows_may_hold_anything():
    """Padding rows produce no output and do not affect other rows."""
    residual, norm = randn(6, 96, seed=1), Norm(randn(96, seed=2), 1e-6, 0.0, torch.float32)
    alone = kernels.rms_norm(residual, residual, norm)[0]
    residual[1:5] *= torch.tensor([[1e19], [1e38], [torch.inf], [torch.nan]], device=DEVICE)
    beside = kernels.rms_norm(residual, residual, norm)[0]
    assert torch.equal(beside[0], alone[0])
    assert torch.equal(beside[5], alone[5])


@CALM
@given(num=st.integers(0, 3), inner=WIDTHS, dtype=DTYPES, activation=ACTIVATIONS, seed=SEEDS)
def test_gate(num, inner, dtype, activation, seed):
    gate_up = randn(num, 2 * inner, seed=seed, dtype=dtype) * 4
    assert_close(kernels.gate(gate_up, activation), reference.gate(gate_up, activation))


def test_gate_of_several_blocks_and_of_extremes():
    wide = randn(1, 2 * 2500, seed=3)
    wide[0, :6] = torch.tensor([0.0, 90.0, -90.0, 200.0, -200.0, -1e4])
    for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
        torch.testing.assert_close(
            kernels.gate(wide, activation), reference.gate(wide, activation), rtol=1e-6, atol=1e-30
        )


@CALM
@given(
    num=st.integers(0, 4),
    width=WIDTHS,
    dtype=DTYPES,
    scale=st.sampled_from([1.0, 33.75]),
    seed=SEEDS,
)
def test_embed(num, width, dtype, scale, seed):
    weight, ids = randn(7, width, seed=seed, dtype=dtype), torch.arange(num, device=DEVICE) * 5 % 7
    assert torch.equal(kernels.embed(ids, weight, scale), reference.embed(ids, weight, scale))


def operations(width: int, dtype: torch.dtype):
    """Return operations on float32 rows [N, width]."""
    norm = Norm(randn(width, seed=7, dtype=dtype), 1e-6, 0.0, dtype)
    return {
        "rms_norm": lambda rows: torch.cat(
            [t.float() for t in kernels.rms_norm(rows.to(dtype), rows, norm)], dim=1
        ),
        "rms_norm alone": lambda rows: kernels.rms_norm(None, rows, norm)[0],
        "rms_norm without weight": lambda rows: kernels.rms_norm(
            None, rows, norm._replace(weight=None)
        )[0],
        "gate": lambda rows: kernels.gate(torch.cat((rows, rows), dim=1).to(dtype)),
        "embed": lambda rows: kernels.embed(torch.arange(len(rows), device=DEVICE), rows),
    }


@pytest.mark.parametrize("name", operations(1, torch.float32))
@settings(deadline=None, max_examples=at_depth(6))
@given(num=st.integers(2, 5), width=st.sampled_from([96, 1000]), dtype=DTYPES, data=st.data())
def test_rows_are_independent(name, num, width, dtype, data):
    """Compare bitwise: alone, in a batch, and in a smaller batch at another position. A row of NaN
    affects only itself.
    """
    op, rows = operations(width, dtype)[name], randn(num, width, seed=data.draw(SEEDS))
    together = op(rows)
    order = data.draw(st.permutations(range(num)))[: data.draw(st.integers(1, num))]
    assert torch.equal(op(rows[order]), together[order])
    assert torch.equal(torch.cat([op(row[None]) for row in rows]), together)
    spoilt = data.draw(st.integers(0, num - 1))
    rows[spoilt] = torch.nan
    others = [row for row in range(num) if row != spoilt]
    result = op(rows)
    assert result[spoilt].isnan().all()
    assert torch.equal(result[others], together[others])


def test_strided_and_unaligned_rows_are_read_correctly():
    """The kernels copy such rows first, because other addresses would change Triton's order of
    additions.
    """
    buffer, norm = randn(4 * 200 + 1, seed=5), Norm(randn(97, seed=6)[1:], 1e-6, 0.0, torch.float32)
    odd = buffer[1:].view(4, 200)[:, :96]
    for x, residual in ((odd, odd), (None, odd)):
        together = [t.contiguous() for t in (x, residual) if t is not None]
        expected = kernels.rms_norm(None if x is None else together[0], together[-1], norm)
        for ours, wanted in zip(kernels.rms_norm(x, residual, norm), expected, strict=True):
            assert torch.equal(ours, wanted)
    assert torch.equal(kernels.gate(odd), kernels.gate(odd.contiguous()))


@CALM
@given(data=st.data())
def test_relay_tokens(data):
    num, drawn = data.draw(st.integers(0, 600)), data.draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(data.draw(SEEDS))
    sources = torch.randint(-1, drawn, (num,), generator=generator).to(DEVICE)
    ids, tokens = torch.arange(num, device=DEVICE), 1000 + torch.arange(drawn, device=DEVICE)
    expected = torch.where(sources < 0, ids, 1000 + sources)
    kernels.relay_tokens(ids, sources, tokens)
    assert torch.equal(ids, expected)


@CALM
@given(
    draws=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), max_size=4),
    more=st.integers(0, 300),
    seed=SEEDS,
)
def test_noise_keys_equal_the_host_keys(draws, more, seed):
    generator = np.random.default_rng(seed)
    streams = np.array([stream for stream, _ in draws], dtype=np.uint64)
    streams = np.concatenate([streams, generator.integers(0, 2**64, more, dtype=np.uint64)])
    positions = np.array([position for _, position in draws] + list(range(more)), dtype=np.uint64)
    keys = torch.full((len(streams) + 1, 2), -7, device=DEVICE)
    on_device = [torch.from_numpy(a.view(np.int64)).to(DEVICE) for a in (streams, positions)]
    kernels.make_noise_keys(on_device[0], on_device[1], keys[:-1])
    assert np.array_equal(keys[:-1].cpu().numpy(), stream_keys(streams, positions))
    assert (keys[-1] == -7).all()
