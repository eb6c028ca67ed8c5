"""`POST /generate` as SGLang's clients use it.

Differences from SGLang and special cases:

- The default of `max_new_tokens` is the rest of the context (SGLang: 128). `0` only scores the
  prompt.
- `output_token_logprobs` are SGLang's: after temperature and penalties, before top_k, top_p and
  min_p. A trainer over the whole vocabulary computes the same. `return_sampling_mask` returns the
  ids that the filters kept, and the logprobs of the filtered distribution. At temperature 0 they
  are the model's own.
- An aborted request is answered with 200 and its partial samples.
- As in SGLang, each event of a stream contains all text, ids and logprobs so far. Only a choice's
  last event has weight versions and the prompt's logprobs.
- With several samples, by a batch or by `n`, answers are a list, and events have an `index`.
- A higher `priority` goes first, as in SGLang. The engine's own order is the reverse.
- `seed` in `meta_info` reproduces the sample.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from nano_inference.server.api.shared.answers import (
    DONE,
    LOWEST,
    LazyArray,
    at_least,
    base64_of,
    data_event,
    encode_line,
    flat,
    flat_rows,
    int32_of,
    named_tops,
    receipt_told,
    routed_experts_told,
    version_spans,
)
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta
from nano_inference.server.api.shared.openapi import INTEGER, STRING, list_of, operation, thing
from nano_inference.server.api.shared.protocol import (
    ApiProtocol,
    RequestUsage,
    Served,
)
from nano_inference.server.errors import ApiError
from nano_inference.server.trainers.sglang.models import (
    SglangRequest,
)
from nano_inference.server.trainers.sglang.request import (
    SglangAsked,
    SglangPrompt,
)
from nano_inference.text.token_texts import TokenTexts
from nano_inference.types import TopLogprobs, TrainingSample


def full_logprobs(
    logprobs: Sequence[float], log_kept_mass: Sequence[float] | None
) -> Sequence[float]:
    """Return logprobs as SGLang does: after temperature and penalties, before masks and filters.
    The engine's own logprobs are of the filtered distribution.
    """
    if log_kept_mass and any(log_kept_mass):
        logprobs = [own + kept for own, kept in zip(logprobs, log_kept_mass, strict=True)]
    return finite(logprobs)


def rows(
    logprobs: Sequence[float | None], token_ids: Sequence[int], texts: TokenTexts | None
) -> list[tuple[Any, int, Any]]:
    """Return `[logprob, id, text]` per token. The text is null without `texts`."""
    names = repeat(None) if texts is None else map(texts.text, token_ids)
    return list(zip(logprobs, token_ids, names, strict=False))


def top_rows(
    tops: Sequence[TopLogprobs],
    count: int,
    texts: TokenTexts | None,
    log_kept_mass: Sequence[float] | None = None,
) -> list[list[tuple[Any, int, Any]]]:
    """Return `rows` of the `count` most probable tokens at each position, among those that the
    filters kept.
    """
    return [
        rows([at_least(each + kept) for each in top.logprobs[:count]], top.token_ids[:count], texts)
        for top, kept in zip(tops, log_kept_mass or repeat(0.0), strict=False)
    ]


def finish_reason(sample: TrainingSample, num_tokens: int) -> dict[str, Any]:
    """Return the reason why a sample ended, as SGLang's object."""
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
    mask, fields = sample.sampling_mask, dict[str, Any]()
    if mask is not None and prompt.mask:
        fields |= {
            "output_token_sampling_mask": mask.rows(),
            "output_token_sampling_logprobs": finite(sample.logprobs),
            "output_token_sampling_mask_length": len(sample.completion_tokens),
        }
    if mask is not None and prompt.flat_mask:
        fields |= {
            "top_p_token_ids": base64_of("i", mask.token_ids),
            "top_p_token_offsets": base64_of("i", mask.offsets),
        }
    return fields


def finite(values: Sequence[float]) -> Sequence[float]:
    """Return logprobs that JSON can represent."""
    return values if not values or min(values) > LOWEST else [at_least(each) for each in values]


@dataclass(slots=True)
class Grown:
    """A choice of a stream so far. Ids and logprobs are kept as JSON, so that they are encoded
    once.
    """

    text: str = ""
    num_tokens: int = 0
    ids: bytearray = field(default_factory=bytearray)
    rows: bytearray = field(default_factory=bytearray)
    tops: bytearray = field(default_factory=bytearray)
    named: bytearray = field(default_factory=bytearray)


