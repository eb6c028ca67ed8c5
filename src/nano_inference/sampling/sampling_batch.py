"""The parameters of a step's draw as arrays, one row per sample."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from nano_inference.sampling.columns import A, Arrays, Entries, column, columns_of
from nano_inference.sampling.drafted import NO_DRAFTS, Drafts
from nano_inference.sampling.filters import FilterColumns
from nano_inference.sampling.noise import noise_streams, stream_keys
from nano_inference.structured.mask_bits import mask_of
from nano_inference.system.moved import moved_names
from nano_inference.types import SamplingParams


def _of_all(read: Callable[[SamplingParams], int]) -> Any:
    """Declare a number of the whole batch: the maximum of `read` over the samples' parameters."""
    return field(metadata={"of_all": read})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch(FilterColumns[A]):
    """Sampling parameters of R samples, with M masks of W words."""

    rows: A = column("int64", "R")  # row of the logits; a group's samples share one
    temperature: A = column("float64", "R", padding=1.0, param=lambda p: p.temperature)
    presence: A = column("float32", "R", param=lambda p: p.presence_penalty)
    frequency: A = column("float32", "R", param=lambda p: p.frequency_penalty)
    repetition: A = column("float32", "R", param=lambda p: p.repetition_penalty)
    noise_keys: A = column("int64", "R", 2)  # 32-bit values from `sampling.noise`
    bias: Entries[A] = column("float32", "E")  # added to logits
    # occurrences of each token in the completion; other tokens of the prompt count 0
    counts: Entries[A] = column("float32", "E")
    banned: Entries[A] = column("float32", "E")  # never drawn; values are 0
    named: Entries[A] = column("float32", "E")  # logprobs are wanted; values are 0
    mask_rows: A = column("int64", "R")  # row of `mask_words`, or -1 for no mask
    # bit i % 32 of word i // 32 is 1 if token i may be drawn; tokens beyond the words may not
    mask_words: A = column("int32", "M", "W")
    # The source of the noise keys: `noise_streams`, and the positions of the tokens to draw. A
    # graph keeps the streams on the device and computes the keys of later positions.
    streams: A = column("int64", "R", padding=0, on_host=True)
    positions: A = column("int64", "R", on_host=True)
    any_filter: bool = _of_all(lambda p: p.filters)
    any_greedy: bool = _of_all(lambda p: p.temperature == 0)
    # some sample needs raw logprobs (greedy ones always do)
    any_raw: bool = _of_all(lambda p: p.raw_logprobs or p.temperature == 0)
    any_kept: bool = _of_all(lambda p: p.sampling_mask)  # some sample needs its kept tokens
    most_top: int = _of_all(lambda p: p.top_logprobs)  # maximum number of best tokens for a sample

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_masks(self) -> bool:
        """True if some sample may not draw some token."""
        return len(self.mask_words) + len(self.banned.ids) > 0


COLUMNS = columns_of(SamplingBatch)
# Columns that depend only on sampling parameters, and numbers of a whole batch.
PARAMETERS = {name: each for name, each in COLUMNS.items() if each.param is not None}
OF_ALL: dict[str, Callable[[SamplingParams], int]] = {
    each.name: each.metadata["of_all"]
    for each in fields(SamplingBatch)
    if "of_all" in each.metadata
}


_RECORD = np.dtype(
    [("seed", np.uint64), ("sample_index", np.uint64)]
    + [(name, each.dtype) for name, each in PARAMETERS.items()]
    + [(name, np.int64) for name in OF_ALL]
)
_READ = [*(each.param for each in PARAMETERS.values()), *OF_ALL.values()]

T = TypeVar("T")
Pairs = tuple[np.ndarray, np.ndarray]  # token ids int64, values float32
Masks = Sequence[tuple[int, np.ndarray]]  # index of a sample, and its mask: int32 [W]
Biases = Sequence[tuple[int, Pairs]]  # index of a sample, and what is added to its logits


