"""Parts shared by the protocols' answers: JSON that is generated while it is written, server-sent
events, and values per token.
"""

import base64
import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from pydantic_core import from_json

from nano_inference.data.files import json_row
from nano_inference.types import (
    LogprobMatrix,
    RoutedExperts,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)


class LazyArray:
    """JSON array whose items are made, once, when it is written.

    Args:
        items: Items of the array, read once.
        at_once: Number of items to write together. With 1, an item may itself hold a `LazyArray`.
    """

    def __init__(self, items: Iterable[Any], at_once: int = 1) -> None:
        self._items, self._at_once = items, at_once

    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON of the array in pieces."""
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
    """Yield the JSON of a value in pieces. A `LazyArray` may be nested in objects, not in lists."""
    if isinstance(value, LazyArray):
        yield from value.pieces()
    elif type(value) is dict and any(isinstance(each, LazyArray | dict) for each in value.values()):
        before = b"{"
        for name, item in value.items():
            yield before + encode(name) + b":"
            yield from json_pieces(item)
            before = b","
        yield b"}"
    else:
        yield encode(value)


def _told(value: object) -> msgspec.Raw:
    if isinstance(value, LazyArray):
        return msgspec.Raw(b"".join(value.pieces()))
    raise NotImplementedError(f"{type(value).__name__} cannot be written as JSON.")


encode = msgspec.json.Encoder(enc_hook=_told).encode


# line ends other than line feeds, at which some clients split a stream's text, too
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


# end of a stream in OpenAI's protocol and those modelled on it
DONE = b"data: [DONE]\n\n"


def data_event(value: object) -> bytes:
    """Return an event with data and no name."""
    return b"data: %b\n\n" % encode_line(value)


def encode_line(value: object) -> bytes:
    """Return JSON without any characters that clients may take for the end of a line."""
    data = encode(value)
    if not data.isascii():
        for character, escaped in _LINE_ENDS:
            data = data.replace(character, escaped)
    return data


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments of a tool call. Incomplete ones are read as far as they came, as SDKs
    read them from a stream.
    """
    try:
        value = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


LOWEST = -9999.0  # JSON has no infinity
ROWS_AT_ONCE = 64  # rows of a `LazyArray` that are written together

# a list of numbers, or base64 of little-endian float32
Flat = Literal["list", "base64"]


def at_least(logprob: float) -> float:
    """Return the logprob, or `LOWEST` for minus infinity."""
    return logprob if logprob > LOWEST else LOWEST


def flat(values: Iterable[float], form: Flat) -> list[float] | str:
    """Return one number per token, in the form that the client asked for."""
    numbers = [at_least(each) for each in values]
    if form == "list":
        return numbers
    return base64_of("f", numbers)


def flat_rows(matrix: LogprobMatrix, form: Flat) -> list[list[float]] | str:
    """Return logprobs of named ids as a list for each token, or all of them as base64."""
    rows = [[at_least(each) for each in row] for row in matrix.tolist()]
    return rows if form == "list" else base64_of("f", itertools.chain.from_iterable(rows))


def base64_of(kind: Literal["f", "i"], numbers: Iterable[float]) -> str:
    """Return numbers as base64 of little-endian float32 or int32."""
    packed = array(kind, numbers)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode("ascii")


def npy_of(routed: RoutedExperts) -> str:
    """Return routed experts as base64 of an `.npy` file, as vLLM does."""
    return _npy("|u1" if routed.dtype == "uint8" else "<u2", routed.shape, routed.data)


def npy_of_logprobs(matrix: LogprobMatrix) -> str:
    """Return logprobs of named ids as base64 of a float32 `.npy` file, as vLLM does."""
    return _npy("<f4", matrix.shape, matrix.data)


def _npy(typestr: str, shape: tuple[int, ...], data: bytes) -> str:
    text = f"{{'descr': '{typestr}', 'fortran_order': False, 'shape': {shape}, }}"
    header = text + " " * (-(len(text) + 11) % 64) + "\n"  # aligns the data to 64 bytes
    file = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data
    return base64.b64encode(file).decode("ascii")


def int32_of(routed: RoutedExperts) -> str:
    """Return routed experts as base64 of little-endian int32, as SGLang does."""
    ids = np.frombuffer(routed.data, "<u1" if routed.dtype == "uint8" else "<u2")
    return base64.b64encode(ids.astype("<i4").tobytes()).decode("ascii")


def routed_experts_told(
    sample: TrainingSample,
    encode_experts: Callable[[RoutedExperts], str],
    start: int = 0,
    *,
    hides: bool = False,
) -> dict[str, Any]:
    """Return the fields of an answer about routed experts.

    Args:
        sample: Sample of the choice.
        encode_experts: Encodes the experts for the client.
        start: First token to report.
        hides: Report only the prompt's experts, not the completion's.
    """
    if sample.routed_experts is not None:
        end = len(sample.prompt_tokens) - 1 if hides else None
        return {"routed_experts": encode_experts(sample.routed_experts.rows(start, end))}
    if sample.routed_experts_unknown is not None:
        return {"routed_experts": None, "routed_experts_unknown": sample.routed_experts_unknown}
    return {}


