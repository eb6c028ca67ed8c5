"""Rotation, head norms and KV stores compared with the reference backend, in Triton's interpreter
on machines without a GPU.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.config import KVCacheDType
from nano_inference.device.kv_tensors import KVStorage, common_layout
from nano_inference.device.units import UnitMap
from nano_inference.kv_cache.sliding_window import BlockLayout, UnitPool
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.interface import HeadNorms, RopeArgs
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.rowwise import Norm
from tests.depth import at_depth
from tests.invariance.scenario import spoil
from tests.models.tiny import MORE_FAMILIES, llama_config
from tests.ops.exactness import assert_close

pytest.importorskip("triton")

from nano_inference.ops.cuda.rows import rope_and_store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS, BLOCK_SIZE, POSITIONS, LAYERS = 6, 3, 40, 4
NONE = torch.zeros(1, dtype=torch.int64)
SEEDS = st.integers(0, 2**20)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@dataclass(frozen=True)
class Case:
    """Arguments of one call."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    # "head" (Qwen 3), "full" (OLMo 2), "offset" (Gemma 3: 1 + w in float32), "rounded"
    norm: str = "none"
    norm_dtype: torch.dtype | None = None
    units: bool = False
    seed: int = 0
    turn: str = "halves"  # "part" (Qwen3-Next), "neighbours" (Ernie), "part of neighbours" (GLM)
    scaled: bool = False  # query scale by position (Ministral 3)
    kept: KVCacheDType = "auto"

    @property
    def turning(self) -> int:
        return max(2, self.head_dim // 4 * 2) if "part" in self.turn else self.head_dim

    def rotation(self) -> tuple[bool, Tensor | None]:
        scales = 1 + torch.rand(POSITIONS, generator=torch.Generator().manual_seed(3))
        return "neighbours" in self.turn, scales.to(DEVICE) if self.scaled else None

    def norms(self) -> tuple[Norm, Norm] | None:
        if self.norm == "none":
            return None
        widths = (
            [self.head_dim] * 2
            if self.norm != "full"
            else [self.heads * self.head_dim, self.kv_heads * self.head_dim]
        )
        weights = [None, None]
        if self.norm != "rounded":
            dtype = torch.float32 if self.norm == "offset" else self.dtype
            weights = [
                randn(width, seed=self.seed + i, dtype=dtype) + 1 for i, width in enumerate(widths)
            ]
        offset = float(self.norm == "offset")
        norm_dtype = self.norm_dtype or self.dtype
        return Norm(weights[0], 1e-6, offset, norm_dtype), Norm(
            weights[1], 1e-4, offset, norm_dtype
        )

    def view(self) -> KVStorage:
        """Return a cache full of NaN. With units: blocks shuffled, three units per block."""
        windows = (4, 0, 4, 4) if self.units else (0,) * LAYERS
        spec = SimpleNamespace(
            num_layers=LAYERS,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            windows=windows,
            state=None,
            kv_tensors=2,
            kinds=(),
        )
        units = None
        if self.units:
            pool = UnitPool(4 * NUM_BLOCKS + 1, NUM_BLOCKS, BlockLayout(1, 3, 4))
            order = torch.randperm(
                pool.num_units, generator=torch.Generator().manual_seed(self.seed)
            ).tolist()
            for index in range(len(pool.unit_of)):
                pool.unit_of[index] = order[index]
            units = UnitMap(pool, DEVICE)
        storage = KVStorage(
            spec, NUM_BLOCKS, BLOCK_SIZE, self.cache_dtype, DEVICE, units, self.kept
        )
        spoil(storage, slice(None))
        return storage

    def rows(self, num: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (qkv, positions, slots) of random rows."""
        generator = torch.Generator().manual_seed(self.seed)
        qkv = randn(
            num,
            (self.heads + 2 * self.kv_heads) * self.head_dim,
            seed=self.seed + 5,
            dtype=self.dtype,
        )
        positions = torch.randint(0, POSITIONS, (num,), generator=generator)
        return (
            qkv,
            positions.to(DEVICE),
            torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num].to(DEVICE),
        )


def called(case: Case, operation, qkv: Tensor, positions: Tensor, slots: Tensor, layer: int = 2):
    """Return (queries, keys, values): the operation's result and the whole cache."""
    angles = randn(POSITIONS, case.turning // 2, seed=99)
    view, norms = case.view(), case.norms()
    q = operation(
        qkv,
        RopeArgs(
            angles.cos(),
            angles.sin(),
            case.heads,
            case.kv_heads,
            HeadNorms(*(norms or ())),
            *case.rotation(),
        ),
        positions,
        slots,
        view,
        layer,
    )
    return q, view.keys, view.values


CASES = st.builds(
    Case,
    kv_heads=st.sampled_from([1, 2, 3, 9]),
    head_dim=st.sampled_from([2, 16, 20, 80, 96]),
    cache_dtype=st.sampled_from([torch.float32, torch.float16]),
    norm=st.sampled_from(["none", "head", "full", "offset", "rounded"]),
    units=st.booleans(),
    seed=SEEDS,
    turn=st.sampled_from(["halves", "part", "neighbours", "part of neighbours"]),
    scaled=st.booleans(),
)


@pytest.mark.thorough
@settings(deadline=None, max_examples=at_depth(30))
@given(
    case=CASES,
    ratio=st.sampled_from([1, 2, 3]),
    num=st.integers(0, 3),
    layer=st.integers(0, 3),
    data=st.data(),
)
def test_rope_and_store(case, ratio, num, layer, data):
    """Padding rows among the others store nothing."""
    case = replace(case, heads=case.kv_heads * ratio)
    qkv, positions, slots = case.rows(num)
    drawn = data.draw(st.lists(st.booleans(), min_size=num, max_size=num))
    stored = torch.tensor(drawn, dtype=torch.bool, device=DEVICE)
    q, keys, values = called(case, rope_and_store, qkv, positions, slots.where(stored, -1), layer)
    assert q.shape == (num, case.heads, case.head_dim)
    if not any(drawn):  # the reference rejects zero rows
        assert keys.isnan().all()
        assert values.isnan().all()
        return
    rows = qkv[stored], positions[stored], slots[stored], layer
    expected = called(case, reference.rope_and_store, *rows)
    eps = 1e-6 if case.cache_dtype == torch.float32 else 1e-3
    assert q.dtype == case.cache_dtype
    torch.testing.assert_close(q[stored], expected[0], rtol=eps, atol=eps)
    torch.testing.assert_close(keys, expected[1], rtol=eps, atol=eps, equal_nan=True)
    assert torch.equal(values.nan_to_num(7), expected[2].nan_to_num(7))


@settings(deadline=None, max_examples=at_depth(12))
@given(
    case=CASES,
    kept=st.sampled_from(["int8", "fp8"]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    spread=st.sampled_from([0, 3, 12]),
    data=st.data(),
)
def test_stored_codes_have_the_bits_of_the_definition(case, kept, dtype, spread, data):
    """Numbers differ by powers of ten up to `spread`. Heads do not rotate, so no sum is rounded."""
    case = replace(
        case, heads=case.kv_heads, head_dim=16, dtype=dtype, cache_dtype=dtype, norm="none",
        turn="halves", scaled=False, kept=kept,
    )  # fmt: skip
    qkv, positions, slots = case.rows(3)
    powers = torch.rand(qkv.shape, generator=torch.Generator().manual_seed(case.seed)) * spread
    qkv = (qkv.float() * 10 ** -powers.to(DEVICE)).to(dtype)
    heads = qkv.view(3, -1, 16)
    heads[1, data.draw(st.integers(0, heads.shape[1] - 1)), 5] = data.draw(
        st.sampled_from([torch.inf, -torch.inf, torch.nan])
    )
    heads[2, data.draw(st.integers(0, heads.shape[1] - 1))] = data.draw(
        st.sampled_from([0.0, -0.0, 1e-35])
    )
    slots[0] = data.draw(st.sampled_from([-1, int(slots[0])]))
    still = torch.ones(POSITIONS, 8, device=DEVICE), torch.zeros(POSITIONS, 8, device=DEVICE)
    caches = []
    for operation, stored in (
        (rope_and_store, slots >= -1),
        (reference.rope_and_store, slots >= 0),
    ):
        view = case.view()
        rope = RopeArgs(*still, case.heads, case.kv_heads)
        operation(qkv[stored], rope, positions[stored], slots[stored], view, 2)
        caches += [parts_of_blocks(each) for each in (view.keys, view.values)]
    for (codes, scales), (wanted, factors) in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(codes, wanted)
        assert torch.equal(scales.isnan(), factors.isnan())  # bits of a NaN have no meaning
        assert torch.equal(scales.nan_to_num(7), factors.nan_to_num(7))


def parts_of_blocks(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of all blocks of heads of 16."""
    blocks = cache.flatten(3)
    codes = BLOCK_SIZE * 16
    return blocks[..., :codes], blocks[..., codes:].contiguous().view(torch.float32)


@settings(deadline=None, max_examples=at_depth(20))
@given(
    case=CASES,
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    cache=st.sampled_from([None, torch.float32]),
    num=st.integers(1, 3),
)
def test_rope_without_a_norm_rounds_once(case, dtype, cache, num):
    case = replace(case, dtype=dtype, cache_dtype=cache or dtype, norm="none")
    for ours, wanted in zip(
        called(case, rope_and_store, *case.rows(num)),
        called(case, reference.rope_and_store, *case.rows(num)),
        strict=True,
    ):
        assert_close(ours.to(dtype), wanted.to(dtype))


@pytest.mark.parametrize("norm", ["head", "full", "offset", "rounded"])
@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32])
def test_normed_heads_are_rounded_before_rotation(norm, norm_dtype):
    """Use float16, which the interpreter rounds as a GPU does. The last bit of a factor may move a
    few numbers by one step.
    """
    case = Case(4, 2, 80, torch.float16, torch.float16, norm, norm_dtype)
    got, wanted = (
        called(case, operation, *case.rows(3))
        for operation in (rope_and_store, reference.rope_and_store)
    )
    for ours, theirs in zip(got, wanted, strict=True):
        same = ours.nan_to_num(7) == theirs.nan_to_num(7)
        assert same.float().mean() > 0.99
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=8e-3, equal_nan=True)


@pytest.mark.parametrize("norm", ["none", "head", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_rows_are_independent(norm, dtype):
    """Compare bitwise: alone, in a smaller batch at another position, and next to a row of NaN."""
    case = Case(6, 3, 20, dtype, dtype, norm)
    qkv, positions, slots = case.rows(4)
    slots = torch.arange(4, device=DEVICE)

    def op(rows: list[int]) -> Tensor:
        q, keys, values = called(case, rope_and_store, qkv[rows], positions[rows], slots[rows])
        stored = [
            cache[2].flatten(1, 2)[:, slots[rows]].transpose(0, 1) for cache in (keys, values)
        ]
        return torch.cat((q, *stored), dim=1)

    together = op([0, 1, 2, 3])
    assert not together.isnan().any()
    assert torch.equal(op([2, 0]), together[[2, 0]])
    assert torch.equal(op([1]), together[[1]])
    qkv[1] = torch.nan
    assert torch.equal(op([0, 1, 2])[[0, 2]], together[[0, 2]])


def test_cache_offsets_use_64_bits():
    """A small memory is viewed with the strides of a large cache."""
    if DEVICE.type == "cuda":
        pytest.skip("the interpreter's check")
    case = Case(1, 1, 16)
    qkv, positions, _ = case.rows(1)
    blocks = 2**31 // (BLOCK_SIZE * 16) + 7
    storage = KVStorage(
        SimpleNamespace(
            num_layers=1,
            num_kv_heads=1,
            head_dim=16,
            windows=(0,),
            state=None,
            kv_tensors=2,
            kinds=(),
        ),
        blocks,
        BLOCK_SIZE,
        torch.float16,
        DEVICE,
    )  # only one block is touched, the rest is address space
    slot = torch.tensor([blocks * BLOCK_SIZE - 2])
    angles = torch.zeros(POSITIONS, 8)
    rope_and_store(qkv, RopeArgs(angles + 1, angles, 1, 1), positions, slot, storage, 0)
    assert torch.equal(storage.keys[0, 0, blocks - 1, 1], qkv[0, 16:32].half())
    assert torch.equal(storage.values[0, 0, blocks - 1, 1], qkv[0, 32:].half())


GEMMA: dict[str, Any] = llama_config() | MORE_FAMILIES["gemma4"] | {"hidden_act": None}


@settings(deadline=None, max_examples=at_depth(20))
@given(
    layer=st.integers(0, GEMMA["num_hidden_layers"] - 1),
    joint=st.booleans(),
    normed=st.booleans(),
    units=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=SEEDS,
)
def test_heads_of_several_kinds_agree_with_reference(layer, joint, normed, units, dtype, seed):
    """Layers with heads of 16 and of 32, of which the last two of seven store no keys. Values may
    be made of the keys, and have a norm of their own.
    """
    spec = spec_from_config(GEMMA)
    kind, layout = spec.kinds[layer], common_layout([spec], 512)
    kept = kind.num_kv_heads if kind.keys_of == layer else 0
    angles = randn(POSITIONS, kind.head_dim // 2, seed=99)
    weights = [randn(kind.head_dim, seed=seed + i, dtype=dtype) + 1 for i in range(2)]
    norms = [Norm(weight, 1e-6, 0.0, dtype) for weight in weights]
    ones = torch.ones(kind.head_dim, device=DEVICE)
    of_values = Norm(ones, 1e-6, 0.0, dtype) if normed and kept else None
    rope = RopeArgs(
        angles.cos(), angles.sin(), 4, kept, HeadNorms(norms[0], norms[1], of_values), joint=joint
    )
    columns = (4 + (1 if joint else 2) * kept) * kind.head_dim
    qkv = randn(3, columns, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    positions, slots = torch.tensor([3, 0, 39]), torch.randperm(18, generator=generator)[:3]
    results = []
    for operation in (rope_and_store, reference.rope_and_store):
        pool = UnitPool(NUM_BLOCKS * layout.num_units, NUM_BLOCKS, layout)
        order = torch.randperm(pool.num_units, generator=generator.manual_seed(seed)).tolist()
        for index in range(len(pool.unit_of)):
            pool.unit_of[index] = order[index]
        mapped = UnitMap(pool, DEVICE) if units else None
        storage = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE, dtype, DEVICE, mapped)
        spoil(storage, slice(None))
        where = positions.to(DEVICE), slots.to(DEVICE), storage, layer
        results.append((operation(qkv, rope, *where), storage.keys, storage.values))
    size = 1e-6 if dtype == torch.float32 else 2e-3
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=size, atol=4 * size, equal_nan=True)
    assert results[0][1].isnan().all() == (not kept)


def test_norm_of_another_width_is_rejected():
    case = Case()
    norm = Norm(torch.ones(8, device=DEVICE), 1e-6, 0.0, torch.float32)
    angles, (qkv, positions, slots) = torch.zeros(POSITIONS, 8, device=DEVICE), case.rows(1)
    rope = RopeArgs(angles, angles, 4, 2, HeadNorms(norm, norm))
    with pytest.raises(ValueError, match="norm of 8 weights"):
        rope_and_store(qkv, rope, positions, slots, case.view(), 0)
