"""What the protocols' answers share: JSON that is made while it is written, server-sent events, and
what is told of single tokens.
"""

import base64
import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from nano_inference.types import RoutedExperts, TopLogprobs, TrainingSample, VersionSpan


class LazyArray:
    """The items of an array, which are made when they are written, once.

    Args:
        items: of the array; read once, when it is written.
        at_once: so many are made and written together; with 1 an item may itself hold what is made
            when it is written.
    """

    def __init__(self, items: Iterable[Any], at_once: int = 1) -> None:
        self._items, self._at_once = items, at_once

    def pieces(self) -> Iterator[bytes]:
        """JSON of the array."""
        before, items = b"[", iter(self._items)
        while batch := list(itertools.islice(items, self._at_once)):
            yield before
            if self._at_once == 1:
                yield from json_pieces(batch[0])
            else:
                yield encode(batch)[1:-1]
            before = b","
        yield b"[]" if before == b"[" else b"]"


def json_pieces(value: object) -> Iterator[bytes]:
    """JSON of a value. Looks for `LazyArray` in it, in objects in it, and so on, but in no list."""
    if isinstance(value, LazyArray):
        yield from value.pieces()
    elif type(value) is dict and any(isinstance(each, LazyArray | dict) for each in value.values()):
        before = b"{"
        for name, each in value.items():
            yield before + encode(name) + b":"
            yield from json_pieces(each)
            before = b","
        yield b"}"
    else:
        yield encode(value)


def _told(value: object) -> msgspec.Raw:
    if isinstance(value, LazyArray):
        return msgspec.Raw(b"".join(value.pieces()))
    raise NotImplementedError(f"{type(value).__name__} cannot be said in JSON.")


encode = msgspec.json.Encoder(enc_hook=_told).encode


# Some clients split a stream's text at these too, and not only at line feeds.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


# the end's mark of OpenAI's streams, and of all that are modelled on them
DONE = b"data: [DONE]\n\n"


def data_event(value: object) -> bytes:
    """An event that has data and no name."""
    return b"data: %b\n\n" % encode_line(value)


def encode_line(value: object) -> bytes:
    """JSON of one line, whatever a client takes for a line's end."""
    data = encode(value)
    if not data.isascii():
        for character, escaped in _LINE_ENDS:
            data = data.replace(character, escaped)
    return data


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


def npy_of(routed: RoutedExperts) -> str:
    """Routed experts as base64 of an `.npy`, as vLLM tells them."""
    typestr = "|u1" if routed.dtype == "uint8" else "<u2"
    text = f"{{'descr': '{typestr}', 'fortran_order': False, 'shape': {routed.shape}, }}"
    header = text + " " * (-(len(text) + 11) % 64) + "\n"  # of all but the data, multiples of 64
    file = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + routed.data
    return base64.b64encode(file).decode("ascii")


def int32_of(routed: RoutedExperts) -> str:
    """Routed experts as base64 of little-endian int32, as SGLang tells them."""
    ids = np.frombuffer(routed.data, "<u1" if routed.dtype == "uint8" else "<u2")
    return base64.b64encode(ids.astype("<i4").tobytes()).decode("ascii")


def routed_experts_told(
    sample: TrainingSample,
    told: Callable[[RoutedExperts], str],
    start: int = 0,
    *,
    hides: bool = False,
) -> dict[str, Any]:
    """The fields of an answer about routed experts.

    Args:
        sample: whose they are.
        told: their form.
        start: first token of which they are told.
        hides: what was sampled is not told, only the prompt.
    """
    if sample.routed_experts is not None:
        end = len(sample.prompt_tokens) - 1 if hides else None
        return {"routed_experts": told(sample.routed_experts.rows(start, end))}
    if sample.routed_experts_unknown is not None:
        return {"routed_experts": None, "routed_experts_unknown": sample.routed_experts_unknown}
    return {}


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
) -> LazyArray:
    """One row a prompt token: id -> logprob, rank and text, of the token, then of the `count` most
    probable ones.

    The first row is None: nothing stands before it. A token that is not among these has the rank
    behind the last of them, a lower bound by which clients sort; without any it has None.
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
    return LazyArray(told, ROWS_AT_ONCE)


def _prompt_row(
    token_id: int, logprob: float, top: TopLogprobs, text: Callable[[int], str | None]
) -> dict[str, dict[str, Any]]:
    behind = len(top.token_ids) + 1 if top.token_ids else None
    return {
        str(each): {"logprob": at_least(score), "rank": rank or behind, "decoded_token": text(each)}
        for each, score, rank in own_first(token_id, logprob, top)
    }
