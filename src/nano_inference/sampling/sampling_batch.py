"""The parameters of a step's draw as arrays: one row a sample."""

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
    """A number of the whole batch: the greatest of what `read` says of the samples' parameters."""
    return field(metadata={"of_all": read})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch(FilterColumns[A]):
    """R samples, M masks of W words."""

    rows: A = column("int64", "R")  # row of the logits; a group's samples share one
    temperature: A = column("float64", "R", padding=1.0, param=lambda p: p.temperature)
    presence: A = column("float32", "R", param=lambda p: p.presence_penalty)
    frequency: A = column("float32", "R", param=lambda p: p.frequency_penalty)
    repetition: A = column("float32", "R", param=lambda p: p.repetition_penalty)
    noise_keys: A = column("int64", "R", 2)  # values of 32 bits, from `sampling.noise`
    bias: Entries[A] = column("float32", "E")  # added to logits
    # how often the completion holds a token; tokens of the prompt that it does not hold count 0
    counts: Entries[A] = column("float32", "E")
    banned: Entries[A] = column("float32", "E")  # never drawn; values are 0
    mask_rows: A = column("int64", "R")  # row of `mask_words`, -1: the sample has no mask
    # bit i % 32 of word i // 32 says whether token i may be drawn; tokens beyond may not
    mask_words: A = column("int32", "M", "W")
    # What the noise keys come from: `noise_streams`, and the positions of the tokens to draw. A
    # graph keeps the streams on the device and makes the keys of later positions.
    streams: A = column("int64", "R", padding=0, on_host=True)
    positions: A = column("int64", "R", on_host=True)
    any_filter: bool = _of_all(lambda p: p.filters)
    any_greedy: bool = _of_all(lambda p: p.temperature == 0)
    # some sample wants raw logprobs (greedy ones always do)
    any_raw: bool = _of_all(lambda p: p.raw_logprobs or p.temperature == 0)
    any_kept: bool = _of_all(lambda p: p.sampling_mask)  # some sample wants what the filters kept
    most_top: int = _of_all(lambda p: p.top_logprobs)  # best tokens that some sample wants to see

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_masks(self) -> bool:
        """Whether some sample may not draw some token."""
        return len(self.mask_words) + len(self.banned.ids) > 0


COLUMNS = columns_of(SamplingBatch)
# The columns that parameters say, and the numbers of a whole batch.
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
Masks = Sequence[tuple[int, np.ndarray]]  # place of a sample, and its mask: int32 [W]


