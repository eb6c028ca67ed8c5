"""`POST /v1/completions`: continues text or token ids. Names of special tokens in a prompt's text
become special tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.server.api.openai.completions_request import CompletionAsked, TextPrompt
from nano_inference.server.api.openai.models import (
    COMPLETION,
    CompletionRequest,
)
from nano_inference.server.api.shared.answers import (
    LazyArray,
    at_least,
    flat,
    npy_of,
    own_first,
    routed_experts_told,
)
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.api.shared.protocol import ApiProtocol, RequestUsage, Served
from nano_inference.text.token_texts import Offsets
from nano_inference.types import TopLogprobs

_Rows = dict[str, list[Any]]


class CompletionBuilder(CompletionAsked):
    """One request for completions."""

    def __init__(self, request: CompletionRequest, served: Served, request_id: str) -> None:
        super().__init__(request, served, request_id)
        self._plain = not (
            self.logprobs is not None
            or request.flat_logprobs is not None
            or request.return_token_ids
            or request.raw_logprobs
            or self.continuous_usage
        )
        self._offsets: dict[int, Offsets] = {}  # by choice
        self._told_prompts: set[int] = set()  # choices whose stream has had the prompt's ids

    # -- a stream ----------------------------------------------------------------------------------

    def start(self, usage: RequestUsage) -> bytes:
        """Return events with the prompts, if they are to be echoed without scores."""
        if not self.echo or self.logprobs is not None or self._hides:
            return b""
        return b"".join(
            self.event(self._choice(index, self._echo_of(index), None), usage)
            for index in range(len(self.asks) * self.num_samples)
        )

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """Return an event with new text, which is empty only if another value is new."""
        if self._plain and piece.finished is None:
            if not piece.content:
                return b""
            return self.text_event(piece.index, piece.content)
        if not piece.token_ids and piece.finished is None:
            return b""
        text = "" if self._hides else piece.content
        if self.echo and (self.logprobs is not None or self._hides):
            text = self._echo_of(piece.index) + text
        self._correct(usage)
        return self.event(self._whole(piece, text), usage)

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """Return a choice with new text and no other values."""
        return self._choice(index, text, None)

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """Return the usage, if the client asked for it, and the end of the stream."""
        self._correct(usage)
        return super().end(choices, usage)

    # -- the answer as a whole ---------------------------------------------------------------------

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Mapping[str, Any]:
        """Return the whole answer."""
        self._correct(usage)
        return self.head | {
            "choices": LazyArray(map(self._finished, choices)),
            "usage": self.usage_of(usage),
            **self.without_nulls({"kv_transfer_params": None}),
        }

    def _finished(self, choice: Choice) -> dict[str, Any]:
        text = "" if self._hides else choice.content
        text = self._echo_of(choice.index) + text if self.echo else text
        return self.without_nulls(self._whole(choice.whole, text))

    # -- parts -------------------------------------------------------------------------------------

    def _correct(self, usage: RequestUsage) -> None:
        if self._hides:
            usage.completion_tokens = 0

    def _prompt_of(self, index: int) -> TextPrompt:
        return self._prompts[index // self.num_samples]

    def _echo_of(self, index: int) -> str:
        """Return the prompt as text."""
        prompt = self._prompt_of(index)
        if prompt.text is not None:
            return prompt.text
        tokenizer = self.served.tokenizer
        return (
            ""
            if tokenizer is None
            else tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        )

    def _choice(self, index: int, text: str, logprobs: object) -> dict[str, Any]:
        tells = self.request.return_token_ids and index not in self._told_prompts
        self._told_prompts.add(index)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
            "prompt_token_ids": self._prompt_of(index).token_ids if tells else None,
            "token_ids": None,
        }

    def _whole(self, piece: ChoiceDelta, text: str) -> dict[str, Any]:
        """Return a choice with all values that the client asked for."""
        sample, request = piece.finished, self.request
        shows = 0 if self._hides else len(piece.token_ids)
        fields = self._choice(
            piece.index, text, None if request.flat_logprobs else self._logprobs(piece)
        )
        if request.return_token_ids or request.flat_logprobs:
            fields["token_ids"] = piece.token_ids[:shows]
        if request.flat_logprobs:
            fields["token_logprobs"] = flat(piece.logprobs[:shows], request.flat_logprobs)
        if request.raw_logprobs:
            fields["raw_logprobs"] = [at_least(each) for each in (piece.raw_logprobs or ())[:shows]]
        if sample is not None:
            fields["finish_reason"] = "length" if self._hides else sample.finish_reason
            fields |= self.ending(sample)
            if self._hides:
                fields["stop_reason"] = None
                fields.pop("receipt", None)  # it shows the completion
            fields["prompt_logprobs"] = (
                None if request.prompt_logprobs is None else self.prompt_logprobs(sample)
            )
            if self._hides:
                fields |= routed_experts_told(sample, npy_of, hides=True)
            fields.setdefault("routed_experts", None)
        return fields

    def _logprobs(self, piece: ChoiceDelta) -> dict[str, Any] | None:
        """Return the logprobs in OpenAI's older format: four parallel lists."""
        if self.logprobs is None:
            return None
        rows: _Rows = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        offsets = self._offsets.get(piece.index)
        if offsets is None:
            offsets = self._offsets[piece.index] = self._begin(piece, rows)
        if not self._hides:
            count = len(self.request.logprob_token_ids or ()) or self.logprobs
            self._add(rows, piece.token_ids, piece.logprobs, self.tops_of(piece), count)
            rows["text_offset"] += offsets.push(piece.token_ids)
        return rows

    def _begin(self, piece: ChoiceDelta, rows: _Rows) -> Offsets:
        """Return the offsets from the beginning of a choice. With `echo` the rows get the prompt's
        tokens first.
        """
        assert self.texts is not None
        sample = piece.finished
        if not self.echo or sample is None:
            return self._new_offsets(0)
        assert sample.prompt_logprobs is not None
        tops = sample.prompt_top_logprobs or (TopLogprobs((), ()),) * len(sample.prompt_tokens)
        self._add(rows, sample.prompt_tokens, sample.prompt_logprobs, tops, self.logprobs)
        rows["token_logprobs"][0] = rows["top_logprobs"][0] = None
        text = self._prompt_of(piece.index).text
        offsets = Offsets(self.texts, shown=text, special_tokens=text is None)
        rows["text_offset"] += offsets.push(sample.prompt_tokens)
        return self._new_offsets(len(self._echo_of(piece.index)))

    def _new_offsets(self, start: int) -> Offsets:
        assert self.texts is not None
        return Offsets(
            self.texts, start=start, special_tokens=self.request.skip_special_tokens is False
        )

    def _add(
        self,
        rows: _Rows,
        ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopLogprobs],
        count: int | None,
    ) -> None:
        for token_id, logprob, top in zip(ids, logprobs, tops, strict=True):
            name = self.token_text(token_id)
            rows["tokens"].append(name)
            rows["token_logprobs"].append(at_least(logprob))
            best = TopLogprobs(top.token_ids[:count], top.logprobs[:count])
            row: dict[str, float] = {}
            for candidate, score, _ in own_first(token_id, logprob, best):
                row.setdefault(self.token_text(candidate), at_least(score))
            rows["top_logprobs"].append(row)


PROTOCOL = ApiProtocol(
    CompletionRequest,
    CompletionBuilder,
    operation(CompletionRequest, COMPLETION, summary="Continue a text", streams=True),
)
