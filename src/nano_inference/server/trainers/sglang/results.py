"""SGLang's `/generate`: what it tells of a sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from nano_inference.server.api.shared.answers import (
    LOWEST,
    at_least,
    base64_of,
    encode_line,
)
from nano_inference.server.api.shared.openapi import INTEGER, STRING, list_of, thing
from nano_inference.text.token_texts import TokenTexts
from nano_inference.types import TopLogprobs, TrainingSample


@dataclass(frozen=True, slots=True)
class SglangPrompt:
    """One prompt, and what is to be told of its samples.

    Attributes:
        request_id: by which its client knows it.
        logprobs: those of the completion.
        scored_from: the prompt's from this token on; None: none of them.
        top: so many of the most probable ones at each place.
        mask: which ids the filters kept.
        flat_mask: the same in slime's form.
        raw_logprobs: the model's own.
        experts_from: the routed experts from this token on; None: none.
        hides: nothing was to be generated; the engine has drawn a token all the same.
    """

    token_ids: list[int]
    request_id: str
    logprobs: bool
    scored_from: int | None
    top: int
    mask: bool
    flat_mask: bool
    raw_logprobs: bool
    experts_from: int | None
    hides: bool


def full_logprobs(
    logprobs: Sequence[float], log_kept_mass: Sequence[float] | None
) -> Sequence[float]:
    """What SGLang tells: logprobs after temperature and penalties and before masks and filters, as
    a trainer over the whole vocabulary computes them. The engine's own are of what was sampled
    from, after both.
    """
    if log_kept_mass and any(log_kept_mass):
        logprobs = [own + kept for own, kept in zip(logprobs, log_kept_mass, strict=True)]
    return finite(logprobs)


def rows(
    logprobs: Sequence[float | None], token_ids: Sequence[int], texts: TokenTexts | None
) -> list[tuple[Any, int, Any]]:
    """`[logprob, id, text]` a token; no text without `texts`."""
    names = repeat(None) if texts is None else map(texts.text, token_ids)
    return list(zip(logprobs, token_ids, names, strict=False))


def top_rows(
    tops: Sequence[TopLogprobs],
    count: int,
    texts: TokenTexts | None,
    log_kept_mass: Sequence[float] | None = None,
) -> list[list[tuple[Any, int, Any]]]:
    """The same of the `count` most probable ones at each place, among those that the filters
    kept.
    """
    return [
        rows([at_least(each + kept) for each in top.logprobs[:count]], top.token_ids[:count], texts)
        for top, kept in zip(tops, log_kept_mass or repeat(0.0), strict=False)
    ]


def finish_reason(sample: TrainingSample, num_tokens: int) -> dict[str, Any]:
    """Why it ended, as an object."""
    match sample.finish_reason:
        case "stop":
            return {"type": "stop", "matched": sample.stop_reason}
        case "length":
            return {"type": "length", "length": num_tokens}
        case "abort":
            why = (
                sample.stop_reason if isinstance(sample.stop_reason, str) else "Abort in the middle"
            )
            return {"type": "abort", "message": why, "status_code": None, "err_type": None}


def masks_of(prompt: SglangPrompt, sample: TrainingSample) -> dict[str, Any]:
    mask, told = sample.sampling_mask, dict[str, Any]()
    if mask is not None and prompt.mask:
        told |= {
            "output_token_sampling_mask": mask.rows(),
            "output_token_sampling_logprobs": finite(sample.logprobs),
            "output_token_sampling_mask_length": len(sample.completion_tokens),
        }
    if mask is not None and prompt.flat_mask:
        told |= {
            "top_p_token_ids": base64_of("i", mask.token_ids),
            "top_p_token_offsets": base64_of("i", mask.offsets),
        }
    return told


def finite(values: Sequence[float]) -> Sequence[float]:
    """Logprobs that JSON can say."""
    return values if not values or min(values) > LOWEST else [at_least(each) for each in values]


@dataclass(slots=True)
class Grown:
    """A choice of a stream so far; ids and logprobs as JSON, so that none is encoded twice."""

    text: str = ""
    num_tokens: int = 0
    ids: bytearray = field(default_factory=bytearray)
    rows: bytearray = field(default_factory=bytearray)
    tops: bytearray = field(default_factory=bytearray)


def extend(array: bytearray, values: Sequence[Any]) -> None:
    """Put values behind those in an array of JSON, which stands without its brackets."""
    if values:
        if array:
            array += b","
        array += encode_line(values)[1:-1]


_ONE = thing(
    "text",
    "output_ids",
    "meta_info",
    text=STRING,
    output_ids=list_of(INTEGER),
    meta_info={"type": "object"},
)
ANSWER = {"anyOf": [_ONE, list_of(_ONE)]}
