"""Paged attention of the CPU kernels is correct and has the same bits however a row is computed."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nano_inference.ops.cpu.build import LAWS
from tests.depth import at_depth
from tests.ops.cpu_attention import (
    Chunk,
    Kernels,
    Paging,
    Shape,
    make_texts,
)
from tests.ops.cpu_kernels import available, kernels

BLOCK_SIZES = (1, 4, 16, 24, 32, 64)
FEW = settings(
    max_examples=at_depth(60), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="module", params=LAWS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return kernels(available(request.param)[0])


shapes = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from((1, 2, 3, 4, 8)),
    head_dim=st.sampled_from((16, 64, 80, 96, 128, 256, 304)),
    is_bf16=st.booleans(),
    window=st.sampled_from((0, 0, 0, 1, 7, 64, 100, 700)),
    has_sinks=st.booleans(),
    cap=st.sampled_from((0.0, 0.0, 0.5, 50.0)),
    one_tensor=st.just(False),
    codes=st.booleans(),
) | st.builds(
    Shape,
    num_kv_heads=st.just(1),
    group=st.sampled_from((1, 3, 8, 34)),
    head_dim=st.sampled_from((48, 64, 288)),
    is_bf16=st.booleans(),
    window=st.sampled_from((0, 0, 100)),
    has_sinks=st.just(False),
    cap=st.just(0.0),
    one_tensor=st.just(True),
    codes=st.just(False),
)
# DeepSeek-V3's shape
LATENTS = Shape(1, 128, 576, True, one_tensor=True)
pagings = st.builds(
    Paging,
    block_size=st.sampled_from(BLOCK_SIZES),
    seed=st.integers(0, 9),
    units=st.booleans(),
    share=st.booleans(),
    num_threads=st.integers(1, 3),
)


@st.composite
def chunk_lists(draw: st.DrawFn) -> tuple[list[Chunk], list[int]]:
    """Draw chunks of sequences 0, 1, ... and the number of leading tokens that each shares with the
    previous one.
    """
    chunks: list[Chunk] = []
    shared: list[int] = []
    for seq in range(draw(st.integers(1, 6))):
        start = draw(st.one_of(st.integers(0, 200), st.integers(400, 1300)))
        length = draw(st.sampled_from((1, 1, 1, 2, 5, 33, 90)))
        common = 0
        if seq and draw(st.booleans()):
            start = max(1, chunks[-1].start + draw(st.integers(-40, 40)))
            common = min(start, chunks[-1].start)
        chunks.append(Chunk(seq, start, start + length))
        shared.append(common)
    return chunks, shared


def with_cuts(paging: Paging, num_rows: int, data: st.DataObject) -> Paging:
    if not data.draw(st.booleans()):
        return paging
    inner = data.draw(st.lists(st.integers(0, num_rows), max_size=2).map(sorted))
    return Paging(paging.block_size, paging.seed, paging.units, paging.share, cuts=tuple(inner))


@pytest.mark.thorough
@FEW
@given(shapes, chunk_lists(), pagings, st.integers(0, 99))
@example(Shape(2, 3, 64, True), ([Chunk(0, 1299, 1300)], [0]), Paging(24, num_threads=2), 0)
@example(
    Shape(1, 8, 128, True),
    ([Chunk(i, 600 + i, 601 + i) for i in range(4)], [0, 600, 600, 600]),
    Paging(),
    1,
)
@example(
    Shape(2, 3, 64, True, codes=True), ([Chunk(0, 1299, 1300)], [0]), Paging(24, num_threads=2), 0
)
@example(Shape(2, 3, 64, True, codes=True), ([Chunk(0, 1280, 1300)], [0]), Paging(), 0)
@example(Shape(2, 3, 64, False, codes=True), ([Chunk(0, 90, 130)], [0]), Paging(32), 0)
@example(LATENTS, ([Chunk(0, 62, 66)], [0]), Paging(num_threads=3), 0)
@example(
    LATENTS._replace(is_bf16=False, group=16),
    ([Chunk(0, 62, 66), Chunk(1, 530, 531)], [0, 0]),
    Paging(24),
    0,
)
def test_attention_agrees_with_double_precision(library, shape, drawn, paging, seed) -> None:
    chunks, shared = drawn
    kernels = Kernels(
        library, shape, make_texts(shape, [c.end for c in chunks], shared, seed), shared
    )
    for chunk, bits in zip(chunks, kernels.attention(chunks, paging), strict=True):
        expected, weight = kernels.expected(chunk)
        error = np.abs(kernels.values(bits) - expected)
        allowed = weight * (2**-7 if shape.is_bf16 else 1e-5) + 1e-30  # sinks may exceed it
        assert (error <= allowed).all()  # no NaN either


@pytest.mark.thorough
@FEW
@given(shapes, chunk_lists(), pagings, st.data())
def test_attention_row_is_bitwise_independent_of_its_batch(
    library, shape, drawn, paging, data
) -> None:
    chunks, shared = drawn
    num_rows = sum(chunk.end - chunk.start for chunk in chunks)
    kernels = Kernels(library, shape, make_texts(shape, [c.end for c in chunks], shared, 0), shared)
    together = kernels.attention(chunks, with_cuts(paging, num_rows, data))
    for chunk, bits in zip(chunks, together, strict=True):
        row = data.draw(st.integers(chunk.start, chunk.end - 1))
        (single,) = kernels.attention([Chunk(chunk.seq, row, row + 1)], Paging())
        assert (single[0] == bits[row - chunk.start]).all()
        first = data.draw(st.integers(0, chunk.start))
        (longer,) = kernels.attention(
            [Chunk(chunk.seq, first, chunk.end)], Paging(16, num_threads=2)
        )
        assert (longer[chunk.start - first :] == bits).all()


@pytest.mark.thorough(cases=[])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("is_bf16", [True, False])
@pytest.mark.parametrize("codes", [True, False])
def test_nan_in_a_row_does_not_reach_the_rows_before_it(library, codes, is_bf16, window) -> None:
    shape, chunk = Shape(1, 1, 64, is_bf16, window, codes=codes), Chunk(0, 60, 90)
    texts = make_texts(shape, [chunk.end], [0], 0)
    (clean,) = Kernels(library, shape, texts, [0]).attention([chunk], Paging())
    for bad in range(chunk.start + 1, chunk.end):
        texts[0].k[bad:] = texts[0].v[bad:] = np.nan
        texts[0].k[bad + 1 :] = 0
        (spoilt,) = Kernels(library, shape, texts, [0]).attention([chunk], Paging())
        assert (spoilt[: bad - chunk.start] == clean[: bad - chunk.start]).all()
        assert np.isnan(
            Kernels(library, shape, texts, [0]).values(spoilt)[bad - chunk.start :]
        ).all()
        texts = make_texts(shape, [chunk.end], [0], 0)


def test_attention_is_bitwise_independent_of_head_splits(library) -> None:
    """One KV head whose keys are its values serves 72 query heads: four times 18."""
    whole = Shape(1, 72, 64, True, one_tensor=True)
    chunks = [Chunk(0, 70, 75), Chunk(1, 599, 600)]
    texts = make_texts(whole, [c.end for c in chunks], [0, 0], 0)
    together = Kernels(library, whole, texts, [0, 0]).attention(chunks, Paging(num_threads=2))
    for heads in (slice(1), slice(5, 38)):
        shape = whole._replace(group=len(range(72)[heads]))
        some = [replace(text, q=text.q[:, heads]) for text in texts]
        bits = Kernels(library, shape, some, [0, 0]).attention(chunks, Paging())
        for a, b in zip(together, bits, strict=True):
            assert (a.reshape(len(a), 72, -1)[:, heads] == b.reshape(len(b), shape.group, -1)).all()


@pytest.mark.thorough
@FEW
@given(
    chunk_lists(),
    st.sampled_from(BLOCK_SIZES),
    st.booleans(),
    st.booleans(),
    st.sampled_from(
        [
            Shape(2, 1, 80, False),
            Shape(2, 1, 80, False, codes=True),
            Shape(1, 1, 80, False, one_tensor=True),
        ]
    ),
)
def test_stored_rows_come_back(library, drawn, block_size, units, is_bf16, shape) -> None:
    shape = shape._replace(is_bf16=is_bf16)
    chunk = drawn[0][0]
    kernels = Kernels(library, shape, make_texts(shape, [chunk.end], [0], 0), [0])
    keys, values = kernels.read_back(chunk, Paging(block_size, units=units))
    text = kernels.texts[0]
    assert (keys == shape.kept(text.k)[chunk.start :]).all()
    assert (values == shape.kept(text.v)[chunk.start :]).all()


@pytest.mark.thorough(cases=[])
@pytest.mark.parametrize(
    ("best", "name"), [(best, name) for best, *others in map(available, LAWS) for name in others]
)
@pytest.mark.parametrize("is_bf16", [True, False])
@pytest.mark.parametrize(
    ("window", "has_sinks", "cap"), [(0, False, 0.0), (75, False, 1.5), (75, True, 0.0)]
)
def test_attention_has_same_bits_in_every_build(
    best, name, is_bf16, window, has_sinks, cap
) -> None:
    long = 300 if name.startswith("portable") else 1100
    chunks = [Chunk(0, 0, 70), Chunk(1, long, long + 1), Chunk(2, long, long + 3)]
    ordinary = Shape(2, 3, 16, is_bf16, window, has_sinks, cap)
    for shape in (
        *(ordinary._replace(head_dim=head_dim) for head_dim in (16, 80, 64, 304)),
        *(ordinary._replace(head_dim=head_dim, codes=True) for head_dim in (16, 80, 304)),
        Shape(1, 36, 48, is_bf16, window, has_sinks, cap, one_tensor=True),
    ):
        texts = make_texts(shape, [c.end for c in chunks], [0, 0, long], 3)
        one, other = (
            Kernels(kernels(each), shape, texts, [0, 0, long]).attention(
                chunks, Paging(num_threads=2)
            )
            for each in (best, name)
        )
        for a, b in zip(one, other, strict=True):
            assert (a == b).all()


def test_unsupported_attention_is_rejected(library) -> None:
    shape = Shape(1, 1, 24, False)
    kernels = Kernels(library, shape, make_texts(shape, [4], [0], 0), [0])
    with pytest.raises(AssertionError):
        kernels.attention([Chunk(0, 3, 4)], Paging())
