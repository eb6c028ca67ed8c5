"""A step on the wire: what the others cannot know yet. Both ends keep the same mirror of what they
can.

Block tables are mirrored by the rows that `BatchBuilder` keeps for sequences: of one that grew its
new blocks travel. Positions, slots and the rows of chunks follow from where chunks start and how
long they are. How samples are drawn travels once for as long as the same samples are drawn.
Everything is compared by value, or known to be the same object.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from nano_inference.batch import NO_TEMPERATURES, NOTHING, ForwardBatch, layout_of_rows
from nano_inference.kv_cache.units import BlockLayout, UnitPool
from nano_inference.sampling.sampling_batch import NO_ENTRIES, Entries, SamplingBatch

Numbers = np.ndarray  # int64

# Parameters of a draw that stay while the same samples are drawn.
_COLUMNS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence",
    "frequency",
    "repetition",
    "restricted",
    "streams",
)
_FLAGS = ("any_filter", "any_greedy", "any_raw", "any_mask", "most_top")
_ENTRIES = ("allowed", "bias", "banned")


class Part(msgspec.Struct, array_like=True):
    """One `ForwardBatch`. `numbers` holds these in turn, as many as `sizes` says: int64.

    table rows [S], starts [S], lengths [S], input ids [N], logits indices [L], relay rows [R],
    relay sources [R], score rows [P], score targets [P], best rows [T], changed table rows [C], the
    first changed block of each [C], and how many [C], the changed blocks. A batch without table
    rows has its whole tables there instead.
    """

    weight_set: str
    sizes: list[int]
    numbers: bytes
    temperatures: bytes  # float64 [P]
    num_prompt_tokens: int
    num_best: int
    width: int  # of the block tables
    num_rows: int = 0  # of tables that are kept


class Forward(msgspec.Struct, tag="forward"):
    """A forward: copies of blocks int64 [2, K], the parts, and units that stand behind blocks now:
    int64 [1 + U, B].
    """

    copies: bytes
    parts: list[Part]
    units: bytes = b""


class Draw(msgspec.Struct, tag="draw"):
    """The draw of a step.

    Attributes:
        numbers: rows [R], positions [R] and noise keys [R, 2], int64.
        parameters: `_COLUMNS` as bytes, if they are not those of the draw before.
        flags: `_FLAGS`, likewise.
        allowed, bias, banned: entries, if they are not those of the draw before.
        counts: entries, all of them; None: none, or as `grown` says.
        grown: what became of the entries of the draw before, of the same samples: how many each
            sample has now, int64 [R], ids and values of those that are new, places and values of
            those that changed.
    """

    numbers: bytes
    parameters: list[bytes] | None = None
    flags: list[int] | None = None
    allowed: list[bytes] | None = None
    bias: list[bytes] | None = None
    banned: list[bytes] | None = None
    counts: list[bytes] | None = None
    grown: list[bytes] | None = None


class StepEncoder:
    """Rank 0's end."""

    def __init__(self) -> None:
        self._tables = np.zeros((0, 0), dtype=np.int64)
        self._marks = np.zeros(0, dtype=np.int64)
        self._draw: SamplingBatch | None = None

    def forward(
        self,
        batches: Sequence[ForwardBatch],
        copies: Sequence[tuple[int, int]],
        units: UnitPool | None = None,
    ) -> Forward:
        """A forward. `units`: what stands behind blocks, where that is not the blocks
        themselves.
        """
        return Forward(
            np.array(copies, dtype=np.int64).tobytes() if copies else b"",
            [self._part(batch) for batch in batches],
            b"" if units is None else self._changed_units(units),
        )

    def draw(self, batch: SamplingBatch) -> Draw:
        """A draw."""
        before, self._draw = self._draw, batch
        columns = batch.rows.numpy(), batch.positions.numpy(), batch.noise_keys.numpy().ravel()
        message = Draw(np.concatenate(columns).tobytes())
        if before is None or any(
            getattr(batch, name) is not getattr(before, name) for name in _COLUMNS
        ):
            message.parameters = [_bytes(getattr(batch, name)) for name in _COLUMNS]
            message.flags = [int(getattr(batch, name)) for name in _FLAGS]
        for name in _ENTRIES:
            entries = getattr(batch, name)
            if before is None or entries is not getattr(before, name):
                setattr(message, name, [_bytes(part) for part in entries])
        if len(batch.counts.ids):
            if before is not None and message.parameters is None:
                message.grown = _grown(before.counts, batch.counts, len(batch))
            if message.grown is None:
                message.counts = [_bytes(part) for part in batch.counts]
        return message

    def _changed_units(self, pool: UnitPool) -> bytes:
        """Blocks whose units changed and, below, these units."""
        # What changed is not forgotten here: where the units are mirrored on a device, that mirror
        # does it.
        blocks = np.fromiter(pool.changed, dtype=np.int64, count=len(pool.changed))
        units = np.frombuffer(pool.unit_of, dtype=np.int64).reshape(
            pool.layout.num_units, pool.num_blocks
        )
        return np.concatenate((blocks[None], units[:, blocks])).tobytes()

    def _part(self, batch: ForwardBatch) -> Part:
        tables, lasts = batch.block_tables.numpy(), batch.seq_lens.numpy()
        bounds = batch.cu_seqlens_q.numpy()
        lengths = bounds[1:] - bounds[:-1]
        columns = [lasts - lengths, lengths]
        columns += [
            getattr(batch, name).numpy()
            for name in (
                "input_ids",
                "logits_indices",
                "relay_rows",
                "relay_sources",
                "score_rows",
                "score_targets",
                "best_rows",
            )
        ]
        if batch.table_rows is None:
            columns = [lasts[:0], *columns, lasts[:0], lasts[:0], lasts[:0], tables.ravel()]
        else:
            columns = [batch.table_rows.rows, *columns, *self._changes(batch, tables)]
        return Part(
            batch.weight_set,
            [len(column) for column in columns],
            np.concatenate(columns).tobytes(),
            _bytes(batch.score_temperatures) if len(batch.score_temperatures) else b"",
            batch.num_prompt_tokens,
            batch.num_best,
            tables.shape[1],
            0 if batch.table_rows is None else batch.table_rows.num_rows,
        )

    def _changes(self, batch: ForwardBatch, tables: Numbers) -> list[Numbers]:
        """Table rows that changed, the first changed block of each, how many from there on, and all
        these blocks.
        """
        assert batch.table_rows is not None
        rows, marks, count = batch.table_rows
        self._tables, self._marks = _roomy(self._tables, self._marks, count, tables.shape[1])
        places = np.flatnonzero(self._marks[rows] != marks)
        if not len(places):
            return [places] * 4
        changed, width = rows[places], tables.shape[1]
        new, old = tables[places], self._tables[changed]
        differs: Any = np.zeros(old.shape, dtype=np.bool_)
        differs[:, :width] = new != old[:, :width]
        differs[:, width:] = old[:, width:] != 0
        some = differs.any(axis=1)
        first = np.where(some, differs.argmax(axis=1), 0)
        last = np.where(some, differs.shape[1] - differs[:, ::-1].argmax(axis=1), 0)
        counts = last - first
        padded = np.zeros_like(old)
        padded[:, :width] = new
        self._tables[changed], self._marks[changed] = padded, marks[places]
        if len(places) == 1:
            return [changed, first, counts, padded[0, first[0] : last[0]]]
        place = np.arange(differs.shape[1])
        return [changed, first, counts, padded[(place >= first[:, None]) & (place < last[:, None])]]


