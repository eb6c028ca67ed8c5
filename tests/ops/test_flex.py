"""flex_attention over paged keys and values agrees with an explicit mask and compiles only a few
kernels.
"""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.errors import ConfigError
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.rope import RopeSpec
from nano_inference.ops import flex
from nano_inference.ops.batches import ForwardBatch, forward_batch
from nano_inference.ops.flex import HeadShape, flex_ops, require_flex
from nano_inference.ops.interface import AttentionArgs, Ops
from nano_inference.ops.reference import attention as reference_attention
from nano_inference.ops.reference.backend import reference_ops
from tests.depth import at_depth
from tests.ops.compiler import NEEDS_COMPILER

# torch's compiler still uses APIs that torch deprecates.
pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"), NEEDS_COMPILER]

CPU = torch.device("cpu")
# Sizes shared by all tests, because each new kernel takes seconds to compile.
NUM_BLOCKS = 128
HEADS = HeadShape(4, 2, 16, 0.25)
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Piece:
    """Rows [start, end) of sequence `seq` in one call. All earlier rows are already stored."""

    seq: int
    start: int
    end: int


class Paged:
    """Sequences in one paged storage, filled with NaN at first. Sequences may share their first
    blocks.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        block_size: int = 16,
        num_blocks: int = NUM_BLOCKS,
        heads: HeadShape = HEADS,
        shared_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.block_size, self.num_blocks, self.heads, self.dtype = (
            block_size,
            num_blocks,
            heads,
            dtype,
        )
        self.storage = KVStorage(spec(heads), num_blocks, block_size, dtype, CPU)
        self.storage.keys.fill_(math.nan)
        self.storage.values.fill_(math.nan)
        order = torch.randperm(num_blocks, generator=generator).tolist()
        prefix = [order.pop() for _ in range(shared_blocks)]
        self.tables = [
            (prefix + [order.pop() for _ in range(-(-length // block_size))])[
                : -(-length // block_size)
            ]
            for length in lengths
        ]

        def drawn(num_heads: int) -> list[Tensor]:
            shape = (max(lengths), num_heads, heads.head_dim)
            common = torch.randn(shape, generator=generator)[: shared_blocks * block_size]
            return [
                torch.cat((common, torch.randn(shape, generator=generator)))[:length].to(dtype)
                for length in lengths
            ]

        self.q, self.k, self.v = (
            drawn(heads.num_heads),
            drawn(heads.num_kv_heads),
            drawn(heads.num_kv_heads),
        )

    def store(self, pieces: Sequence[Piece], layer: int = 1) -> ForwardBatch:
        """Write keys and values [0, end) of every piece and return the batch of the
        pieces' rows.
        """
        batch = self.batch(pieces)
        for piece in pieces:
            places = torch.arange(piece.end)
            slots = (
                torch.tensor(self.tables[piece.seq])[places // self.block_size] * self.block_size
            )
            self.storage.write(
                layer,
                slots + places % self.block_size,
                *(x[piece.seq][: piece.end] for x in (self.k, self.v)),
            )
        return batch

    def batch(self, pieces: Sequence[Piece]) -> ForwardBatch:
        tables = torch.zeros(
            (len(pieces), max(len(table) for table in self.tables)), dtype=torch.int64
        )
        for row, piece in enumerate(pieces):  # the table also lists preallocated blocks
            tables[row, : len(self.tables[piece.seq])] = torch.tensor(self.tables[piece.seq])
        positions = torch.cat([torch.arange(piece.start, piece.end) for piece in pieces])
        lengths = torch.tensor([piece.end - piece.start for piece in pieces])
        row_chunks = torch.arange(len(pieces)).repeat_interleave(lengths)
        slots = (
            tables[row_chunks, positions // self.block_size] * self.block_size
            + positions % self.block_size
        )
        bounds = functional.pad(lengths.cumsum(0), (1, 0))
        none = torch.empty(0, dtype=torch.int64)
        return forward_batch(
            weight_set="policy",
            input_ids=torch.zeros_like(positions),
            positions=positions,
            slot_mapping=slots,
            row_chunks=row_chunks,
            block_tables=tables,
            cu_seqlens_q=bounds,
            seq_lens=torch.tensor([piece.end for piece in pieces]),
            logits_indices=bounds[1:] - 1,
            score_rows=none,
            score_targets=none,
            score_temperatures=none,
            scored=(),
            relay_rows=none,
            relay_sources=none,
            num_prompt_tokens=0,
        )

    def attend(self, pieces: Sequence[Piece], window: int = 0) -> Tensor:
        batch = self.store(pieces)
        plan = flex.plan_attention(self.num_blocks, batch, self.block_size, window)
        return flex.attention(
            self.rows(pieces), self.storage, 1, plan, AttentionArgs(self.heads.scale)
        )

    def reference(self, pieces: Sequence[Piece], window: int = 0) -> Tensor:
        batch = self.store(pieces)
        plan = reference_attention.plan_attention(batch, self.block_size, window)
        return reference_attention.attention(
            self.rows(pieces), self.storage, 1, plan, AttentionArgs(self.heads.scale)
        )

    def rows(self, pieces: Sequence[Piece]) -> Tensor:
        return torch.cat([self.q[piece.seq][piece.start : piece.end] for piece in pieces])

    def exact(self, pieces: Sequence[Piece], window: int = 0) -> Tensor:
        """Attend in float64 by an explicit mask on unpaged tensors."""
        return torch.cat([self._exact(piece, window) for piece in pieces])

    def _exact(self, piece: Piece, window: int) -> Tensor:
        q = self.q[piece.seq][piece.start : piece.end].double().transpose(0, 1)
        k, v = (x[piece.seq][: piece.end].double().transpose(0, 1) for x in (self.k, self.v))
        rows, keys = torch.arange(piece.start, piece.end)[:, None], torch.arange(piece.end)
        mask = (keys <= rows) & (keys > rows - window) if window else keys <= rows
        ratio = self.heads.num_heads // self.heads.num_kv_heads
        k, v = k.repeat_interleave(ratio, dim=0), v.repeat_interleave(ratio, dim=0)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.heads.scale
        )
        return out.transpose(0, 1).flatten(1)


def spec(heads: HeadShape) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        vocab_size=8,
        max_position=1024,
        rms_norm_eps=1e-5,
        ropes=(RopeSpec(),) * 2,
        windows=(0, 0),
        attention_scale=heads.scale,
        tie_word_embeddings=False,
        eos_token_ids=(),
        checkpoint_dtype="float32",
    )


def assert_agrees(
    paged: Paged, pieces: Sequence[Piece], window: int, tolerance: float = TOLERANCE
) -> None:
    got = paged.attend(pieces, window)
    assert got.dtype == paged.dtype
    torch.testing.assert_close(got.double(), paged.exact(pieces, window), rtol=0, atol=tolerance)
    torch.testing.assert_close(got, paged.reference(pieces, window), rtol=0, atol=tolerance)


# -- correctness -----------------------------------------------------------------------------------


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Paged, list[Piece], int]:
    """Draw decode rows, short chunks and long chunks: up to 15 tiles of one row, up to 15 tiles of
    32.
    """
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    shared = draw(st.integers(0, min(lengths) // 16))
    paged = Paged(lengths, shared_blocks=shared, seed=draw(st.integers(0, 99)))
    pieces: list[Piece] = []
    for seq, length in enumerate(lengths):
        # a sequence that writes to a block does not share it
        end = draw(st.integers(max(1, 16 * shared), length))
        pieces.append(
            Piece(seq, draw(st.sampled_from([end - 1, max(0, end - 5), max(0, end - 40), 0])), end)
        )
    return paged, pieces, draw(st.sampled_from([0, 1, 7, 16, 50, 1000]))


@pytest.mark.thorough
@settings(deadline=None, max_examples=at_depth(40))
@given(workloads())
def test_agrees_with_the_explicit_mask(workload: tuple[Paged, list[Piece], int]) -> None:
    assert_agrees(*workload)


@pytest.mark.thorough
@pytest.mark.parametrize("window", [0, 20])
def test_shared_prefix_decode_rows_and_chunks_in_one_call(window: int) -> None:
    paged = Paged([70, 90, 33, 41, 64, 129], shared_blocks=2)
    pieces = [
        Piece(0, 69, 70),
        Piece(1, 32, 90),
        Piece(2, 32, 33),
        Piece(3, 36, 41),
        Piece(4, 0, 64),
    ]
    assert_agrees(paged, [*pieces, Piece(5, 100, 129)], window)


@pytest.mark.thorough
def test_chunks_one_after_another_agree() -> None:
    paged = Paged([100])
    got = torch.cat([paged.attend([Piece(0, i, min(i + 37, 100))]) for i in range(0, 100, 37)])
    torch.testing.assert_close(
        got.double(), paged.exact([Piece(0, 0, 100)]), rtol=0, atol=TOLERANCE
    )


@pytest.mark.thorough
def test_very_negative_scores_are_kept() -> None:
    """The CPU kernel that torch selects for single rows returns 0 here."""
    paged = Paged([600, 600])
    paged.q = [torch.ones_like(q) * 8 for q in paged.q]
    paged.k = [-torch.ones_like(k) * 8 + k / 100 for k in paged.k]
    pieces = [Piece(0, 599, 600), Piece(1, 577, 578)]
    assert paged.exact(pieces).abs().max() > 0.01
    torch.testing.assert_close(
        paged.attend(pieces).double(), paged.exact(pieces), rtol=0, atol=2e-5
    )


@pytest.mark.thorough
def test_storage_outside_the_batch_is_unchanged() -> None:
    """The call clears the free tail of blocks that it writes to. All other storage is unchanged."""
    paged = Paged([20, 40, 30])
    paged.store([Piece(0, 0, 20), Piece(1, 0, 40), Piece(2, 0, 30)])
    paged.attend([Piece(0, 19, 20), Piece(1, 0, 40)])
    untouched = torch.ones(NUM_BLOCKS, dtype=torch.bool)
    untouched[[paged.tables[0][1], paged.tables[1][2]]] = False
    paged.storage.values[0].fill_(math.nan)
    nan = paged.storage.values[1].isnan().any(dim=(0, 2, 3))
    # all but the full blocks of the three sequences
    assert nan[untouched].sum() == NUM_BLOCKS - 2 - 4
    assert not nan[~untouched].any()


@pytest.mark.thorough
@pytest.mark.parametrize("window", [0, 20])
def test_decode_row_at_every_place_of_a_block(window: int) -> None:
    paged = Paged([49])
    for end in range(1, 50):
        assert_agrees(paged, [Piece(0, end - 1, end)], window)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (3, 1, 12), (7, 1, 80), (2, 2, 7), (8, 1, 128)])
def test_heads_and_dtypes(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    pieces = [Piece(0, 69, 70), Piece(1, 20, 90), Piece(2, 0, 41)]
    paged = Paged([70, 90, 41], heads=HeadShape(*heads, heads[2] ** -0.5), dtype=dtype)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert_agrees(paged, pieces, 0, tolerance)
    assert_agrees(paged, pieces, 20, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 3, 48])
def test_block_sizes(block_size: int) -> None:
    paged = Paged([70, 90, 41], block_size=block_size, num_blocks=960 // block_size)
    for window in (0, 20):
        assert_agrees(paged, [Piece(0, 69, 70), Piece(1, 20, 90), Piece(2, 0, 41)], window)


# -- number of compilations ------------------------------------------------------------------------


# Dynamo gives up after `recompile_limit` graphs of one function: each bucket has to be one of its
# own.
@pytest.mark.thorough
@torch._dynamo.config.patch(recompile_limit=1)
def test_handful_of_kernels_serves_steps_of_every_size() -> None:
    """Lengths, sequence counts, windows and chunk sizes change every step. Only a new bucket
    compiles a kernel.
    """
    flex._compiled.cache_clear()  # compiled by other tests
    paged = Paged([40 + 3 * i for i in range(16)])

    def graphs() -> int:
        return counters["stats"]["unique_graphs"]

    before = graphs()
    for step in range(1, 15):
        decodes = [Piece(seq, 20 + step, 21 + step) for seq in range(1 + step % 4)]
        chunks = [Piece(8 + i, 5 * i, 5 * i + 9 + step) for i in range(step % 4)]
        assert_agrees(paged, decodes + chunks, step % 3 * 9)
    assert graphs() - before == 2  # 4 tiles of one row, 4 tiles of 32
    paged.attend([Piece(seq, 30, 31) for seq in range(5)])
    paged.attend([Piece(seq, 30, 31) for seq in range(16)])
    assert graphs() - before == 3  # 16 tiles of one row


# -- limits reported at engine start ---------------------------------------------------------------


def build(
    heads: HeadShape = HEADS,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Ops:
    require_flex(
        [heads],
        num_blocks=NUM_BLOCKS,
        block_size=block_size,
        dtype=dtype,
        device=torch.device(device),
    )
    return flex_ops(reference_ops(), NUM_BLOCKS)


@pytest.mark.thorough
def test_flex_backend_declares_itself_not_invariant() -> None:
    ops = build()
    assert ops.name == "reference+flex"
    assert not ops.schedule_invariant


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"heads": HeadShape(66, 2, 16, 0.25)}, "66"),
        ({"heads": HeadShape(4, 2, 8, 0.25), "device": "cuda"}, "head_dim=8"),
        ({"block_size": 8, "device": "cuda"}, "block_size"),
        ({"block_size": 48, "device": "cuda"}, "48"),
    ],
)
def test_unsupported_value_is_rejected(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(**change)


@pytest.mark.thorough
def test_incorrect_kernels_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault reads one slot too many. torch's AVX2 kernel with blocks of 8 slots has a larger
    error.
    """
    attend = flex._attend

    def sees_more(
        q: Tensor, keys: Tensor, values: Tensor, tiles: flex.Tiles, *others: Any
    ) -> Tensor:
        return attend(q, keys, values, replace(tiles, last=tiles.last + 1), *others)

    monkeypatch.setattr(flex, "_attend", sees_more)
    with pytest.raises(ConfigError, match="wrong values here with block_size=16"):
        build()


def test_machine_without_avx2_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(ConfigError, match="AVX2"):
        build()


@pytest.mark.thorough
def test_missing_compiler_is_named() -> None:
    program = (
        "from tests.ops.test_flex import build\n"
        "from nano_inference.errors import ConfigError\n"
        "try:\n    build()\nexcept ConfigError as error:\n    print('refused:', error)\n"
    )
    environment = {
        **os.environ,
        "CXX": "no-such-compiler",
        "PYTHONPATH": os.pathsep.join(("src", ".")),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "refused:" in done.stdout
    assert "C++ compiler" in done.stdout
    assert "CXX" in done.stdout


def test_failing_compilation_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such\nkernel\n\nand a long trace")

    monkeypatch.setattr(flex, "_attend", broken)
    with pytest.raises(ConfigError, match=r"\(no such kernel\)"):
        build()
