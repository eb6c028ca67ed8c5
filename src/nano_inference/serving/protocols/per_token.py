"""What is told of single tokens, in the forms that trainers read."""

import base64
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from nano_inference.types import TopLogprobs, TrainingSample, VersionSpan

LOWEST = -9999.0  # JSON has no infinity

# Numbers as they are, or as base64 of little-endian float32.
Flat = Literal["list", "base64"]


def at_least(logprob: float) -> float:
    """The logprob, or a number that JSON has."""
    return logprob if logprob > LOWEST else LOWEST


def flat(values: Iterable[float], form: Flat) -> list[float] | str:
    """One number a token."""
    numbers = [at_least(each) for each in values]
    if form == "list":
        return numbers
    return base64_of("f", numbers)


def base64_of(kind: Literal["f", "i"], numbers: Iterable[float]) -> str:
    """Little-endian float32 or int32."""
    packed = array(kind, numbers)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode("ascii")


def version_spans(spans: Iterable[VersionSpan], name: Callable[[int], int | str]) -> list[dict[str, Any]]:
    """Which version sampled which tokens."""
    return [{"version": name(span.version), "start": span.start, "end": span.end} for span in spans]


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A token that might have been drawn."""

    token: str
    token_id: int
    logprob: float
    rank: int | None = None


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A token that was drawn: named as vLLM's clients of both kinds want it, by `token` and by `token_id`."""

    token: str
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: tuple[Candidate, ...] = ()


_names: dict[int, str] = {}


def token_name(token_id: int) -> str:
    """As clients that know ids find it."""
    name = _names.get(token_id)
    if name is None:
        name = _names[token_id] = f"token_id:{token_id}"
    return name


def entries(
    token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs] | None = None, count: int = 0
) -> list[Entry]:
    """One entry a token.

    Args:
        token_ids: that were drawn.
        logprobs: of these.
        tops: the most probable tokens of each place.
        count: how many candidates to tell: as in vLLM the token itself first, then the others, best first.
    """
    if tops is None or count < 2:
        return [
            Entry(token_name(token_id), token_id, at_least(logprob))
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
    return [
        _entry(token_id, at_least(logprob), top, count)
        for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True)
    ]


def _entry(token_id: int, logprob: float, top: TopLogprobs, count: int) -> Entry:
    name = token_name(token_id)
    others = [
        Candidate(token_name(each), each, at_least(score), rank)
        for rank, (each, score) in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1)
    ]
    rank = next((each.rank for each in others if each.token_id == token_id), None)
    first = Candidate(name, token_id, logprob, rank)
    rest = [each for each in others if each.token_id != token_id]
    return Entry(name, token_id, logprob, rank, (first, *rest[: count - 1]))


def prompt_rows(sample: TrainingSample, name: Callable[[int], str]) -> list[dict[str, Any] | None]:
    """One row a prompt token: id -> logprob, rank and text, of the token and of the most probable ones. The first is
    None: nothing stands before it.

    A token that is not among these has the rank behind the last of them: a lower bound, by which clients may sort.
    """
    assert sample.prompt_logprobs is not None
    tops = sample.prompt_top_logprobs or (TopLogprobs((), ()),) * len(sample.prompt_tokens)
    rows = zip(sample.prompt_tokens, sample.prompt_logprobs, tops, strict=True)
    return [
        _prompt_row(token_id, logprob, top, name) if place else None
        for place, (token_id, logprob, top) in enumerate(rows)
    ]


def _prompt_row(token_id: int, logprob: float, top: TopLogprobs, name: Callable[[int], str]) -> dict[str, Any]:
    row = {
        each: {"logprob": at_least(score), "rank": rank, "decoded_token": name(each)}
        for rank, (each, score) in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1)
    }
    rank = len(top.token_ids) + 1 if top.token_ids else None
    row.setdefault(token_id, {"logprob": at_least(logprob), "rank": rank, "decoded_token": name(token_id)})
    return {str(each): what for each, what in row.items()}