def receipt_told(sample: TrainingSample, *, hides_cached: bool) -> dict[str, Any]:
    """Return the field of an answer with the sample as a line for `nano-inference verify`, if it
    has a receipt.
    """
    if sample.receipt is None:
        return {}
    row = json_row(sample)
    return {"receipt": row | {"cached_tokens": 0} if hides_cached else row}


def version_spans(
    spans: Iterable[VersionSpan], name: Callable[[int], int | str]
) -> list[dict[str, Any]]:
    """Return the weight version of each range of tokens."""
    return [{"version": name(span.version), "start": span.start, "end": span.end} for span in spans]


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """Token that might have been drawn."""

    token: str
    token_id: int
    logprob: float
    rank: int | None = None


class Entry(msgspec.Struct, frozen=True, gc=False):
    """Token that was drawn. vLLM's clients read either `token` or `token_id`."""

    token: str
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: tuple[Candidate, ...] = ()


_names: dict[int, str] = {}


def token_name(token_id: int) -> str:
    """Return the name of a token for clients that know token ids."""
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
    """Return one entry per token.

    Args:
        token_ids: Tokens that were drawn.
        logprobs: Their logprobs.
        tops: Most probable tokens at each position.
        count: Number of candidates to report. As in vLLM, the token itself comes first, then the
            others, best first.
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


def named_tops(token_ids: Sequence[int], matrix: LogprobMatrix) -> list[TopLogprobs]:
    """Return named ids and their logprobs at each position, in the client's order."""
    ids = tuple(token_ids)
    return [TopLogprobs(ids, tuple(row)) for row in matrix.tolist()]


def named_entries(
    token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs]
) -> list[Entry]:
    """Return one entry per token. Its candidates are the token itself, then the named ids."""
    rows: list[Entry] = []
    for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True):
        sampled, *others = own_first(token_id, logprob, top)
        candidates = tuple(
            Candidate(token_name(each), each, at_least(score))
            for each, score, _ in (sampled._replace(logprob=logprob), *others)
        )
        entry = Entry(token_name(token_id), token_id, at_least(logprob), None, candidates)
        rows.append(entry)
    return rows


def _alone(name: str, token_id: int, logprob: float) -> Entry:
    return Entry(name, token_id, logprob, None, (Candidate(name, token_id, logprob),))


def _entry(token_id: int, logprob: float, top: TopLogprobs, count: int) -> Entry:
    first, *others = own_first(token_id, logprob, top)
    candidates = [
        Candidate(token_name(each), each, at_least(score), rank)
        for each, score, rank in (first, *others[: count - 1])
    ]
    return Entry(token_name(token_id), token_id, logprob, first.rank, tuple(candidates))


class Ranked(NamedTuple):
    """Token with its rank at a position."""

    token_id: int
    logprob: float
    rank: int | None  # by falling logprob, ties by lower id; None: beyond the computed ones


def own_first(token_id: int, logprob: float, top: TopLogprobs) -> list[Ranked]:
    """Return the token itself, then the most probable of the others, best first. Clients read the
    list by position.
    """
    best = [
        Ranked(*each, rank)
        for rank, each in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1)
    ]
    first = next(
        (each for each in best if each.token_id == token_id), Ranked(token_id, logprob, None)
    )
    return [first, *(each for each in best if each.token_id != token_id)]


def prompt_rows(
    sample: TrainingSample, text: Callable[[int], str | None], count: int | None
) -> LazyArray:
    """Return one row per prompt token: id -> logprob, rank and text, for the token itself and then
    for the `count` most probable ones.

    The first row is None, because nothing precedes it. A token beyond the most probable ones gets
    the rank after the last of them, a lower bound by which clients can sort. Without any its rank
    is None.
    """
    assert sample.prompt_logprobs is not None
    tops = sample.prompt_top_logprobs or (TopLogprobs((), ()),) * len(sample.prompt_tokens)
    rows = zip(sample.prompt_tokens, sample.prompt_logprobs, tops, strict=True)
    written = (
        _prompt_row(
            token_id, logprob, TopLogprobs(top.token_ids[:count], top.logprobs[:count]), text
        )
        if index
        else None
        for index, (token_id, logprob, top) in enumerate(rows)
    )
    return LazyArray(written, ROWS_AT_ONCE)


def _prompt_row(
    token_id: int, logprob: float, top: TopLogprobs, text: Callable[[int], str | None]
) -> dict[str, dict[str, Any]]:
    behind = len(top.token_ids) + 1 if top.token_ids else None
    return {
        str(each): {"logprob": at_least(score), "rank": rank or behind, "decoded_token": text(each)}
        for each, score, rank in own_first(token_id, logprob, top)
    }
