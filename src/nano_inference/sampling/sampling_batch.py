"""What the draw of a step needs, as tensors: one row a sample."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nano_inference.sampling.noise import noise_keys
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
        return Entries(self.rows[first:last] - rows.start, self.ids[first:last], self.values[first:last])


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
    bias: Entries  # added to logits; -inf for what may not be drawn
    allowed: Entries  # the only tokens that may be drawn, in rows that `restricted` names; values are 0
    restricted: Tensor  # bool [R]
    counts: Entries  # how often the completion holds a token; tokens of the prompt that it does not hold count 0
    any_filter: bool  # some sample has top_k, top_p or min_p
    any_greedy: bool
    any_raw: bool  # some sample wants raw logprobs (greedy ones always do)
    any_mask: bool  # some sample wants to know what the filters kept
    most_top: int  # best tokens that some sample wants to see; 0: none

    def __len__(self) -> int:
        return len(self.rows)

    def tile(self, rows: slice) -> "SamplingBatch":
        """Some of the samples."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        cut = {name: part[rows] for name, part in parts.items() if isinstance(part, Tensor)}
        cut |= {name: part.of_rows(rows) for name, part in parts.items() if isinstance(part, Entries)}
        return replace(self, **cut)

    def to(self, device: torch.device) -> "SamplingBatch":
        """The same on another device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: part.to(device, non_blocking=True) for name, part in parts.items() if isinstance(part, Tensor)}
        moved |= {
            name: Entries(*(t.to(device, non_blocking=True) for t in part))
            for name, part in parts.items()
            if isinstance(part, Entries)
        }
        return replace(self, **moved)


def sampling_batch(draws: Sequence[DrawRequest]) -> SamplingBatch:
    """The tensors of these draws, in their order."""
    params = [draw.params for draw in draws]

    def reals(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype)

    return SamplingBatch(
        rows=torch.tensor([draw.row for draw in draws], dtype=torch.int64),
        temperature=reals("temperature", torch.float64),
        top_k=reals("top_k", torch.int64),
        top_p=reals("top_p"),
        min_p=reals("min_p"),
        presence=reals("presence_penalty"),
        frequency=reals("frequency_penalty"),
        repetition=reals("repetition_penalty"),
        noise_keys=torch.from_numpy(noise_keys([draw.key for draw in draws])),
        bias=_entries([_bias(draw) for draw in draws]),
        allowed=_entries([_allowed(p) for p in params]),
        restricted=torch.tensor([p.allowed_token_ids is not None for p in params], dtype=torch.bool),
        counts=_entries([_counts(draw) for draw in draws]),
        any_filter=any(p.filters for p in params),
        any_greedy=any(p.temperature == 0 for p in params),
        any_raw=any(p.raw_logprobs or p.temperature == 0 for p in params),
        any_mask=any(p.sampling_mask for p in params),
        most_top=max((p.top_logprobs for p in params), default=0),
    )


Pairs = tuple[np.ndarray, np.ndarray]  # token ids, values
_NOTHING: Pairs = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))


def _bias(draw: DrawRequest) -> Pairs:
    bias = dict(draw.params.logit_bias) | dict.fromkeys(draw.banned, -np.inf)
    if not bias:
        return _NOTHING
    return np.fromiter(bias, dtype=np.int64), np.fromiter(bias.values(), dtype=np.float32)


def _allowed(params: SamplingParams) -> Pairs:
    if params.allowed_token_ids is None:
        return _NOTHING
    ids = np.fromiter(params.allowed_token_ids, dtype=np.int64)
    return ids, np.zeros(len(ids), dtype=np.float32)


def _counts(draw: DrawRequest) -> Pairs:
    if not draw.params.penalizes:
        return _NOTHING
    ids, counts = np.unique(np.array(draw.completion, dtype=np.int64), return_counts=True)
    if draw.params.repetition_penalty == 1:
        return ids, counts.astype(np.float32)
    only_prompt = np.setdiff1d(np.array(draw.prompt, dtype=np.int64), ids)
    return np.concatenate([ids, only_prompt]), np.concatenate([counts, np.zeros(len(only_prompt))]).astype(np.float32)


def _entries(pairs: list[Pairs]) -> Entries:
    lengths = [len(ids) for ids, _ in pairs]
    ids, values = (np.concatenate(column) for column in zip(*[_NOTHING, *pairs], strict=True))
    rows = np.repeat(np.arange(len(pairs)), lengths)
    return Entries(torch.from_numpy(rows), torch.from_numpy(ids), torch.from_numpy(values))
