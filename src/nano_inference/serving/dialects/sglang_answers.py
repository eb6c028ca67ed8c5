"""How SGLang's `/generate` answers: the text, the ids, and `meta_info`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from nano_inference.serving.protocols.per_token import (
    LOWEST,
    Flat,
    at_least,
    base64_of,
    flat,
    version_spans,
)
from nano_inference.text.token_texts import TokenTexts
from nano_inference.types import TopLogprobs, TrainingSample


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be told of a prompt's samples.

    Attributes:
        logprobs: those of the completion.
        scored_from: the prompt's from this token on; None: none of them.
        top: so many of the most probable ones at each place.
        mask: which ids the filters kept.
        flat_mask: the same in slime's form.
        raw_logprobs: the model's own.
        hides: nothing was to be generated; the engine has drawn a token all the same.
    """

    logprobs: bool
    scored_from: int | None
    top: int
    mask: bool
    flat_mask: bool
    raw_logprobs: bool
    hides: bool


@dataclass(frozen=True, slots=True)
class Form:
    """How all of a request's samples are told.

    Attributes:
        texts: where logprobs name tokens; None: they do not.
        flat: numbers instead of rows.
        version_name: what the client calls a version.
        show_cached: say how much of the prompt was cached.
    """

    texts: TokenTexts | None
    flat: Flat | None
    version_name: Callable[[int], str]
    show_cached: bool


def full_logprobs(
    logprobs: Sequence[float], log_kept_mass: Sequence[float] | None
) -> Sequence[float]:
    """What SGLang tells: logprobs after temperature and penalties and before masks and filters, as
    a trainer over the whole vocabulary computes them. The engine's own are of what was sampled
    from, after both.
    """
    if log_kept_mass and any(log_kept_mass):
        logprobs = [own + kept for own, kept in zip(logprobs, log_kept_mass, strict=True)]
    return _finite(logprobs)


def rows(
    logprobs: Sequence[float], token_ids: Sequence[int], texts: TokenTexts | None
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


def meta_info(
    request_id: str, sample: TrainingSample, wanted: Wanted, form: Form, seconds: float
) -> dict[str, Any]:
    """All that is told of a sample that has ended.

    Args:
        request_id: the client's.
        sample: it.
        wanted: what its client wants to know.
        form: how.
        seconds: since the request came.
    """
    ids = () if wanted.hides else sample.completion_tokens
    ending = {"type": "length", "length": 0} if wanted.hides else finish_reason(sample, len(ids))
    told: dict[str, Any] = {
        "id": request_id,
        "finish_reason": ending,
        "prompt_tokens": len(sample.prompt_tokens),
        "completion_tokens": len(ids),
        "weight_version": form.version_name(sample.weight_version),
        "weight_versions": version_spans(
            () if wanted.hides else sample.weight_versions, form.version_name
        ),
        "seed": sample.seed,
        "e2e_latency": seconds,
    }
    if form.show_cached:
        told["cached_tokens"] = sample.cached_tokens
    if wanted.logprobs:
        told |= _logprobs(sample, ids, wanted, form)
    if wanted.raw_logprobs and not wanted.hides:
        told["output_token_raw_logprobs"] = _finite(sample.raw_logprobs or ())
    return told | _masks(sample, wanted)


def _logprobs(
    sample: TrainingSample, ids: Sequence[int], wanted: Wanted, form: Form
) -> dict[str, Any]:
    values = full_logprobs(sample.logprobs, sample.log_kept_mass)[: len(ids)]
    told: dict[str, Any] = {
        "input_token_logprobs": _scores(sample, wanted, form),
        "output_token_logprobs_length": len(ids),
    }
    if form.flat is None:
        told["output_token_logprobs"] = rows(values, ids, form.texts)
    else:
        told["token_logprobs"] = flat(values, form.flat)
    if wanted.top:
        told["output_top_logprobs"] = top_rows(
            (sample.top_logprobs or ())[: len(ids)], wanted.top, form.texts, sample.log_kept_mass
        )
        told["input_top_logprobs"] = _top_scores(sample, wanted, form)
    return told


def _scores(sample: TrainingSample, wanted: Wanted, form: Form) -> list[Any]:
    """The prompt's rows; the first has no logprob, as SGLang has it, also where there is a token
    before it.
    """
    if wanted.scored_from is None or sample.prompt_logprobs is None:
        return []
    begin = wanted.scored_from
    values = [None, *_finite(sample.prompt_logprobs[begin + 1 :])]
    return rows(values, sample.prompt_tokens[begin:], form.texts)  # type: ignore[arg-type]


def _top_scores(sample: TrainingSample, wanted: Wanted, form: Form) -> list[Any]:
    if wanted.scored_from is None or sample.prompt_top_logprobs is None:
        return []
    rest = sample.prompt_top_logprobs[wanted.scored_from + 1 :]
    return [None, *top_rows(rest, wanted.top, form.texts)][
        : len(sample.prompt_tokens) - wanted.scored_from
    ]


def _masks(sample: TrainingSample, wanted: Wanted) -> dict[str, Any]:
    mask = sample.sampling_mask
    if mask is None or wanted.hides:
        return {}
    told: dict[str, Any] = {}
    if wanted.mask:
        told |= {
            "output_token_sampling_mask": mask.rows(),
            "output_token_sampling_logprobs": _finite(sample.logprobs),
            "output_token_sampling_mask_length": len(sample.completion_tokens),
        }
    if wanted.flat_mask:
        told |= {
            "top_p_token_ids": base64_of("i", mask.token_ids),
            "top_p_token_offsets": base64_of("i", mask.offsets),
        }
    return told


def _finite(values: Sequence[float]) -> Sequence[float]:
    """Logprobs that JSON can say."""
    return values if not values or min(values) > LOWEST else [at_least(each) for each in values]
