"""`POST /inference/v1/generate`: vLLM's route from tokens to tokens, used by renderers and
verifiers.

Replies are those of vLLM 0.32, with additions. An entry of `logprobs.content` has a `token`,
"token_id:7", as in older servers. A choice has `seed` and `weight_version`. In a stream, the mask
for all tokens comes with a choice's last piece.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.server.api.openai.answer import stop_reason, usage_told
from nano_inference.server.api.shared.answers import (
    DONE,
    Entry,
    LazyArray,
    at_least,
    data_event,
    entries,
    flat,
    flat_rows,
    named_entries,
    named_tops,
    npy_of,
    npy_of_logprobs,
    prompt_rows,
    receipt_told,
    routed_experts_told,
    version_spans,
)
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta
from nano_inference.server.api.shared.openapi import INTEGER, STRING, list_of, operation, thing
from nano_inference.server.api.shared.protocol import ApiProtocol, RequestUsage, Served
from nano_inference.server.trainers.vllm.models import VllmRequest
from nano_inference.server.trainers.vllm.request import VllmAsked
from nano_inference.types import TrainingSample


class VllmBuilder(VllmAsked):
    """Builder of one request's answer in vLLM's format."""

    def __init__(self, request: VllmRequest, served: Served, request_id: str) -> None:
        super().__init__(request, served, request_id)
        self._begun = False

    # -- a stream ----------------------------------------------------------------------------------

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """Return the event with new tokens, and at last with the finish reason."""
        if (
            not piece.token_ids
            and piece.finished is None
            and not (self._tells_text and piece.content)
        ):
            return b""
        event: dict[str, Any] = self._head()
        if self._request.return_token_ids and not self._begun:
            event["prompt_token_ids"] = self._prompt
        self._begun = True
        event["choices"] = [self._choice(piece, piece.content)]
        event["usage"] = usage_told(usage, self._served) if self._tells_usage_always else None
        if piece.finished is not None and self._scores_prompt:
            event |= self._of_prompt(piece.finished)
        return data_event(event)

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """Return the usage, if requested, and the mark of the stream's end."""
        if not self._tells_usage:
            return DONE
        return (
            data_event(self._head() | {"choices": [], "usage": usage_told(usage, self._served)})
            + DONE
        )

    # -- the answer as a whole ---------------------------------------------------------------------

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Mapping[str, Any]:
        """Return the whole answer."""
        reply = self._head() | {
            "model": self._adapter or self._served.name,
            "created": self._created,
            "choices": LazyArray(self._choice(choice.whole, choice.content) for choice in choices),
            "usage": usage_told(usage, self._served),
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt if self._request.return_token_ids else None,
            "kv_transfer_params": None,
        }
        first = choices[0].finished
        if self._scores_prompt and first is not None:
            reply |= self._of_prompt(first)
        return reply

    # -- parts -------------------------------------------------------------------------------------

    def _head(self) -> dict[str, Any]:
        return {
            "request_id": self._request_id,
            "output_mode": "text" if self._tells_text else "tokens",
        }

    def _of_prompt(self, sample: TrainingSample) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._num_prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_rows(sample, self._name, self._num_prompt_logprobs)
        if sample.prompt_token_id_logprobs is not None:
            named = npy_of_logprobs(sample.prompt_token_id_logprobs)
            fields["prompt_token_id_logprobs"] = named
        return fields

    def _choice(self, piece: ChoiceDelta, text: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.index}
        if self._tells_text:
            choice["text"] = text
        choice |= {
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": piece.token_ids,
            "logprobs": None,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
        }
        if self._request.flat_logprobs is not None:
            choice["token_logprobs"] = flat(piece.logprobs, self._request.flat_logprobs)
            if piece.token_id_logprobs is not None:
                named = flat_rows(piece.token_id_logprobs, self._request.flat_logprobs)
                choice["token_id_logprobs"] = named
        elif self._num_logprobs is not None or self._named:
            choice["logprobs"] = {"content": self._content(piece)}
        if self._sampling.raw_logprobs:
            choice["raw_logprobs"] = flat(
                piece.raw_logprobs or (), self._request.flat_logprobs or "list"
            )
        return choice if piece.finished is None else choice | self._ending(piece.finished)

    def _ending(self, sample: TrainingSample) -> dict[str, Any]:
        name = self._served.version_name
        ending: dict[str, Any] = {
            "finish_reason": sample.finish_reason,
            "stop_reason": stop_reason(sample, self._served, self._sampling.stop_token_ids),
            "weight_versions": version_spans(sample.weight_versions, name),
            "weight_version": name(sample.weight_version),
            "seed": sample.seed,
        }
        if sample.sampling_mask is not None:
            ending["sampling_mask"] = sample.sampling_mask.rows()
        start = self._sampling.routed_experts_prompt_start or 0
        ending |= routed_experts_told(sample, npy_of, start)
        ending |= receipt_told(sample, hides_cached=self._served.config.hide_cached_tokens)
        if sample.log_kept_mass is not None and self._sampling.raw_logprobs:
            ending["log_kept_mass"] = flat(
                sample.log_kept_mass, self._request.flat_logprobs or "list"
            )
        return ending

    def _content(self, piece: ChoiceDelta) -> list[Entry] | list[dict[str, Any]]:
        count = self._num_logprobs or 0
        if piece.token_id_logprobs is None:
            rows = entries(piece.token_ids, piece.logprobs, piece.top_logprobs, count)
        else:
            tops = named_tops(self._named, piece.token_id_logprobs)
            rows = named_entries(piece.token_ids, piece.logprobs, tops)
        return [self._in_words(each) for each in rows] if self._tells_text else rows

    def _in_words(self, entry: Entry) -> dict[str, Any]:
        """Convert an entry to OpenAI's format, for `output_mode: "text"`."""
        tops = [self._word(each.token_id, each.logprob) for each in entry.top_logprobs]
        return self._word(entry.token_id, entry.logprob) | {
            "token_id": entry.token_id,
            "top_logprobs": tops,
        }

    def _word(self, token_id: int, logprob: float) -> dict[str, Any]:
        texts = self._served.token_texts
        data = b"" if texts is None else texts.bytes_of(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": at_least(logprob),
            "bytes": list(data),
        }

    def _name(self, token_id: int) -> str | None:
        texts = self._served.token_texts
        return None if texts is None else texts.text(token_id)


_CHOICE = thing("index", "finish_reason", "token_ids", index=INTEGER, token_ids=list_of(INTEGER))
_ANSWER = thing("request_id", "choices", "usage", request_id=STRING, choices=list_of(_CHOICE))
PROTOCOL = ApiProtocol(
    VllmRequest,
    VllmBuilder,
    operation(VllmRequest, _ANSWER, summary="Generate token ids from token ids", streams=True),
)
