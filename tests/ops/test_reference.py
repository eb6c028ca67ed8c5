"""The law of the reference backend, operation by operation: the bits of a row do not depend on
other rows.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.rope import RopeSpec
from nano_inference.ops.batches import forward_batch
from nano_inference.ops.interface import AttentionArgs, RopeArgs
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.reference.attention import attention, plan_attention
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.ops.rowwise import Norm
from nano_inference.sampling.logprobs import logsumexp
from tests.depth import at_depth

CALM = settings(deadline=None, max_examples=at_depth(25))
SIZES = st.integers(24, 600)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
THREADS = (1, 2, 3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread by default: most tensors here are too small for threads to help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_stand_alone(
    op: Callable[[Tensor], Tensor], rows: Tensor, data: st.DataObject
) -> None:
    """Check bitwise equality of each row alone, all rows together, and fewer rows reordered, with
    1, 2 and 3 threads.
    """
    torch.set_num_threads(1)
    alone = torch.cat([op(rows[i : i + 1]) for i in range(len(rows))])
    order = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert torch.equal(op(rows), alone), f"together, {threads} threads"
        assert torch.equal(op(rows[order]), alone[order]), f"moved, {threads} threads"
        assert torch.equal(op(rows[order[0] : order[0] + 1]), alone[order[:1]]), (
            f"alone, {threads} threads"
        )


# -- independent rows ------------------------------------------------------------------------------


@CALM
@given(
    num=st.integers(1, 40),
    size=SIZES,
    out=st.integers(1, 400),
    dtype=DTYPES,
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_linear(
    num: int, size: int, out: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    weight = randn(out, size, seed=seed, dtype=dtype)
    assert_rows_stand_alone(
        lambda x: reference.linear(x, weight), randn(num, size, seed=seed + 1000, dtype=dtype), data
    )


@CALM
@given(num=st.integers(1, 40), size=SIZES, vocab=st.integers(1, 700), dtype=DTYPES, data=st.data())
def test_logits(num: int, size: int, vocab: int, dtype: torch.dtype, data: st.DataObject) -> None:
    weight = randn(vocab, size, dtype=dtype)
    assert_rows_stand_alone(
        lambda x: reference.logits(x, weight), randn(num, size, seed=1, dtype=dtype), data
    )


def test_products_have_the_same_bits_with_any_number_of_threads() -> None:
    """MKL splits narrow products by columns and long products within a sum, depending on settings
    and vendor.
    """
    sizes = [(16, 512), (32, 64), (48, 192), (176, 64), (64, 4096), (576, 1536)]
    products = [(randn(9, k), randn(n, k, seed=1)) for n, k in sizes]
    torch.set_num_threads(1)
    alone = [reference.linear(*each) for each in products]
    for threads in (2, 3, 5, 8, 16):
        torch.set_num_threads(threads)
        for (x, weight), one in zip(products, alone, strict=True):
            result = reference.linear(x, weight)
            assert torch.equal(result, one), f"{threads} threads, {tuple(weight.shape)}"


def test_norm_of_a_single_long_row_does_not_depend_on_threads() -> None:
    x, norm = randn(2, 33000), Norm(randn(33000, seed=1), 1e-6, 0.0, torch.float32)
    together = reference.normed_rows(x, norm)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        alone = torch.cat([reference.normed_rows(row, norm) for row in x.split(1)])
        assert torch.equal(alone, together), f"{threads} threads"


def test_logits_of_a_vocabulary_of_several_tiles() -> None:
    weight, hidden = randn(2 * reference.VOCAB_TILE + 77, 40), randn(19, 40, seed=1)
    together = reference.logits(hidden, weight)
    assert torch.equal(torch.cat([reference.logits(row[None], weight) for row in hidden]), together)
    torch.testing.assert_close(together, hidden @ weight.T, rtol=1e-5, atol=1e-4)


@CALM
@given(num=st.integers(1, 40), size=SIZES, dtype=DTYPES, first=st.booleans(), data=st.data())
def test_rms_norm(
    num: int, size: int, dtype: torch.dtype, first: bool, data: st.DataObject
) -> None:
    weight = randn(size, dtype=dtype) + 1

    def op(rows: Tensor) -> Tensor:
        x = None if first else rows[:, :size].to(dtype)
        normed, residual = reference.rms_norm(x, rows[:, size:], Norm(weight, 1e-5, 0.0, dtype))
        assert normed.dtype == dtype
        assert residual.dtype == torch.float32
        return torch.cat((normed.float(), residual), dim=1)

    assert_rows_stand_alone(op, randn(num, 2 * size, seed=1), data)


@CALM
@given(num=st.integers(1, 40), size=SIZES, dtype=DTYPES, data=st.data())
def test_gate(num: int, size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    assert_rows_stand_alone(reference.gate, randn(num, 2 * size, dtype=dtype) * 4, data)


@CALM
@given(num=st.integers(1, 40), size=SIZES, dtype=DTYPES, data=st.data())
def test_embed(num: int, size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    weight = randn(50, size, dtype=dtype)
    ids = torch.arange(num) * 7 % 50
    assert_rows_stand_alone(lambda rows: reference.embed(rows, weight), ids, data)
    assert torch.equal(reference.embed(ids, weight), weight[ids].float())


@CALM
@given(num=st.integers(1, 40), vocab=st.integers(1, 3000), data=st.data())
def test_logsumexp(num: int, vocab: int, data: st.DataObject) -> None:
    assert_rows_stand_alone(
        lambda rows: torch.stack(logsumexp(rows), dim=1), randn(num, vocab) * 4, data
    )


LARGE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: reference.linear(x, randn(3000, x.shape[1], dtype=x.dtype)),
    "logits": lambda x: reference.logits(x, randn(3000, x.shape[1], dtype=x.dtype)),
    "rms_norm": lambda x: reference.rms_norm(
        x, x.float() + 1, Norm(randn(x.shape[1]), 1e-5, 1.0, x.dtype)
    )[0],
    "gate": lambda x: reference.gate(4 * x),
    "logsumexp": lambda x: torch.stack(logsumexp(x.float()), dim=1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LARGE)
def test_large_operations_ignore_threads_and_other_rows(name: str, dtype: torch.dtype) -> None:
    """Sizes are large enough for torch to use threads, and odd, so thread boundaries do not match
    rows or vectors.
    """
    op, rows = (
        LARGE[name],
        randn(21 if name in ("linear", "logits") else 67, 1106, seed=1, dtype=dtype),
    )
    torch.set_num_threads(1)
    alone = torch.cat([op(row[None]) for row in rows])
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert torch.equal(op(rows), alone), f"together, {threads} threads"
        assert torch.equal(op(rows[20:21]), alone[20:21]), f"alone, {threads} threads"


def test_gate_rounding_is_independent_of_thread_boundaries() -> None:
    """A library's sigmoid depends on them in one case of twenty, because its vector and scalar
    forms differ.
    """
    for seed in range(40):
        rows = randn(67, 1106, seed=seed) * 4
        torch.set_num_threads(1)
        one = reference.gate(rows)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(reference.gate(rows), one)


# -- correctness -----------------------------------------------------------------------------------


def test_linear_and_logits_multiply() -> None:
    x, weight = randn(37, 130), randn(61, 130, seed=1)
    exact = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(reference.linear(x, weight), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(reference.logits(x, weight), exact, rtol=1e-5, atol=1e-4)


def test_logits_of_bfloat16_are_not_rounded() -> None:
    x, weight = randn(3, 130, dtype=torch.bfloat16), randn(61, 130, seed=1, dtype=torch.bfloat16)
    logits = reference.logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits, (x.double() @ weight.double().T).float(), rtol=1e-5, atol=1e-4
    )


def test_linear_of_zero_rows_is_empty() -> None:
    weight = randn(5, 8)
    assert reference.linear(torch.empty(0, 8), weight).shape == (0, 5)
    assert reference.logits(torch.empty(0, 8), weight).shape == (0, 5)


def test_rms_norm_adds_then_scales() -> None:
    x, residual, weight = randn(4, 30), randn(4, 30, seed=1), randn(30, seed=2)
    norm = Norm(weight, 1e-3, 0.0, torch.float32)
    normed, added = reference.rms_norm(x, residual, norm)
    assert torch.equal(added, residual + x)
    exact = functional.rms_norm(added.double(), (30,), weight.double(), 1e-3).float()
    torch.testing.assert_close(normed, exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(reference.rms_norm(None, residual, norm)[1], residual)
    halves, added = reference.rms_norm(
        x.bfloat16(), residual, Norm(weight.bfloat16(), 1e-3, 0.0, torch.bfloat16)
    )
    assert halves.dtype == torch.bfloat16
    assert torch.equal(added, residual + x.bfloat16().float()), "the residual stream was rounded"


def test_gate_computes_silu_times_up() -> None:
    both = torch.cat(
        (torch.tensor([[-100.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4, -1e4]]), randn(1, 8)), dim=1
    )
    first, second = both.double().chunk(2, dim=1)
    gated = reference.gate(both)
    torch.testing.assert_close(
        gated, (functional.silu(first) * second).float(), rtol=1e-5, atol=1e-30
    )
    assert torch.isfinite(gated).all()


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    ratio: int  # query heads per key-value head
    head_dim: int
    dtype: torch.dtype = torch.float32
    window: int = 0
    has_sinks: bool = False
    cap: float = 0.0

    @property
    def sinks(self) -> Tensor | None:
        """Return a sink per query head, from far above the scores to far below them."""
        return torch.linspace(200, -40, self.num_heads) if self.has_sinks else None

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.ratio

    def spec(self) -> ModelSpec:
        return ModelSpec(
            architecture="LlamaForCausalLM",
            hidden_size=8,
            intermediate_size=8,
            num_layers=2,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=8,
            max_position=1024,
            rms_norm_eps=1e-5,
            ropes=(RopeSpec(),) * 2,
            windows=(0, 0),
            attention_scale=self.head_dim**-0.5,
            tie_word_embeddings=False,
            eos_token_ids=(),
            checkpoint_dtype="float32",
        )


@dataclass(frozen=True)
class Story:
    """Queries, keys and values of one sequence: [length, heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return len(self.q)


def story(shape: Shape, length: int, seed: int) -> Story:
    q = randn(length, shape.num_heads, shape.head_dim, seed=seed, dtype=shape.dtype)
    k = randn(length, shape.num_kv_heads, shape.head_dim, seed=seed + 1, dtype=shape.dtype)
    return Story(
        q, k, randn(length, shape.num_kv_heads, shape.head_dim, seed=seed + 2, dtype=shape.dtype)
    )


class Paged:
    """Stories in one paged storage. Every slot starts as NaN because unwritten slots must never be
    read.
    """

    def __init__(self, shape: Shape, stories: list[Story], block_size: int, seed: int = 0) -> None:
        self.shape, self.stories, self.block_size = shape, stories, block_size
        blocks = [-(-len(each) // block_size) for each in stories]
        num_blocks = sum(blocks) + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in blocks]
        self.unused = order[0]
        self.storage = KVStorage(
            shape.spec(), num_blocks, block_size, shape.dtype, torch.device("cpu")
        )
        self.storage.keys.fill_(math.nan)
        self.storage.values.fill_(math.nan)

    def step(self, chunks: list[tuple[int, int, int]]) -> list[Tensor]:
        """Run chunks (story, start, end) in one batch: write keys and values, attend, and return
        each chunk's rows.
        """
        tables = torch.zeros(
            (len(chunks), max(len(table) for table in self.tables)), dtype=torch.int64
        )
        for row, (which, _, end) in enumerate(chunks):
            needed = self.tables[which][: -(-end // self.block_size)]
            tables[row, : len(needed)] = torch.tensor(needed)
            if self.shape.window:  # blocks outside the window may belong to another sequence by now
                start = chunks[row][1]
                tables[row, : max(0, start - self.shape.window + 1) // self.block_size] = (
                    self.unused
                )
        positions = torch.cat([torch.arange(start, end) for _, start, end in chunks])
        lengths = torch.tensor([end - start for _, start, end in chunks])
        row_chunks = torch.arange(len(chunks)).repeat_interleave(lengths)
        slots = (
            tables[row_chunks, positions // self.block_size] * self.block_size
            + positions % self.block_size
        )
        bounds = functional.pad(lengths.cumsum(0), (1, 0))
        empty = torch.empty(0, dtype=torch.int64)
        batch = forward_batch(
            weight_set="policy",
            input_ids=torch.zeros_like(positions),
            positions=positions,
            slot_mapping=slots,
            row_chunks=row_chunks,
            block_tables=tables,
            cu_seqlens_q=bounds,
            seq_lens=torch.tensor([end for _, _, end in chunks]),
            logits_indices=bounds[1:] - 1,
            score_rows=empty,
            score_targets=empty,
            score_temperatures=empty,
            scored=(),
            relay_rows=empty,
            relay_sources=empty,
            num_prompt_tokens=0,
        )

        def rows(name: str) -> Tensor:
            return torch.cat(
                [getattr(self.stories[which], name)[start:end] for which, start, end in chunks]
            )

        self.storage.write(1, slots, rows("k"), rows("v"))
        plan = plan_attention(batch, self.block_size, self.shape.window)
        scores = AttentionArgs(self.shape.head_dim**-0.5, self.shape.sinks, self.shape.cap)
        out = attention(rows("q"), self.storage, 1, plan, scores)
        assert out.shape == (len(positions), self.shape.num_heads * self.shape.head_dim)
        return list(out.split(lengths.tolist()))

    def whole(self) -> list[Tensor]:
        return self.step([(which, 0, len(each)) for which, each in enumerate(self.stories)])


def exact(shape: Shape, text: Story) -> Tensor:
    """Compute causal attention in float64 by an explicit mask."""
    q, k, v = (part.double().transpose(0, 1) for part in (text.q, text.k, text.v))
    k, v = k.repeat_interleave(shape.ratio, dim=0), v.repeat_interleave(shape.ratio, dim=0)
    behind = torch.arange(len(text))[:, None] - torch.arange(len(text))
    seen = (behind >= 0) & ((behind < shape.window) if shape.window else True)
    scores = q @ k.transpose(1, 2) * shape.head_dim**-0.5
    if shape.cap:
        scores = shape.cap * torch.tanh(scores / shape.cap)
    scores = scores.masked_fill(~seen, -math.inf)
    if shape.sinks is not None:
        sink = shape.sinks.double()[:, None, None].expand(-1, len(text), 1)
        scores = torch.cat([scores, sink], dim=-1)
    out = scores.softmax(dim=-1)[..., : len(text)] @ v
    return out.transpose(0, 1).reshape(len(text), -1)


SHAPES = st.builds(
    Shape,
    num_kv_heads=st.sampled_from([1, 2, 3]),
    ratio=st.sampled_from([1, 2, 3, 4, 7, 8]),
    head_dim=st.sampled_from([8, 12, 16, 20, 64]),
    dtype=DTYPES,
    window=st.sampled_from([0, 0, 1, 7, 64, 65, 130]),
    has_sinks=st.booleans(),
    cap=st.sampled_from([0.0, 0.0, 0.5, 50.0]),
)
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=4)
BLOCK_SIZES = st.sampled_from([1, 3, 16, 64, 100])


def cuts(data: st.DataObject, length: int) -> list[tuple[int, int]]:
    """Split [0, length) into pieces."""
    inner = data.draw(st.sets(st.integers(1, length - 1), max_size=5)) if length > 1 else set[int]()
    bounds = [0, *sorted(inner), length]
    return list(itertools.pairwise(bounds))


@CALM
@given(shape=SHAPES, lengths=LENGTHS, block_size=BLOCK_SIZES, seed=st.integers(0, 99))
def test_attention_agrees_with_float64(
    shape: Shape, lengths: list[int], block_size: int, seed: int
) -> None:
    stories = [story(shape, length, 10 * i + seed) for i, length in enumerate(lengths)]
    for got, text in zip(Paged(shape, stories, block_size, seed).whole(), stories, strict=True):
        assert got.dtype == shape.dtype
        tolerance = 2e-5 if shape.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got.double(), exact(shape, text), rtol=tolerance, atol=tolerance)


@CALM
@given(shape=SHAPES, lengths=LENGTHS, block_size=BLOCK_SIZES, data=st.data())
def test_attention_has_same_bits_in_any_chunks_and_batch(
    shape: Shape, lengths: list[int], block_size: int, data: st.DataObject
) -> None:
    """This is the law itself. Unwritten slots are NaN, so a read beyond the context fails too."""
    stories = [story(shape, length, 10 * i) for i, length in enumerate(lengths)]
    torch.set_num_threads(1)
    alone = [Paged(shape, [each], 16).whole()[0] for each in stories]
    assert all(torch.isfinite(rows).all() for rows in alone)

    torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
    paged = Paged(shape, stories, block_size, seed=1)
    waiting = {which: cuts(data, length) for which, length in enumerate(lengths)}
    computed_rows: dict[int, list[Tensor]] = {which: [] for which in waiting}
    while any(waiting.values()):
        open_ones = [which for which in waiting if waiting[which]]
        chosen = data.draw(st.lists(st.sampled_from(open_ones), min_size=1, unique=True))
        rows = paged.step([(which, *waiting[which].pop(0)) for which in chosen])
        for which, got in zip(chosen, rows, strict=True):
            computed_rows[which].append(got)
    for which, expected in enumerate(alone):
        assert torch.equal(torch.cat(computed_rows[which]), expected)


@CALM
@given(shape=SHAPES, length=st.integers(1, 200))
def test_attention_is_the_same_for_every_block_size(shape: Shape, length: int) -> None:
    text = story(shape, length, 0)
    first, *others = [Paged(shape, [text], size).whole()[0] for size in (1, 3, 16, 64, 100)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("ratio", [1, 4, 7])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_decode_row_equals_its_prefill_row_with_any_threads(num_kv_heads: int, ratio: int) -> None:
    shape = Shape(num_kv_heads, ratio, 64)
    text = story(shape, 200, 0)
    torch.set_num_threads(1)
    expected = Paged(shape, [text], 16).whole()[0]
    for threads in THREADS:
        torch.set_num_threads(threads)
        paged = Paged(shape, [text], 16)
        paged.step([(0, 0, 199)])
        assert torch.equal(paged.step([(0, 199, 200)])[0], expected[199:])
        assert torch.equal(Paged(shape, [text], 16).whole()[0], expected)


@pytest.mark.parametrize("head_dim", [6, 10, 22])
@pytest.mark.parametrize("ratio", [1, 3])
def test_partial_vector_head_is_batch_invariant(head_dim: int, ratio: int) -> None:
    """The head's matrices start at addresses of different alignment."""
    shape = Shape(1, ratio, head_dim)
    text, other = story(shape, 66, 0), story(shape, 40, 7)
    alone = Paged(shape, [text], 16).whole()[0]
    assert torch.equal(Paged(shape, [text, other], 16).whole()[0], alone)
    paged = Paged(shape, [text], 16)
    assert torch.equal(torch.cat([paged.step([(0, i, i + 1)])[0] for i in range(66)]), alone)


def test_attention_of_more_rows_than_one_group() -> None:
    shape = Shape(2, 2, 16)
    stories = [story(shape, 90, 0), story(shape, 150, 5), story(shape, 64, 9)]
    for got, text in zip(Paged(shape, stories, 16).whole(), stories, strict=True):
        torch.testing.assert_close(got.double(), exact(shape, text), rtol=2e-5, atol=2e-5)


def test_large_scores_do_not_overflow() -> None:
    shape = Shape(1, 2, 16)
    text = story(shape, 130, 0)
    loud = Story(text.q * 200, text.k * 200, text.v)
    torch.testing.assert_close(
        Paged(shape, [loud], 16).whole()[0].double(), exact(shape, loud), rtol=2e-3, atol=2e-3
    )


# -- rope ------------------------------------------------------------------------------------------


@CALM
@given(num=st.integers(1, 30), shape=SHAPES, data=st.data())
def test_rope_and_store_row_by_row(num: int, shape: Shape, data: st.DataObject) -> None:
    """Queries are returned rotated, rotated keys and unchanged values are stored, and rows are
    independent.
    """
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    angles = randn(64, head_dim // 2, seed=5)
    cos, sin = angles.cos(), angles.sin()
    places = torch.tensor(
        data.draw(st.lists(st.integers(0, 63), min_size=num, max_size=num, unique=True))
    )
    qkv = randn(num, (heads + 2 * kv_heads) * head_dim, dtype=shape.dtype)

    def op(rows: Tensor) -> Tensor:
        at = rows[:, 0].long()
        storage = KVStorage(shape.spec(), 4, 16, shape.dtype, torch.device("cpu"))
        storage.keys.zero_()
        head_rows = rows[:, 1:].to(shape.dtype)
        q = reference.rope_and_store(
            head_rows, RopeArgs(cos, sin, heads, kv_heads), at, at, storage, 1
        )
        keys, values = storage.gather(1, at)
        assert not storage.gather(0, at)[0].any(), "another layer was written"
        stored = [part.transpose(0, 1).flatten(1) for part in (keys, values)]
        return torch.cat((q.flatten(1).float(), *stored), dim=1)

    rows = torch.cat((places[:, None].float(), qkv.float()), dim=1)
    assert_rows_stand_alone(op, rows, data)

    turned = op(rows).view(num, heads + 2 * kv_heads, head_dim)
    complex_in = torch.complex(
        *qkv.float().view(num, -1, head_dim)[:, : heads + kv_heads].double().chunk(2, dim=-1)
    )
    spun = complex_in * torch.complex(cos.double(), sin.double())[places][:, None]
    expected = torch.cat((spun.real, spun.imag), dim=-1)
    tolerance = 1e-5 if shape.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        turned[:, : heads + kv_heads].double(), expected, rtol=tolerance, atol=tolerance
    )
    assert torch.equal(
        turned[:, heads + kv_heads :], qkv.float().view(num, -1, head_dim)[:, heads + kv_heads :]
    )


def test_reference_backend_is_complete_and_declares_invariance() -> None:
    ops = reference_ops()
    assert ops.name == "reference"
    assert ops.schedule_invariant
    assert ops.version >= 1
