"""What the draw of a step needs, as tensors: one row a sample."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nano_inference.sampling.noise import noise_streams, stream_keys
from nano_inference.types import SamplingParams


class DrawRequest(NamedTuple):
    """One token to draw.

    Attributes:
        params: how.
        row: row of the logits; samples of a group share one.
        key: (seed, sample index, position of the token).
        prompt, completion: ids before it, for penalties.
        banned: ids that may not be drawn here.
    """

    params: SamplingParams
    row: int = 0
    key: tuple[int, int, int] = (0, 0, 0)
    prompt: Sequence[int] = ()
    completion: Sequence[int] = ()
    banned: Iterable[int] = ()


class Entries(NamedTuple):
    """Single entries of a [R, V] matrix: `values[i]` stands at (`rows[i]`, `ids[i]`). Rows rise."""

    rows: Tensor  # int64 [E]
    ids: Tensor  # int64 [E]
    values: Tensor  # float32 [E]

    def of_rows(self, rows: slice) -> "Entries":
        """The entries of some rows, counted from the first of these."""
        bounds = torch.tensor([rows.start, rows.stop], device=self.rows.device)
        first, last = torch.searchsorted(self.rows, bounds).tolist()
        return Entries(
            self.rows[first:last] - rows.start, self.ids[first:last], self.values[first:last]
        )

    def of(self, rows: Tensor) -> "Entries":
        """The entries of some rows, which rise, counted as they stand there."""
        places = torch.searchsorted(rows, self.rows)
        found = (
            rows[places.clamp(max=max(len(rows) - 1, 0))] == self.rows
            if len(rows)
            else self.rows < 0
        )
        return Entries(places[found], self.ids[found], self.values[found])


_NONE = torch.zeros(0, dtype=torch.int64)
ON_HOST = ("streams", "positions")  # fields of a `SamplingBatch` that do not move with it


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """R samples; integers int64, reals float32 but for the temperature."""

    rows: Tensor  # [R] row of the logits; a group's samples share one
    temperature: Tensor  # [R] float64
    top_k: Tensor  # [R]; 0: off
    top_p: Tensor  # [R]
    min_p: Tensor  # [R]
    presence: Tensor  # [R]
    frequency: Tensor  # [R]
    repetition: Tensor  # [R]
    noise_keys: Tensor  # [R, 2] values of 32 bits, from sampling.noise
    bias: Entries  # added to logits
    # the only tokens that may be drawn, in rows that `restricted` names; values are 0
    allowed: Entries
    banned: Entries  # tokens that may not be drawn; values are 0
    restricted: Tensor  # bool [R]
    # how often the completion holds a token; tokens of the prompt that it does not hold count 0
    counts: Entries
    any_filter: bool  # some sample has top_k, top_p or min_p
    any_greedy: bool
    any_raw: bool  # some sample wants raw logprobs (greedy ones always do)
    any_mask: bool  # some sample wants to know what the filters kept
    most_top: int  # best tokens that some sample wants to see; 0: none
    # What the noise keys come from, always on the host: who keeps them on a device makes the keys
    # of later positions. int64 [R], the bits of `noise_streams`; the same object while the samples
    # are the same
    streams: Tensor = _NONE
    positions: Tensor = _NONE  # [R] of the tokens to draw

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def masks(self) -> bool:
        """Whether some sample may not draw some token."""
        return len(self.allowed.ids) + len(self.banned.ids) > 0

    @property
    def masked(self) -> Tensor:
        """Which samples may not draw some token, bool [R]."""
        return self.restricted.index_fill(0, self.banned.rows, True)

    def tile(self, rows: slice) -> "SamplingBatch":
        """Some of the samples."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        cut = {name: part[rows] for name, part in parts.items() if isinstance(part, Tensor)}
        cut |= {
            name: part.of_rows(rows) for name, part in parts.items() if isinstance(part, Entries)
        }
        return replace(self, **cut)

    def select(self, samples: Tensor) -> "SamplingBatch":
        """Some of the samples, rising places int64 [n]; what is said of a whole batch stays."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        cut: dict[str, Any] = {
            name: part[samples]
            for name, part in parts.items()
            if isinstance(part, Tensor) and len(part) == len(self)
        }
        cut |= {name: part.of(samples) for name, part in parts.items() if isinstance(part, Entries)}
        return replace(self, **cut)

    def to(self, device: torch.device) -> "SamplingBatch":
        """The same on another device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: part.to(device, non_blocking=True)
            for name, part in parts.items()
            if isinstance(part, Tensor) and name not in ON_HOST
        }
        moved |= {
            name: Entries(*(t.to(device, non_blocking=True) for t in part))
            for name, part in parts.items()
            if isinstance(part, Entries)
        }
        return replace(self, **moved)