class StepDecoder:
    """A worker's end. `num_units` of a block's layout, and where the units stand: see `UnitMap`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((0, 0), dtype=np.int64)
        self._fixed: dict[str, Any] = {}
        self._counts = NO_ENTRIES

    def forward(
        self, message: Forward
    ) -> tuple[tuple[ForwardBatch, ...], tuple[tuple[int, int], ...]]:
        """The batches, and copies of blocks."""
        copies = np.frombuffer(message.copies, dtype=np.int64).reshape(-1, 2)
        return tuple(map(self._batch, message.parts)), tuple((a, b) for a, b in copies.tolist())

    def draw(self, message: Draw) -> SamplingBatch:
        """The draw."""
        numbers = np.frombuffer(message.numbers, dtype=np.int64).copy()
        count = len(numbers) // 4
        rows, positions, keys = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        fixed = self._fixed
        if message.parameters is not None:
            assert message.flags is not None
            for name, column in zip(_COLUMNS, message.parameters, strict=True):
                fixed[name] = _tensor(column, _DTYPES.get(name, np.float32))
            any_flags = [bool(flag) for flag in message.flags[:-1]]
            fixed |= zip(_FLAGS, [*any_flags, message.flags[-1]], strict=True)
        for name in _ENTRIES:
            sent = getattr(message, name)
            if sent is not None:
                fixed[name] = _entries(sent)
        if message.grown is not None:
            self._counts = _with_growth(self._counts, message.grown)
        else:
            self._counts = NO_ENTRIES if message.counts is None else _entries(message.counts)
        return SamplingBatch(
            rows=torch.from_numpy(rows),
            positions=torch.from_numpy(positions),
            noise_keys=torch.from_numpy(keys.reshape(count, 2)),
            counts=self._counts,
            **fixed,
        )

    def _batch(self, part: Part) -> ForwardBatch:
        numbers = np.frombuffer(part.numbers, dtype=np.int64).copy()
        columns: list[Numbers] = []
        start = 0
        for size in part.sizes:
            columns.append(numbers[start : start + size])
            start += size
        (
            rows,
            starts,
            lengths,
            ids,
            logits,
            relay_rows,
            relay_sources,
            scored,
            targets,
            best,
            *changes,
        ) = columns
        tables = (
            self._followed(part, rows, *changes)
            if len(rows)
            else changes[-1].reshape(-1, part.width)
        )
        cu_seqlens, row_chunks, positions, slots = layout_of_rows(
            starts, lengths, tables, self._block_size
        )
        return ForwardBatch(
            weight_set=part.weight_set,
            input_ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            row_chunks=torch.from_numpy(row_chunks),
            block_tables=torch.from_numpy(tables),
            cu_seqlens_q=torch.from_numpy(cu_seqlens),
            seq_lens=torch.from_numpy(starts + lengths),
            logits_indices=torch.from_numpy(logits),
            score_rows=_or_nothing(scored),
            score_targets=_or_nothing(targets),
            score_temperatures=_tensor(part.temperatures, np.float64)
            if part.temperatures
            else NO_TEMPERATURES,
            scored=(),
            relay_rows=_or_nothing(relay_rows),
            relay_sources=_or_nothing(relay_sources),
            num_prompt_tokens=part.num_prompt_tokens,
            best_rows=_or_nothing(best),
            num_best=part.num_best,
        )

    def _followed(
        self,
        part: Part,
        rows: Numbers,
        changed: Numbers,
        firsts: Numbers,
        counts: Numbers,
        blocks: Numbers,
    ) -> Numbers:
        """The tables of these rows, once the changes are made."""
        if len(changed):
            ends = firsts + counts
            self._tables = _roomy(
                self._tables, None, part.num_rows, max(part.width, int(ends.max()))
            )[0]
            # a block for each, as where sequences decode
            if len(blocks) == len(changed) and counts.min() == 1:
                self._tables[changed, firsts] = blocks
            else:
                start = 0
                for row, first, end in zip(
                    changed.tolist(), firsts.tolist(), ends.tolist(), strict=True
                ):
                    self._tables[row, first:end] = blocks[start : start + end - first]
                    start += end - first
        return self._tables[rows, : part.width]


class MirroredUnits:
    """What stands behind blocks, as rank 0's `UnitPool` says: `UnitMap` reads it."""

    def __init__(self, num_units: int, num_blocks: int, layout: BlockLayout) -> None:
        self.layout = layout
        self.num_units, self.num_blocks = num_units, num_blocks
        self.unit_of = np.full(layout.num_units * num_blocks, -1, dtype=np.int64)
        self.changed: set[int] = set()

    def follow(self, units: bytes) -> None:
        """Take in what changed."""
        if units:
            blocks, *behind = np.frombuffer(units, dtype=np.int64).reshape(
                1 + self.layout.num_units, -1
            )
            self.unit_of.reshape(self.layout.num_units, -1)[:, blocks] = behind
            self.changed.update(blocks.tolist())


