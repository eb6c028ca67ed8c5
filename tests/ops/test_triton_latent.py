"""Operations on latents in Triton agree with the reference, and a row's bits are its own."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.ops.interface import LatentWeights, RopeArgs
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.settings import Latent
from tests.depth import at_depth

pytest.importorskip("triton")

from nano_inference.ops.cuda.latent import store, values

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS, BLOCK_SIZE, POSITIONS = 5, 3, 40
SIZES = (
    Latent(rank=32, rotary=16, plain=24, value=48),
    Latent(rank=40, rotary=8, plain=15, value=16),
    Latent(rank=144, rotary=24, plain=72, value=136),
)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@dataclass(frozen=True)
class Case:
    """Arguments of one call.

    Attributes:
        float32_rows: The rows are products of quantized weights, which are not rounded.
        units: A map gives each block's unit.
        scaled: Queries have a factor by position.
    """

    sizes: Latent = SIZES[0]
    heads: int = 3
    rows: int = 5
    dtype: torch.dtype = torch.float32
    interleaved: bool = True
    float32_rows: bool = False
    units: bool = False
    scaled: bool = False
    seed: int = 0

    @property
    def weights(self) -> LatentWeights:
        count = self.heads * (self.sizes.plain + self.sizes.value)
        kv = randn(count, self.sizes.rank, seed=self.seed) * self.sizes.rank**-0.5
        norm = Norm(randn(self.sizes.rank, seed=1, dtype=self.dtype) / 4 + 1, 1e-6, 0.0, self.dtype)
        return LatentWeights(kv.to(self.dtype), norm, self.sizes)

    @property
    def rope(self) -> RopeArgs:
        angles = randn(POSITIONS, self.sizes.rotary // 2, seed=99)
        scales = 1 + randn(POSITIONS, seed=98) / 8 if self.scaled else None
        options: dict[str, Any] = {"interleaved": self.interleaved, "query_scales": scales}
        return RopeArgs(angles.cos(), angles.sin(), self.heads, 1, **options)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, c, positions and slots of the rows."""
        sizes, generator = self.sizes, torch.Generator().manual_seed(self.seed)
        dtype = torch.float32 if self.float32_rows else self.dtype
        q = randn(self.rows, self.heads * (sizes.plain + sizes.rotary), seed=2, dtype=dtype)
        c = randn(self.rows, sizes.rank + sizes.rotary, seed=3, dtype=dtype)
        positions = torch.randint(0, POSITIONS, (self.rows,), generator=generator)
        slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[: self.rows]
        return q, c, positions.to(DEVICE), slots.to(DEVICE)

    def view(self) -> KVStorage:
        """Return a cache full of NaN, of two layers."""
        spec: Any = SimpleNamespace(
            num_layers=2, num_kv_heads=1, head_dim=self.sizes.key, windows=(0, 0), state=None,
            kv_tensors=1, kinds=(),
        )  # fmt: skip
        storage = KVStorage(spec, NUM_BLOCKS, BLOCK_SIZE, self.dtype, DEVICE)
        if self.units:
            order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(7))
            storage.unit_map = SimpleNamespace(units=lambda: order[None].to(DEVICE))  # type: ignore[assignment]
        storage.keys.fill_(torch.nan)
        return storage

    def stored(self, operation: Any, some: Any = slice(None), slots: Any = None) -> list[Tensor]:
        """Return the queries of some rows, and the whole cache."""
        view, inputs = self.view(), list(self.inputs())
        inputs[3] = inputs[3] if slots is None else slots
        q, c, positions, slots = (each[some] for each in inputs)
        queries = operation(q, c, self.weights, self.rope, positions, slots, view, 1)
        return [queries, view.keys]


CASES = st.builds(
    Case,
    sizes=st.sampled_from(SIZES),
    heads=st.sampled_from([1, 3, 8, 9]),
    rows=st.sampled_from([1, 2, 7]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    interleaved=st.booleans(),
    float32_rows=st.booleans(),
    units=st.booleans(),
    scaled=st.booleans(),
    seed=st.integers(0, 99),
)


@pytest.mark.thorough
@settings(deadline=None, max_examples=at_depth(30))
@given(case=CASES, data=st.data())
def test_latent_store_agrees_with_reference(case: Case, data: st.DataObject) -> None:
    """Padding rows among the others store nothing."""
    count = case.rows
    drawn = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    kept = torch.tensor(drawn, dtype=torch.bool, device=DEVICE)
    queries, keys = case.stored(store, slots=case.inputs()[3].where(kept, -1))
    assert queries.shape == (count, case.heads, case.sizes.key)
    assert queries.dtype == case.dtype
    if not any(drawn):
        assert keys.isnan().all()
        return
    expected = case.stored(reference.store_latents, kept)
    size = TOLERANCE[case.dtype]
    torch.testing.assert_close(queries[kept], expected[0], rtol=size, atol=4 * size)
    torch.testing.assert_close(keys, expected[1], rtol=size, atol=4 * size, equal_nan=True)


@settings(deadline=None, max_examples=at_depth(12))
@given(case=CASES)
def test_latent_values_agree_with_reference(case: Case) -> None:
    """The rotated numbers of attended latents are not read."""
    attended = randn(case.rows, case.heads, case.sizes.key, seed=4, dtype=case.dtype)
    expected = reference.latent_values(attended.flatten(1), case.weights)
    attended[:, :, : case.sizes.rotary] = torch.nan
    result = values(attended.flatten(1), case.weights)
    assert result.dtype == case.dtype
    size = TOLERANCE[case.dtype]
    torch.testing.assert_close(result, expected, rtol=size, atol=4 * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_latent_rows_are_independent(sizes: Latent, dtype: torch.dtype) -> None:
    """Compare bitwise: alone, at another place in a large batch, and next to a row of NaN."""
    case = Case(sizes, heads=2, rows=70, dtype=dtype)
    q, c, positions, _ = case.inputs()
    attended = randn(70, 2 * sizes.key, seed=4, dtype=dtype)

    def made(rows: list[int]) -> Tensor:
        """Return queries, outputs and stored keys of the first rows."""
        view = case.view()
        slots = torch.arange(len(rows), device=DEVICE)
        slots = slots.where(slots < NUM_BLOCKS * BLOCK_SIZE, -1)
        queries = store(q[rows], c[rows], case.weights, case.rope, positions[rows], slots, view, 0)
        outputs, keys = values(attended[rows], case.weights), view.keys[0, 0].flatten(0, 1)
        few = slice(0, min(len(rows), len(keys)))
        return torch.cat((queries.flatten(1)[few], outputs[few], keys[few]), dim=1)

    alone = [made([row]) for row in (0, 1, 2)]
    assert not torch.cat(alone).isnan().any()
    some = made([2, 69, 0])
    assert torch.equal(some[[2, 0]], torch.cat([alone[0], alone[2]]))
    many = made(list(range(70)))
    assert torch.equal(many[:3], torch.cat(alone))
    q[1], c[1], attended[1] = torch.nan, torch.nan, torch.nan
    assert torch.equal(made([0, 1, 2])[[0, 2]], torch.cat([alone[0], alone[2]]))


def test_rotary_table_of_another_width_is_rejected() -> None:
    case = Case()
    rope = case.rope._replace(cos=torch.ones(POSITIONS, 4, device=DEVICE))
    q, c, positions, slots = case.inputs()
    with pytest.raises(ValueError, match="turns 8 numbers; the keys of Latent"):
        store(q, c, case.weights, rope, positions, slots, case.view(), 0)
