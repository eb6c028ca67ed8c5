"""Attention in segments: merged in order, they give the bits of the whole row, on any device."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.config import KVCacheDType
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.cpu.build import KernelsUnavailable
from nano_inference.ops.interface import AttentionArgs, Ops, RopeArgs
from nano_inference.ops.reference.attention import SoftmaxState, _merge
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.parallel.context import SEGMENT, SegmentRows
from tests.depth import at_depth
from tests.invariance.scenario import spoil
from tests.ops.test_reference import Shape

CALM = settings(
    max_examples=at_depth(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def backend(name: str, num_threads: int) -> Ops:
    torch.set_num_threads(num_threads)
    if name == "reference":
        return reference_ops()
    try:
        return cpu_ops(num_threads)
    except KernelsUnavailable as problem:
        pytest.skip(str(problem))


def filled(
    shape: Shape, num_tokens: int, block_size: int, kept: KVCacheDType
) -> tuple[KVStorage, list[int]]:
    """Return a storage with keys and values of one sequence, NaN in all other slots, and the
    sequence's blocks.
    """
    num_blocks = -(-num_tokens // block_size)
    device = torch.device("cpu")
    storage = KVStorage(
        shape.spec(), num_blocks + 1, block_size, shape.dtype, device, kv_cache_dtype=kept
    )
    spoil(storage, slice(None))
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)) + 1
    return storage, blocks.tolist()


def written(
    write: Callable[..., object], shape: Shape, blocks: Tensor, block_size: int, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(num_tokens)
    slots = blocks[positions // block_size] * block_size + positions % block_size
    keys, values = (
        torch.randn(num_tokens, shape.num_kv_heads, shape.head_dim, generator=generator).to(
            shape.dtype
        )
        for _ in range(2)
    )
    write(slots, keys, values, positions)


@pytest.mark.thorough(cases=["reference"])
@pytest.mark.parametrize("name", ["reference", "cpu"])
@CALM
@given(data=st.data())
def test_states_of_segments_merge_to_the_bits_of_the_whole(name: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    heads = (
        data.draw(st.integers(1, 2)),
        data.draw(st.sampled_from([1, 3])),
        data.draw(st.sampled_from([16, 48])),
    )
    shape = Shape(*heads, dtype, data.draw(st.sampled_from([0, 0, 1, 60, 700])))
    block_size, threads = data.draw(st.sampled_from([16, 24, 512])), data.draw(st.integers(1, 2))
    ops = backend(name, threads)
    assert ops.partial is not None
    starts = data.draw(
        st.lists(
            st.tuples(st.integers(0, 1700), st.sampled_from([1, 1, 2, 40])), min_size=1, max_size=4
        )
    )
    num_tokens = max(start + count for start, count in starts)
    kept: KVCacheDType = data.draw(st.sampled_from(["auto", "int8"]))
    view, blocks = filled(shape, num_tokens, block_size, kept)

    def write(slots: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        qkv = torch.cat(
            [keys.new_zeros(len(keys), shape.num_heads, shape.head_dim), keys, values], dim=1
        ).flatten(1)
        still = (
            torch.ones(num_tokens, shape.head_dim // 2),
            torch.zeros(num_tokens, shape.head_dim // 2),
        )
        rope = RopeArgs(*still, shape.num_heads, shape.num_kv_heads)
        ops.rope_and_store(qkv, rope, positions, slots, view, 1)

    written(write, shape, torch.tensor(blocks), block_size, num_tokens)
    rows = [Rows([0] * n, start, blocks[: -(-(start + n) // block_size)]) for start, n in starts]
    batch = batch_of_rows(rows, block_size)
    q = torch.randn(
        len(batch.positions),
        shape.num_heads,
        shape.head_dim,
        generator=torch.Generator().manual_seed(2),
    )
    q = q.to(dtype)
    sinks = data.draw(st.sampled_from([None, torch.linspace(200, -40, shape.num_heads)]))
    cap = data.draw(st.sampled_from([0.0, 1.5]))
    plan = ops.plan_attention(batch, block_size, shape.window)
    scores = AttentionArgs(0.3, sinks, cap)
    whole = ops.attention(q, view, 1, plan, scores)
    assert torch.isfinite(whole).all()

    order = torch.tensor(data.draw(st.permutations(range(len(q)))))
    begins = (
        (batch.positions - shape.window + 1).clamp(min=0)
        if shape.window
        else torch.zeros_like(batch.positions)
    )
    parts = SegmentRows(
        batch.positions[order], begins[order], batch.row_chunks[order], batch.block_tables
    )
    states = ops.partial.states(q[order], view, 1, ops.partial.plan(parts, block_size), scores)
    assert states.shape == (
        int(parts.counts.sum()),
        shape.num_heads,
        ops.partial.width(shape.head_dim),
    )
    assert torch.equal(ops.partial.merge(states, parts.counts, dtype, sinks), whole[order])


def test_single_segment_context_is_not_merged() -> None:
    """Contexts up to 512 keys therefore have the bits of plain online softmax, including the sign
    of a zero.
    """
    before = SoftmaxState(torch.tensor([[-math.inf]]), torch.zeros(1, 1), torch.zeros(1, 2))
    state = SoftmaxState(torch.tensor([[3.0]]), torch.tensor([[2.0]]), torch.tensor([[-0.0, 1.0]]))
    for merged, expected in zip(_merge(before, state), state, strict=True):
        assert torch.equal(merged.view(torch.int32), expected.view(torch.int32))
    assert SEGMENT == 512  # also a constant of kernels/attention.h