Pairs = tuple[np.ndarray, np.ndarray]  # token ids int64, values float32
NO_ENTRIES = Entries(
    torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
)
_MOST = 2**31  # as good as any larger number of tokens
_RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("sample_index", np.uint64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("restricted", np.bool_),
        ("top", np.int64),
        ("filter", np.bool_),
        ("greedy", np.bool_),
        ("raw", np.bool_),
        ("mask", np.bool_),
        ("biased", np.bool_),
        ("penalizes", np.bool_),
    ]
)


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

    def pairs(self) -> Pairs:
        """Token ids and their counts; views, good until more is added."""
        return self._ids[: len(self._places)], self._counts[: len(self._places)]


class SamplingTable:
    """How samples are drawn: what their parameters say, read once, one record a slot; the caller
    hands out slots.
    """

    def __init__(self) -> None:
        self._records = np.zeros(0, dtype=_RECORD)
        # the slots of the last draw, and what `_parameters` says of them
        self._drawn: np.ndarray | None = None
        self._same: tuple[dict[str, Any], np.ndarray] = ({}, np.zeros(0, dtype=np.uint64))
        # by slot, as all below: of those that have some
        self._bias: dict[int, Mapping[int, float]] = {}
        self._allowed: dict[int, Pairs] = {}
        self._counts: dict[int, TokenCounts] = {}

    def put(
        self, slot: int, params: SamplingParams, seed: int, sample_index: int, prompt: Sequence[int]
    ) -> None:
        """Fill a slot, whatever it held. The completion is still empty: see `count`."""
        self._drawn = None
        self._records = _longer(self._records, slot + 1)
        self._records[slot] = (
            seed,
            sample_index,
            params.temperature,
            min(params.top_k, _MOST),
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            params.allowed_token_ids is not None,
            params.top_logprobs,
            params.filters,
            params.temperature == 0,
            params.raw_logprobs or params.temperature == 0,
            params.sampling_mask,
            bool(params.logit_bias),
            params.penalizes,
        )
        self._bias[slot] = params.logit_bias
        if params.allowed_token_ids is not None:
            ids = np.fromiter(params.allowed_token_ids, dtype=np.int64)
            self._allowed[slot] = ids, np.zeros(len(ids), dtype=np.float32)
        if params.penalizes:
            self._counts[slot] = TokenCounts(prompt if params.repetition_penalty != 1 else ())

    def penalized(self, slots: np.ndarray) -> list[tuple[int, TokenCounts]]:
        """Which of these have penalties, by their place here: their counts must be up to date
        before the draw.
        """
        places = np.flatnonzero(self._records["penalizes"][slots]).tolist()
        return [(place, self._counts[slots[place]]) for place in places]

    def batch(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        banned: Mapping[int, Iterable[int]],
    ) -> SamplingBatch:
        """One token of each of these slots.

        Args:
            slots: int64 [R].
            rows: int64 [R], row of the logits.
            positions: int64 [R], of the token to draw.
            banned: place in `slots` -> ids that may not be drawn there.
        """
        if self._drawn is None or not np.array_equal(slots, self._drawn):
            self._drawn, self._same = slots, self._parameters(slots)
        parameters, streams = self._same
        batch = SamplingBatch(
            rows=torch.from_numpy(rows),
            noise_keys=torch.from_numpy(stream_keys(streams, positions.astype(np.uint64))),
            positions=torch.from_numpy(positions),
            counts=_entries(
                *zip(*[(i, counts.pairs()) for i, counts in self.penalized(slots)], strict=True)
            ),
            **parameters,
        )
        return replace(batch, banned=_banned_entries(banned)) if banned else batch

    def _parameters(self, slots: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        """The fields of a batch that stay while the same samples are drawn, and the streams of
        their noise.
        """
        record = self._records[slots]
        columns = (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "presence",
            "frequency",
            "repetition",
            "restricted",
        )
        fixed: dict[str, Any] = {name: torch.from_numpy(record[name].copy()) for name in columns}
        restricted = np.flatnonzero(record["restricted"]).tolist()
        fixed |= {
            f"any_{name}": bool(record[name].any()) for name in ("filter", "greedy", "raw", "mask")
        }
        fixed["most_top"] = int(record["top"].max(initial=0))
        fixed["allowed"] = _entries(restricted, [self._allowed[slots[i]] for i in restricted])
        biased = np.flatnonzero(record["biased"]).tolist()
        fixed["bias"] = _entries(biased, [_pairs(self._bias[slots[i]]) for i in biased])
        fixed["banned"] = NO_ENTRIES
        streams = noise_streams(record["seed"], record["sample_index"])
        fixed["streams"] = torch.from_numpy(streams.view(np.int64))
        return fixed, streams


def sampling_batch(draws: Sequence[DrawRequest]) -> SamplingBatch:
    """The tensors of these draws, in their order."""
    table = SamplingTable()
    for slot, draw in enumerate(draws):
        table.put(slot, draw.params, *draw.key[:2], draw.prompt)
    slots = np.arange(len(draws))
    for place, counts in table.penalized(slots):
        counts.add(draws[place].completion)
    rows, positions = (
        np.array(column, dtype=np.int64)
        for column in ([d.row for d in draws], [d.key[2] for d in draws])
    )
    return table.batch(
        slots, rows, positions, {i: draw.banned for i, draw in enumerate(draws) if draw.banned}
    )


def greedy_batch(num_rows: int, most_top: int) -> SamplingBatch:
    """The most probable token of each of so many rows, and with it the `most_top` best under the
    model's own logits.
    """
    table = SamplingTable()
    table.put(0, SamplingParams(temperature=0, top_logprobs=most_top), 0, 0, ())
    slots = np.zeros(num_rows, dtype=np.int64)
    return table.batch(slots, np.arange(num_rows), slots, {})


def _pairs(values: Mapping[int, float]) -> Pairs:
    return np.fromiter(values, dtype=np.int64), np.fromiter(values.values(), dtype=np.float32)


def _banned_entries(banned: Mapping[int, Iterable[int]]) -> Entries:
    places = sorted(banned)
    return _entries(places, [_pairs(dict.fromkeys(banned[place], 0.0)) for place in places])


def _entries(places: Sequence[int] = (), pairs: Sequence[Pairs] = ()) -> Entries:
    """The pairs of some rows, which rise."""
    if not pairs:
        return NO_ENTRIES
    ids, values = (torch.from_numpy(np.concatenate(column)) for column in zip(*pairs, strict=True))
    rows = np.repeat(np.array(places, dtype=np.int64), [len(ids) for ids, _ in pairs])
    return Entries(torch.from_numpy(rows), ids, values)


def _longer(array: np.ndarray, length: int) -> np.ndarray:
    """The same with room for so many entries, zeros at its end; doubled if it has to grow."""
    if len(array) >= length:
        return array
    return np.concatenate(
        [array, np.zeros(max(length, 2 * len(array)) - len(array), dtype=array.dtype)]
    )