_DTYPES: dict[str, Any] = {
    "temperature": np.float64,
    "top_k": np.int64,
    "restricted": np.bool_,
    "streams": np.int64,
}


def _roomy(tables: Numbers, marks: Numbers | None, rows: int, width: int) -> tuple[Numbers, Any]:
    """Tables, and marks, with room for so many rows and blocks; doubled where they grow."""
    more = max(2 * len(tables), rows) - len(tables) if rows > len(tables) else 0
    wider = max(2 * tables.shape[1], width) - tables.shape[1] if width > tables.shape[1] else 0
    if more or wider:
        tables = np.pad(tables, ((0, more), (0, wider)))
        marks = None if marks is None else np.pad(marks, (0, more))
    return tables, marks


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _tensor(data: bytes, dtype: Any) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=dtype).copy())


def _or_nothing(values: Numbers) -> Tensor:
    return torch.from_numpy(values) if len(values) else NOTHING


def _entries(parts: Sequence[bytes]) -> Entries:
    rows, ids, values = parts
    return Entries(_tensor(rows, np.int64), _tensor(ids, np.int64), _tensor(values, np.float32))


def _moved(rows: Numbers, old: Numbers, new: Numbers) -> Numbers:
    """Where entries of these rows stand once rows have so many entries instead of so many before;
    new ones stand behind those of their row.
    """
    return np.arange(len(rows)) + ((new.cumsum() - new) - (old.cumsum() - old))[rows]


