"""Direct calls of the CPU attention kernels: sequences, a cache full of NaN, and a double-precision
reference.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nano_inference.ops.kv_codes import KvFormat

Floats = NDArray[np.float32]


class _Shape(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "window")
        ),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_rows", "num_chunks")),
        *(
            (name, ctypes.c_void_p)
            for name in ("positions", "slots", "row_chunks", "cu_seqlens", "seq_lens", "tables")
        ),
        ("table_stride", ctypes.c_int64),
    ]


class _Problem(ctypes.Structure):
    _fields_ = [
        ("shape", _Shape),
        *((name, ctypes.c_int64) for name in ("is_bf16", "kv_codes", "num_units")),
        *((name, ctypes.c_void_p) for name in ("units", "keys", "values")),
        ("batch", _Batch),
    ]


class Shape(NamedTuple):
    """Sizes and options of an attention layer."""

    num_kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    is_bf16: bool
    window: int = 0
    has_sinks: bool = False
    cap: float = 0.0
    one_tensor: bool = False  # the keys are also the values
    codes: bool = False  # keys and values are stored as 8-bit codes

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def kept(self, rows: Floats) -> Floats:
        """Return the keys or values as attention sees them."""
        if not self.codes:
            return rows
        form = KvFormat(torch.bfloat16 if self.is_bf16 else torch.float32, codes="int8")
        return form.decode(form.encode(torch.from_numpy(rows))).numpy()

    @property
    def sinks(self) -> Floats | None:
        """Return a sink per query head, from far above the scores to far below them."""
        many = self.num_kv_heads * self.group
        return np.linspace(200, -40, many, dtype=np.float32) if self.has_sinks else None


class Chunk(NamedTuple):
    """Rows [start, end) of a sequence."""

    seq: int
    start: int
    end: int


@dataclass(frozen=True)
class Text:
    """Queries, keys and values of a sequence, [tokens, heads, head_dim], rounded to the cache's
    dtype.
    """

    q: Floats
    k: Floats
    v: Floats


@dataclass(frozen=True)
class Paging:
    """Memory layout of sequences. No layout may change a bit."""

    block_size: int = 16
    seed: int = 0  # seed of the block order
    units: bool = False  # blocks lie in units of another size
    share: bool = True  # sequences share the blocks of common prefixes
    num_threads: int = 1
    cuts: tuple[int, ...] | None = None  # rows at which the work passes from one thread to the next


def round_bf16(x: Floats) -> NDArray[np.uint16]:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(x: NDArray[np.uint16]) -> Floats:
    return (x.astype(np.uint32) << 16).view(np.float32)


def make_texts(
    shape: Shape, lengths: Sequence[int], shared: Sequence[int], seed: int
) -> list[Text]:
    """Make sequences of these lengths. The first shared[i] tokens equal those of the previous
    sequence.
    """
    rng = np.random.default_rng(seed)
    texts: list[Text] = []
    for length, common in zip(lengths, shared, strict=True):
        heads = (shape.num_kv_heads * shape.group, shape.num_kv_heads, shape.num_kv_heads)
        parts = [rng.normal(size=(length, n, shape.head_dim)).astype(np.float32) for n in heads]
        parts[0] *= 2  # some keys weigh much more than others
        if shape.is_bf16:
            parts = [widen(round_bf16(part)) for part in parts]
        if common:
            for part, before in zip(parts[1:], (texts[-1].k, texts[-1].v), strict=True):
                part[:common] = before[:common]
        q, k, v = parts
        texts.append(Text(q, k, k if shape.one_tensor else v))
    return texts


class Kernels:
    """The kernel library for one shape and some sequences."""

    def __init__(
        self, library: ctypes.CDLL, shape: Shape, texts: Sequence[Text], shared: Sequence[int]
    ) -> None:
        self.library, self.shape, self.texts, self.shared = library, shape, texts, shared
        self.dtype = np.uint16 if shape.is_bf16 else np.float32

    def attention(self, chunks: Sequence[Chunk], paging: Paging) -> list[NDArray[np.uint32]]:
        """Return the bits of each chunk's rows [rows, heads * head_dim], computed in one call."""
        tables, num_blocks = self._tables(chunks, paging)
        units = self._units(num_blocks, paging)
        num_units = num_blocks + 3
        cache = self._cache(num_units, paging, 0x7FC0 if self.shape.is_bf16 else np.nan)
        for index, chunk in enumerate(chunks):
            self._store(chunk, tables[index], units, cache, paging)
        counts = [chunk.end - chunk.start for chunk in chunks]
        rows = np.repeat(np.arange(len(chunks)), counts)
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        q = self._cast(
            np.concatenate([self.texts[chunk.seq].q[chunk.start : chunk.end] for chunk in chunks])
        )
        out = np.full_like(q, 0x7FC1 if self.shape.is_bf16 else np.nan)
        arrays = (
            positions,
            rows,
            np.cumsum([0, *counts]),
            np.array([chunk.end for chunk in chunks]),
            tables,
        )
        problem, kept = self._problem(paging, units, cache, *arrays)
        cuts = (
            None if paging.cuts is None else np.array([0, *paging.cuts, len(rows)], dtype=np.int64)
        )
        threads = paging.num_threads if cuts is None else len(cuts) - 1
        sinks = self.shape.sinks
        code = self.library.nano_attention(
            ctypes.byref(problem),
            ctypes.c_void_p(q.ctypes.data),
            None if sinks is None else ctypes.c_void_p(sinks.ctypes.data),
            ctypes.c_void_p(out.ctypes.data),
            threads,
            None if cuts is None else ctypes.c_void_p(cuts.ctypes.data),
        )
        assert code == 0
        del kept
        flat = out.reshape(len(rows), -1)
        bits = flat.astype(np.uint32) if self.shape.is_bf16 else flat.view(np.uint32)
        return np.split(bits, np.cumsum(counts)[:-1])

    def values(self, bits: NDArray[np.uint32]) -> Floats:
        """Return bits as numbers [rows, heads, head_dim]."""
        numbers = widen(bits.astype(np.uint16)) if self.shape.is_bf16 else bits.view(np.float32)
        return numbers.reshape(len(bits), -1, self.shape.head_dim)

    def expected(self, chunk: Chunk) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the output in double precision and sum(p * |v|), the scale of the error bound."""
        text, shape = self.texts[chunk.seq], self.shape
        k, v = (
            np.repeat(x[: chunk.end].astype(np.float64), shape.group, axis=1)
            for x in (shape.kept(text.k), shape.kept(text.v))
        )
        scores = (
            np.einsum("qhd,khd->hqk", text.q[chunk.start : chunk.end].astype(np.float64), k)
            * shape.scale
        )
        if shape.cap:
            scores = shape.cap * np.tanh(scores / shape.cap)
        position, key = np.arange(chunk.start, chunk.end)[:, None], np.arange(chunk.end)[None, :]
        scores[
            :, (key > position) | ((key <= position - shape.window) if shape.window else False)
        ] = -np.inf
        if shape.sinks is not None:
            sink = np.broadcast_to(shape.sinks[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, sink], axis=-1)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p = (p / p.sum(axis=-1, keepdims=True))[..., : chunk.end]
        return np.einsum("hqk,khd->qhd", p, v), np.einsum("hqk,khd->qhd", p, np.abs(v))

    def read_back(self, chunk: Chunk, paging: Paging) -> tuple[Floats, Floats]:
        """Return the chunk's keys and values as stored."""
        tables, num_blocks = self._tables([chunk], paging)
        units = self._units(num_blocks, paging)
        cache = self._cache(num_blocks + 3, paging, 0)
        self._store(chunk, tables[0], units, cache, paging)
        positions = np.arange(chunk.start, chunk.end)
        problem, kept = self._problem(
            paging, units, cache, positions, positions * 0, positions, positions, tables
        )
        text = self.texts[chunk.seq]
        keys, values = (np.zeros_like(x[chunk.start : chunk.end]) for x in (text.k, text.v))
        self.library.nano_read_kv(
            ctypes.byref(problem), *(ctypes.c_void_p(x.ctypes.data) for x in (keys, values))
        )
        del kept
        return keys, values

    def _cache(
        self, num_units: int, paging: Paging, fill: float
    ) -> tuple[NDArray[np.generic], ...]:
        """Return the key and value caches: one cache twice if keys are the values. Code scales
        start as NaN.
        """
        codes, row = self.shape.codes, self.shape.head_dim
        size = (self.shape.num_kv_heads, num_units, paging.block_size * (row + 4 * codes))
        kind, number = (np.int8, -1) if codes else (self.dtype, fill)
        keys, values = (np.full(size, number, kind) for _ in range(2))
        return keys, keys if self.shape.one_tensor else values

    def _cast(self, x: Floats) -> NDArray[np.generic]:
        return np.ascontiguousarray(round_bf16(x) if self.shape.is_bf16 else x)

    def _lowest(self, chunk: Chunk) -> int:
        return max(0, chunk.start - self.shape.window + 1) if self.shape.window else 0

    def _tables(self, chunks: Sequence[Chunk], paging: Paging) -> tuple[NDArray[np.int64], int]:
        """Return block tables and the number of blocks. Unused entries name block 0, which is full
        of NaN.
        """
        size, num_blocks = paging.block_size, 1
        tables = np.zeros(
            (len(chunks), max(-(-chunk.end // size) for chunk in chunks)), dtype=np.int64
        )
        for i, chunk in enumerate(chunks):
            shared_blocks = 0
            if paging.share and i and chunks[i - 1].seq == chunk.seq - 1 and not self.shape.window:
                shared_blocks = min(self.shared[chunk.seq], chunks[i - 1].end, chunk.start) // size
                tables[i, :shared_blocks] = tables[i - 1, :shared_blocks]
            count = -(-chunk.end // size)
            tables[i, shared_blocks:count] = np.arange(
                num_blocks, num_blocks + count - shared_blocks
            )
            num_blocks += count - shared_blocks
        order = np.random.default_rng(paging.seed).permutation(np.arange(1, num_blocks))
        tables = np.concatenate([[0], order])[tables]
        for i, chunk in enumerate(chunks):
            tables[i, : self._lowest(chunk) // size] = 0
        return tables, num_blocks

    def _units(self, num_blocks: int, paging: Paging) -> NDArray[np.int64] | None:
        return (
            np.random.default_rng(paging.seed + 1).permutation(num_blocks + 3)[:num_blocks]
            if paging.units
            else None
        )

    def _store(
        self,
        chunk: Chunk,
        table: NDArray[np.int64],
        units: NDArray[np.int64] | None,
        cache: tuple[NDArray[np.generic], ...],
        paging: Paging,
    ) -> None:
        positions = np.arange(self._lowest(chunk), chunk.end)
        problem, kept = self._problem(
            paging, units, cache, positions, positions * 0, positions, positions, table[None]
        )
        text = self.texts[chunk.seq]
        new = [self._cast(x[positions]) for x in (text.k, text.v)]
        self.library.nano_store(
            ctypes.byref(problem), *(ctypes.c_void_p(x.ctypes.data) for x in new)
        )
        del kept

    def _problem(
        self,
        paging: Paging,
        units: NDArray[np.int64] | None,
        cache: tuple[NDArray[np.generic], ...],
        positions: NDArray[np.int64],
        row_chunks: NDArray[np.int64],
        cu_seqlens: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
        tables: NDArray[np.int64],
    ) -> tuple[_Problem, list[NDArray[np.int64]]]:
        """Return the problem and the arrays that must outlive it."""
        shape, size = self.shape, paging.block_size
        slots = tables[row_chunks, positions // size] * size + positions % size
        kept = [
            np.ascontiguousarray(x)
            for x in (positions, slots, row_chunks, cu_seqlens, seq_lens, tables)
        ]
        batch = _Batch(len(positions), len(tables), *(x.ctypes.data for x in kept), tables.shape[1])
        heads = (shape.num_kv_heads * shape.group, shape.num_kv_heads)
        c_shape = _Shape(*heads, shape.head_dim, size, shape.window, shape.scale, shape.cap)
        addresses = (
            units.ctypes.data if units is not None else None,
            *(x.ctypes.data for x in cache),
        )
        kinds = (shape.is_bf16, shape.codes)
        return _Problem(c_shape, *kinds, cache[0].shape[1], *addresses, batch), kept