class TokenCounts:
    """Occurrences of each token in a completion, updated in O(1) per token.

    Tokens of the prompt start at 0.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.length = 0  # counted tokens of the completion
        self._ids = np.unique(np.array(prompt, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._places = {token_id: index for index, token_id in enumerate(self._ids.tolist())}

    def add(self, token_ids: Sequence[int]) -> None:
        """Count further tokens of the completion."""
        self.length += len(token_ids)
        for token_id in token_ids:
            index = self._places.setdefault(token_id, len(self._places))
            if index == len(self._ids):
                self._ids, self._counts = (
                    _longer(self._ids, index + 1),
                    _longer(self._counts, index + 1),
                )
            self._ids[index] = token_id
            self._counts[index] += 1

    def pairs(self, drafts: Sequence[int] = ()) -> Pairs:
        """Return token ids and their counts, as views that are valid until the next `add`.

        With `drafts`, return copies that count these tokens too.
        """
        if drafts:
            behind = TokenCounts(())
            behind._ids, behind._counts = self._ids.copy(), self._counts.copy()
            behind._places = dict(self._places)
            behind.add(drafts)
            return behind.pairs()
        return self._ids[: len(self._places)], self._counts[: len(self._places)]


class _Fixed(NamedTuple):
    """State that is reused while the samples stay the same."""

    slots: np.ndarray
    streams: np.ndarray  # uint64 [R]
    fields: dict[str, Any]  # fields of a batch
    penalized: list[tuple[int, TokenCounts]]  # by index in `slots`


class SamplingTable(Generic[A]):
    """Sampling parameters in one record per slot, read once. The caller assigns the slots.

    Args:
        arrays: Factory of the batches' arrays.
    """

    def __init__(self, arrays: Arrays[A]) -> None:
        self._arrays = arrays
        self._records = np.zeros(0, dtype=_RECORD)
        self._fixed: _Fixed | None = None
        self._masked: dict[str, A] | None = None  # masks of the samples in `_fixed`
        # by slot, for samples that have any
        self._bias: dict[int, Pairs] = {}
        self._named: dict[int, Pairs] = {}
        self._masks: dict[int, np.ndarray] = {}
        self._counts: dict[int, TokenCounts] = {}

    def put(
        self, slot: int, params: SamplingParams, seed: int, sample_index: int, prompt: Sequence[int]
    ) -> None:
        """Overwrite a slot for a sample that has no completion tokens yet."""
        self._fixed = None
        for held in (self._bias, self._named, self._masks, self._counts):
            held.pop(slot, None)
        self._records = _longer(self._records, slot + 1)
        self._records[slot] = (seed, sample_index, *(read(params) for read in _READ))
        if params.logit_bias:
            self._bias[slot] = _pairs(params.logit_bias)
        if params.logprob_token_ids:
            self._named[slot] = _pairs(dict.fromkeys(params.logprob_token_ids, 0.0))
        if params.allowed_token_ids is not None:
            self._masks[slot] = mask_of(params.allowed_token_ids)
        if params.penalizes:
            self._counts[slot] = TokenCounts(prompt if params.repetition_penalty != 1 else ())

    def penalized(self, slots: np.ndarray) -> list[tuple[int, TokenCounts]]:
        """Return the samples with penalties, by index in `slots`.

        Bring their counts up to date before the draw.
        """
        return self._fixed_of(slots).penalized

    def batch(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        banned: Mapping[int, Iterable[int]],
        masks: Masks = (),
        behind: Drafts = NO_DRAFTS,
        biases: Biases = (),
    ) -> SamplingBatch[A]:
        """Return a batch that draws one token for each slot. A slot may occur more than once.

        Args:
            slots: int64 [R].
            rows: Row of the logits for each sample, int64 [R].
            positions: Position of each token to draw, int64 [R].
            banned: Index in `slots` -> ids that may not be drawn there.
            masks: Pairs of index and mask for this draw. They replace `allowed_token_ids`.
            behind: Index -> drafts that precede the token, which penalties count too.
            biases: Pairs of index and biases for this draw, added to those of `logit_bias`.
        """
        fixed = self._fixed_of(slots)
        if self._masked is None:
            self._masked = mask_columns(self._arrays, len(slots), _having(slots, self._masks))
        masked = self._masked
        if masks:
            both = sorted({**dict(_having(slots, self._masks)), **dict(masks)}.items())
            masked = mask_columns(self._arrays, len(slots), both)
        make = self._arrays.make
        fields: dict[str, Any] = fixed.fields
        if biases:
            fields = fields | {"bias": self._entries(self._with_biases(slots, biases))}
        return SamplingBatch(
            rows=make(rows),
            noise_keys=make(stream_keys(fixed.streams, positions.astype(np.uint64))),
            positions=make(positions),
            counts=self._entries(
                [(place, counts.pairs(behind.get(place, ()))) for place, counts in fixed.penalized]
            ),
            banned=self._entries(
                [(i, _pairs(dict.fromkeys(ids, 0.0))) for i, ids in sorted(banned.items())]
            ),
            **masked,
            **fields,
        )

    def _with_biases(self, slots: np.ndarray, biases: Biases) -> list[tuple[int, Pairs]]:
        """Return the biases of the parameters and of this draw, one entry per token."""
        both = dict(_having(slots, self._bias))
        for index, pairs in biases:
            both[index] = _sum(both[index], pairs) if index in both else pairs
        return sorted(both.items(), key=lambda pair: pair[0])

    def _fixed_of(self, slots: np.ndarray) -> _Fixed:
        if self._fixed is None or not np.array_equal(slots, self._fixed.slots):
            record = self._records[slots]
            make = self._arrays.make
            values: dict[str, Any] = {name: make(record[name].copy()) for name in PARAMETERS}
            for name in OF_ALL:
                most = int(record[name].max(initial=0))
                values[name] = bool(most) if name.startswith("any_") else most
            values["bias"] = self._entries(_having(slots, self._bias))
            values["named"] = self._entries(_having(slots, self._named))
            streams = noise_streams(record["seed"], record["sample_index"])
            values["streams"] = make(streams.view(np.int64))
            penalized = _having(slots, self._counts)
            self._fixed, self._masked = _Fixed(slots, streams, values, penalized), None
        return self._fixed

    def _entries(self, pairs: Sequence[tuple[int, Pairs]]) -> Entries[A]:
        """Return the pairs of some rows, which must be ascending, as entries."""
        if not pairs:
            return self._arrays.no_entries
        make = self._arrays.make
        ids, values = (make(np.concatenate([own[part] for _, own in pairs])) for part in range(2))
        rows = np.repeat([row for row, _ in pairs], [len(own[0]) for _, own in pairs])
        return Entries(make(rows), ids, values)


def _having(slots: np.ndarray, values: Mapping[int, T]) -> list[tuple[int, T]]:
    """Return the index and value of each slot that has a value. Usually none has."""
    if not values:
        return []
    return [(i, values[slot]) for i, slot in enumerate(slots.tolist()) if slot in values]


def mask_columns(
    arrays: Arrays[A], num_samples: int, masks: Sequence[tuple[int, np.ndarray]]
) -> dict[str, A]:
    """Return the columns `mask_rows` and `mask_words` for `num_samples` samples.

    `masks` are pairs of index and mask, for samples that have one.
    """
    rows = np.full(num_samples, -1, dtype=np.int64)
    if not masks:
        return {"mask_rows": arrays.make(rows), "mask_words": arrays.no_masks}
    rows[[place for place, _ in masks]] = np.arange(len(masks))
    most = max(len(words) for _, words in masks)
    table = np.zeros((len(masks), most), dtype=np.int32)
    for row, (_, words) in zip(table, masks, strict=True):
        row[: len(words)] = words
    return {"mask_rows": arrays.make(rows), "mask_words": arrays.make(table)}


def _sum(one: Pairs, other: Pairs) -> Pairs:
    values = dict(zip(one[0].tolist(), one[1], strict=True))
    for token_id, value in zip(other[0].tolist(), other[1], strict=True):
        values[token_id] = value + values.get(token_id, np.float32(0))
    return np.fromiter(values, dtype=np.int64), np.array([*values.values()], dtype=np.float32)


def _pairs(values: Mapping[int, float]) -> Pairs:
    return np.fromiter(values, dtype=np.int64), np.fromiter(values.values(), dtype=np.float32)


def _longer(array: np.ndarray, length: int) -> np.ndarray:
    """Return an array with room for at least `length` entries, padded with zeros.

    If it must grow, it at least doubles.
    """
    if len(array) >= length:
        return array
    return np.concatenate(
        [array, np.zeros(max(length, 2 * len(array)) - len(array), dtype=array.dtype)]
    )


if not TYPE_CHECKING:  # otherwise type checkers would accept any name
    __getattr__ = moved_names(
        __name__,
        dict.fromkeys(
            ("DrawRequest", "sampling_batch", "greedy_batch"), "nano_inference.sampling.tensors"
        ),
    )