def _grown(before: Entries, after: Entries, num: int) -> list[bytes] | None:
    """See `Draw.grown`; None: these did not become those by growing."""
    rows, ids, values = (part.numpy() for part in before)
    sizes, old = np.bincount(after.rows.numpy(), minlength=num), np.bincount(rows, minlength=num)
    if len(old) != num or (sizes < old).any():
        return None
    places = _moved(rows, old, sizes)
    new_ids, new_values = after.ids.numpy(), after.values.numpy()
    if not np.array_equal(new_ids[places], ids):
        return None
    fresh = np.ones(len(new_ids), dtype=np.bool_)
    fresh[places] = False
    changed = places[new_values[places] != values]
    columns = (
        sizes.astype(np.int64),
        new_ids[fresh],
        new_values[fresh],
        changed,
        new_values[changed],
    )
    return [column.tobytes() for column in columns]


def _with_growth(before: Entries, grown: Sequence[bytes]) -> Entries:
    """The inverse of `_grown`."""
    kinds: tuple[Any, ...] = (np.int64, np.int64, np.float32, np.int64, np.float32)
    columns: list[np.ndarray] = [
        np.frombuffer(data, dtype=kind) for data, kind in zip(grown, kinds, strict=True)
    ]
    sizes, fresh_ids, fresh_values, changed, changes = columns
    rows, ids, values = (part.numpy() for part in before)
    places = _moved(rows, np.bincount(rows, minlength=len(sizes)), sizes)
    new_ids, new_values = (
        np.empty(sizes.sum(), dtype=np.int64),
        np.empty(sizes.sum(), dtype=np.float32),
    )
    fresh = np.ones(len(new_ids), dtype=np.bool_)
    fresh[places] = False
    new_ids[places], new_ids[fresh] = ids, fresh_ids
    new_values[places], new_values[fresh] = values, fresh_values
    new_values[changed] = changes
    return Entries(
        torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)),
        torch.from_numpy(new_ids),
        torch.from_numpy(new_values),
    )