class TokenCounts:
    """How often a completion holds each token, counted as it grows: O(1) a token. The prompt's
    tokens begin at 0.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.length = 0  # tokens of the completion that are counted
        self._ids = np.unique(np.array(prompt, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._places = {token_id: place for place, token_id in enumerate(self._ids.tolist())}

    def add(self, token_ids: Sequence[int]) -> None:
        """The completion goes on with these."""
        self.length += len(token_ids)
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids, self._counts = (
                    _longer(self._ids, place + 1),
                    _longer(self._counts, place + 1),
                )
            self._ids[place] = token_id
            self._counts[place] += 1

    def pairs(self, drafts: Sequence[int] = ()) -> Pairs:
        """Token ids and their counts; views, good until more is added. With `drafts`: as they would
        be behind these.
        """
        if drafts:
            behind = TokenCounts(())
            behind._ids, behind._counts = self._ids.copy(), self._counts.copy()
            behind._places = dict(self._places)
            behind.add(drafts)
            return behind.pairs()
        return self._ids[: len(self._places)], self._counts[: len(self._places)]


class _Fixed(NamedTuple):
    """What stays while the same samples are drawn."""

    slots: np.ndarray
    streams: np.ndarray  # uint64 [R]
    fields: dict[str, Any]  # of a batch
    penalized: list[tuple[int, TokenCounts]]  # by place in `slots`


class SamplingTable(Generic[A]):
    """How samples are drawn: what their parameters say, read once, one record a slot; the caller
    hands out slots.

    Args:
        arrays: makes the arrays of its batches.
    """

    def __init__(self, arrays: Arrays[A]) -> None:
        self._arrays = arrays
        self._records = np.zeros(0, dtype=_RECORD)
        self._fixed: _Fixed | None = None
        self._masked: dict[str, A] | None = None  # the masks of the samples of `_fixed`
        # by slot, of those that have some
        self._bias: dict[int, Pairs] = {}
        self._masks: dict[int, np.ndarray] = {}
        self._counts: dict[int, TokenCounts] = {}

    def put(
        self, slot: int, params: SamplingParams, seed: int, sample_index: int, prompt: Sequence[int]
    ) -> None:
        """Fill a slot, whatever it held. The completion is still empty: see `TokenCounts.add`."""
        self._fixed = None
        for held in (self._bias, self._masks, self._counts):
            held.pop(slot, None)
        self._records = _longer(self._records, slot + 1)
        self._records[slot] = (seed, sample_index, *(read(params) for read in _READ))
        if params.logit_bias:
            self._bias[slot] = _pairs(params.logit_bias)
        if params.allowed_token_ids is not None:
            self._masks[slot] = mask_of(params.allowed_token_ids)
        if params.penalizes:
            self._counts[slot] = TokenCounts(prompt if params.repetition_penalty != 1 else ())

    def penalized(self, slots: np.ndarray) -> list[tuple[int, TokenCounts]]:
        """Which of these have penalties, by their place here: their counts must be up to date
        before the draw.
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
    ) -> SamplingBatch[A]:
        """One token of each of these slots. A slot may stand here more than once.

        Args:
            slots: int64 [R].
            rows: int64 [R], row of the logits.
            positions: int64 [R], of the token to draw.
            banned: place in `slots` -> ids that may not be drawn there.
            masks: place and mask of those that have one in this draw; it takes the place of their
                `allowed_token_ids`.
            behind: place -> drafts that stand before the token, which penalties count too.
        """
        fixed = self._fixed_of(slots)
        if self._masked is None:
            self._masked = mask_columns(self._arrays, len(slots), _having(slots, self._masks))
        masked = self._masked
        if masks:
            both = sorted({**dict(_having(slots, self._masks)), **dict(masks)}.items())
            masked = mask_columns(self._arrays, len(slots), both)
        make = self._arrays.make
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
            **fixed.fields,
        )

    def _fixed_of(self, slots: np.ndarray) -> _Fixed:
        if self._fixed is None or not np.array_equal(slots, self._fixed.slots):
            record = self._records[slots]
            make = self._arrays.make
            found: dict[str, Any] = {name: make(record[name].copy()) for name in PARAMETERS}
            for name in OF_ALL:
                most = int(record[name].max(initial=0))
                found[name] = bool(most) if name.startswith("any_") else most
            found["bias"] = self._entries(_having(slots, self._bias))
            streams = noise_streams(record["seed"], record["sample_index"])
            found["streams"] = make(streams.view(np.int64))
            penalized = _having(slots, self._counts)
            self._fixed, self._masked = _Fixed(slots, streams, found, penalized), None
        return self._fixed

    def _entries(self, pairs: Sequence[tuple[int, Pairs]]) -> Entries[A]:
        """The pairs of some rows, which rise."""
        if not pairs:
            return self._arrays.no_entries
        make = self._arrays.make
        ids, values = (make(np.concatenate([own[part] for _, own in pairs])) for part in range(2))
        rows = np.repeat([row for row, _ in pairs], [len(own[0]) for _, own in pairs])
        return Entries(make(rows), ids, values)


def _having(slots: np.ndarray, values: Mapping[int, T]) -> list[tuple[int, T]]:
    """Places of the slots that have a value, with it. Usually none has."""
    if not values:
        return []
    return [(i, values[slot]) for i, slot in enumerate(slots.tolist()) if slot in values]


def mask_columns(
    arrays: Arrays[A], num_samples: int, masks: Sequence[tuple[int, np.ndarray]]
) -> dict[str, A]:
    """`mask_rows` and `mask_words` of so many samples, some of which have masks, given by place."""
    rows = np.full(num_samples, -1, dtype=np.int64)
    if not masks:
        return {"mask_rows": arrays.make(rows), "mask_words": arrays.no_masks}
    rows[[place for place, _ in masks]] = np.arange(len(masks))
    most = max(len(words) for _, words in masks)
    table = np.zeros((len(masks), most), dtype=np.int32)
    for row, (_, words) in zip(table, masks, strict=True):
        row[: len(words)] = words
    return {"mask_rows": arrays.make(rows), "mask_words": arrays.make(table)}


def _pairs(values: Mapping[int, float]) -> Pairs:
    return np.fromiter(values, dtype=np.int64), np.fromiter(values.values(), dtype=np.float32)


def _longer(array: np.ndarray, length: int) -> np.ndarray:
    """The same with room for so many entries, zeros at its end; doubled if it has to grow."""
    if len(array) >= length:
        return array
    return np.concatenate(
        [array, np.zeros(max(length, 2 * len(array)) - len(array), dtype=array.dtype)]
    )


if not TYPE_CHECKING:  # else every name would count as one that is here
    __getattr__ = moved_names(
        __name__,
        dict.fromkeys(
            ("DrawRequest", "sampling_batch", "greedy_batch"), "nano_inference.sampling.tensors"
        ),
    )