def extend(array: bytearray, values: Sequence[Any]) -> None:
    """Append values to a JSON array without brackets."""
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


class SglangBuilder(SglangAsked):
    """Builder of one request's answer in SGLang's format."""

    def __init__(self, request: SglangRequest, served: Served, request_id: str) -> None:
        super().__init__(request, served, request_id)
        self._grown: dict[int, Grown] = {}

    # -- a stream ----------------------------------------------------------------------------------

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """Return an event with all of a choice so far. The last event has the whole choice."""
        prompt = self._prompts[piece.index // self.num_samples]
        grown = self._grown.get(piece.index)
        if grown is None:
            grown = self._grown[piece.index] = Grown()
        self._grow(grown, piece, prompt)
        if piece.finished is not None:
            return data_event(self._told(piece.index, piece.finished, grown.text))
        return b"" if not piece.token_ids else self._growing(grown, piece.index, prompt)

    def _grow(self, grown: Grown, piece: ChoiceDelta, prompt: SglangPrompt) -> None:
        new = piece.token_ids
        grown.text += piece.content
        if piece.finished is not None:
            return
        grown.num_tokens += len(new)
        extend(grown.ids, new)
        if prompt.logprobs:
            values = full_logprobs(piece.logprobs, piece.log_kept_mass)
            extend(
                grown.rows,
                rows(values, new, self._texts) if self._flat is None else values,
            )
            if prompt.top:
                tops = top_rows(
                    piece.top_logprobs or (), prompt.top, self._texts, piece.log_kept_mass
                )
                extend(grown.tops, tops)
            if prompt.named and piece.token_id_logprobs is not None:
                named = named_tops(prompt.named, piece.token_id_logprobs)
                count, mass = len(prompt.named), piece.log_kept_mass
                extend(grown.named, top_rows(named, count, self._texts, mass))

    def _growing(self, grown: Grown, index: int, prompt: SglangPrompt) -> bytes:
        meta: dict[str, Any] = {
            "id": prompt.request_id,
            "finish_reason": None,
            "prompt_tokens": len(prompt.token_ids),
            "completion_tokens": grown.num_tokens,
        }
        parts = [
            b'data: {"text":',
            encode_line(grown.text),
            b',"output_ids":[',
            grown.ids,
            b'],"meta_info":',
        ]
        parts.append(encode_line(meta)[:-1])
        if prompt.logprobs:
            # Base64 cannot be extended, so only the last event has it.
            name = b"output_token_logprobs" if self._flat is None else b"token_logprobs"
            if self._flat != "base64":
                parts += [b',"', name, b'":[', grown.rows, b"]"]
            if prompt.top:
                parts += [b',"output_top_logprobs":[', grown.tops, b"]"]
            if prompt.named and self._flat is None:
                parts += [b',"output_token_ids_logprobs":[', grown.named, b"]"]
        parts.append(b'},"index":%d}\n\n' % index if self._is_list else b"}}\n\n")
        return b"".join(parts)

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """Return the mark of the stream's end."""
        self._correct(usage)
        return DONE

    def failure(self, problem: ApiError) -> bytes:
        """Return the error event and the mark of the stream's end."""
        return super().failure(problem) + DONE

    # -- the answer as a whole ---------------------------------------------------------------------

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Any:
        """Return one object, or a list of them for a batch or several samples."""
        self._correct(usage)
        replies = (
            self._told(choice.index, choice.finished, choice.content)
            for choice in choices
            if choice.finished is not None
        )
        return LazyArray(replies) if self._is_list else next(replies)

    # -- parts -------------------------------------------------------------------------------------

    def _told(self, index: int, sample: TrainingSample, text: str) -> dict[str, Any]:
        """Return a whole choice."""
        prompt = self._prompts[index // self.num_samples]
        reply: dict[str, Any] = {
            "text": "" if prompt.hides else text,
            "output_ids": () if prompt.hides else sample.completion_tokens,
            "meta_info": self._meta_info(prompt, sample),
        }
        if self.request.return_prompt_token_ids:
            reply["prompt_token_ids"] = prompt.token_ids
        if self.stream and self._is_list:
            reply["index"] = index
        return reply

    def _meta_info(self, prompt: SglangPrompt, sample: TrainingSample) -> dict[str, Any]:
        version_name = self.served.version_name
        ids, spans = sample.completion_tokens, sample.weight_versions
        ending = finish_reason(sample, len(ids))
        if prompt.hides:
            ids, spans, ending = (), (), {"type": "length", "length": 0}
        meta: dict[str, Any] = {
            "id": prompt.request_id,
            "finish_reason": ending,
            "prompt_tokens": len(sample.prompt_tokens),
            "completion_tokens": len(ids),
            "weight_version": version_name(sample.weight_version),
            "weight_versions": version_spans(spans, version_name),
            "seed": sample.seed,
            "e2e_latency": time.perf_counter() - self._started,
        }
        if not self.served.config.hide_cached_tokens:
            meta["cached_tokens"] = sample.cached_tokens
        if prompt.logprobs:
            meta |= self._logprobs(prompt, sample, ids)
        if prompt.raw_logprobs and not prompt.hides:
            meta["output_token_raw_logprobs"] = finite(sample.raw_logprobs or ())
        if prompt.experts_from is not None:
            meta |= routed_experts_told(sample, int32_of, prompt.experts_from, hides=prompt.hides)
        if prompt.hides:
            return meta
        meta |= receipt_told(sample, hides_cached=self.served.config.hide_cached_tokens)
        return meta | masks_of(prompt, sample)

    def _logprobs(
        self, prompt: SglangPrompt, sample: TrainingSample, ids: Sequence[int]
    ) -> dict[str, Any]:
        values = full_logprobs(sample.logprobs, sample.log_kept_mass)[: len(ids)]
        begin, scored = prompt.scored_from, list[Any]()
        if begin is not None and sample.prompt_logprobs is not None:
            # As in SGLang, the first row has no logprob, even if a token precedes it.
            scores = [None, *finite(sample.prompt_logprobs[begin + 1 :])]
            scored = rows(scores, sample.prompt_tokens[begin:], self._texts)
        meta: dict[str, Any] = {
            "input_token_logprobs": scored,
            "output_token_logprobs_length": len(ids),
        }
        if self._flat is None:
            meta["output_token_logprobs"] = rows(values, ids, self._texts)
        else:
            meta["token_logprobs"] = flat(values, self._flat)
        if prompt.top:
            tops, scored_tops = (sample.top_logprobs or ())[: len(ids)], list[Any]()
            if begin is not None and sample.prompt_top_logprobs is not None:
                rest = sample.prompt_top_logprobs[begin + 1 :]
                scored_tops = [None, *top_rows(rest, prompt.top, self._texts)]
            meta["output_top_logprobs"] = top_rows(
                tops, prompt.top, self._texts, sample.log_kept_mass
            )
            meta["input_top_logprobs"] = scored_tops[: len(scored)]
        if prompt.named:
            meta |= self._named_told(prompt, sample, len(ids), len(scored))
        return meta

    def _named_told(
        self, prompt: SglangPrompt, sample: TrainingSample, num_tokens: int, num_scored: int
    ) -> dict[str, Any]:
        """Return the logprobs of the ids that the client named."""
        drawn, scored = sample.token_id_logprobs, sample.prompt_token_id_logprobs
        assert drawn is not None
        drawn = drawn.rows(0, num_tokens)
        tops = [] if scored is None else named_tops(prompt.named, scored)
        first: list[Any] = [None] * min(1, num_scored)
        return {
            "input_token_ids_logprobs": [*first, *top_rows(tops, len(prompt.named), self._texts)],
            "output_token_ids_logprobs": top_rows(
                named_tops(prompt.named, drawn),
                len(prompt.named),
                self._texts,
                sample.log_kept_mass,
            )
            if self._flat is None
            else flat_rows(drawn, self._flat),
        }

    def _correct(self, usage: RequestUsage) -> None:
        """Do not count tokens that were only drawn to score a prompt."""
        if all(prompt.hides for prompt in self._prompts):
            usage.completion_tokens = 0


PROTOCOL = ApiProtocol(
    SglangRequest,
    SglangBuilder,
    operation(
        SglangRequest,
        ANSWER,
        summary="Continue a text or token ids, as SGLang does",
        streams=True,
    ),
)
