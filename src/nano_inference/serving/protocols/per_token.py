"""What is told of single tokens, in the forms that trainers read."""

import base64
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from nano_inference.serving.protocols.pieces import Told
from nano_inference.types import TopLogprobs, TrainingSample, VersionSpan

LOWEST = -9999.0  # JSON has no infinity
ROWS_AT_ONCE = 64  # of an array that is made while it is written

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


def version_spans(
    spans: Iterable[VersionSpan], name: Callable[[int], int | str]
) -> list[dict[str, Any]]:
    """Which version sampled which tokens."""
    return [{"version": name(span.version), "start": span.start, "end": span.end} for span in spans]


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A token that might have been drawn."""

    token: str
    token_id: int
    logprob: float
    rank: int | None = None


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A token that was drawn: named as vLLM's clients of both kinds want it, by `token` and by
    `token_id`.
    """

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
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[TopLogprobs] | None = None,
    count: int = 0,
) -> list[Entry]:
    """One entry a token.

    Args:
        token_ids: that were drawn.
        logprobs: of these.
        tops: the most probable tokens of each place.
        count: how many candidates to tell: as in vLLM the token itself first, then the others, best
            first.
    """
    if tops is None or count < 2:
        return [
            _alone(token_name(token_id), token_id, at_least(logprob))
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
    return [
        _entry(token_id, at_least(logprob), top, count)
        for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True)
    ]


def _alone(name: str, token_id: int, logprob: float) -> Entry:
    return Entry(name, token_id, logprob, None, (Candidate(name, token_id, logprob),))


def _entry(token_id: int, logprob: float, top: TopLogprobs, count: int) -> Entry:
    own, *others = own_first(token_id, logprob, top)
    told = [
        Candidate(token_name(each), each, at_least(score), rank)
        for each, score, rank in (own, *others[: count - 1])
    ]
    return Entry(token_name(token_id), token_id, logprob, own.rank, tuple(told))


class Ranked(NamedTuple):
    """A token in a row."""

    token_id: int
    logprob: float
    rank: int | None  # by falling logprob, ties by lower id; None: beyond those that were computed


def own_first(token_id: int, logprob: float, top: TopLogprobs) -> list[Ranked]:
    """A row as readers by position want it: the token itself, then the most probable of the others,
    best first.
    """
    best = [
        Ranked(*each, rank)
        for rank, each in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1)
    ]
    own = next(
        (each for each in best if each.token_id == token_id), Ranked(token_id, logprob, None)
    )
    return [own, *(each for each in best if each.token_id != token_id)]


def prompt_rows(
    sample: TrainingSample, text: Callable[[int], str | None], count: int | None
) -> Told:
    """One row a prompt token: id -> logprob, rank and text, of the token, then of the `count` most
    probable ones.

    The first row is None: nothing stands before it. A token that is not among these has the rank
    None.
    """
    assert sample.prompt_logprobs is not None
    tops = sample.prompt_top_logprobs or (TopLogprobs((), ()),) * len(sample.prompt_tokens)
    rows = zip(sample.prompt_tokens, sample.prompt_logprobs, tops, strict=True)
    told = (
        _prompt_row(
            token_id, logprob, TopLogprobs(top.token_ids[:count], top.logprobs[:count]), text
        )
        if place
        else None
        for place, (token_id, logprob, top) in enumerate(rows)
    )
    return Told(told, ROWS_AT_ONCE)


def _prompt_row(
    token_id: int, logprob: float, top: TopLogprobs, text: Callable[[int], str | None]
) -> dict[str, dict[str, Any]]:
    return {
        str(each): {"logprob": at_least(score), "rank": rank, "decoded_token": text(each)}
        for each, score, rank in own_first(token_id, logprob, top)
    }
