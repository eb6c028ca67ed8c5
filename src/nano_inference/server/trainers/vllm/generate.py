"""`POST /inference/v1/generate`: vLLM's route of tokens in and tokens out, by which renderers and
verifiers sample.

Beside what vLLM 0.32 answers, an entry of `logprobs.content` has a `token`, "token_id:7", as older
servers said it, and a choice has `seed` and `weight_version`. In a stream the mask comes with the
last piece of a choice, for all tokens.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from nano_inference.core.budget import Names
from nano_inference.server.api.openai.answers import stop_reason, usage_told, usage_wanted
from nano_inference.server.api.openai.models import StreamOptions, VersionName, Wanted
from nano_inference.server.api.parsing import AT_ONCE
from nano_inference.server.api.shared.answers import (
    DONE,
    Entry,
    Flat,
    LazyArray,
    at_least,
    data_event,
    entries,
    flat,
    npy_of,
    prompt_rows,
    routed_experts_told,
    version_spans,
)
from nano_inference.server.api.shared.asks import ApiProtocol, Ask, Builder, RequestUsage, Served
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta, TextStyle
from nano_inference.server.api.shared.fields import (
    MOST,
    GrammarFields,
    OneOrMany,
    SamplingFields,
    Strict,
    check_part,
)
from nano_inference.server.api.shared.openapi import INTEGER, STRING, list_of, operation, thing
from nano_inference.server.api.shared.prompts import (
    adapter_of,
    behind_reasoning,
    checked_prompt,
    need_tokenizer,
    require_at_most,
    room,
)
from nano_inference.server.api.shared.sampling import (
    checked_stop,
    require_logprobs,
    sampling_params,
    version_number,
)
from nano_inference.server.errors import bad_request, shown
from nano_inference.types import Limits, SamplingParams, TrainingSample


class VllmSampling(SamplingFields):
    """`sampling_params`: vLLM's names, and the engine's own."""

    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    seed: Annotated[
        int | None,
        Field(ge=-(2**63), lt=2**64),
        BeforeValidator(lambda seed: None if seed == -1 else seed),  # vLLM's word for none
    ] = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="by default all that is left"
    )
    stop: OneOrMany | None = None
    logprobs: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(
        None,
        description="candidates of each token, the token itself being the first; -1: all there are",
    )
    prompt_logprobs: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    return_sampling_mask: bool | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        None, description="first token of the prompt whose experts are told"
    )
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # How vLLM is to make and hand over its results, which has no counterpart here, or changes
    # nothing.
    ignored = (
        *("detokenize", "output_kind", "stream_interval", "skip_clone"),
        "spaces_between_special_tokens",
    )
    refused = SamplingFields.refused | {
        "flat_logprobs": (False,),
        "extra_args": ({},),
        "prompt_logprob_token_ids": (),
        "prompt_logprob_start": (0,),
        "repetition_detection": (),
        "skip_reading_prefix_cache": (False,),
        "trace_decode_token_ids": ([],),
        "watermarking": (False,),
    }


class VllmRequest(Strict):
    """The body of `POST /inference/v1/generate`."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    # Checked by hand: pydantic would look at each of a hundred thousand ids.
    token_ids: Annotated[
        Any,
        WithJsonSchema(
            {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
        ),
    ]
    sampling_params: VllmSampling | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    return_token_ids: bool | None = Field(None, description="the prompt's too")
    output_mode: Literal["tokens", "text"] | None = None
    flat_logprobs: Flat | None = Field(
        None, description="token_logprobs alone: a list, or base64 of float32"
    )
    n_wanted: Wanted = None
    min_weight_version: VersionName = None
    reasoning_ended: bool | None = Field(
        None, description="false: a grammar begins behind the reasoning"
    )
    ignored = ("token_offsets", "reasoning_parser_kwargs")
    refused: ClassVar[dict[str, Sequence[Any]]] = {
        "features": (),
        "content_parts": ([],),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    }
    elsewhere = dict.fromkeys(GrammarFields.model_fields, "put it into sampling_params.")


class VllmBuilder(Builder):
    """One request."""

    names: ClassVar[Names] = {
        "num_samples": "sampling_params.n",
        "max_tokens": "sampling_params.max_tokens",
        "top_logprobs": "sampling_params.logprobs",
        "prompt_top_logprobs": "sampling_params.prompt_logprobs",
    }

    def __init__(self, request: VllmRequest, served: Served, request_id: str) -> None:
        self._adapter = adapter_of(request.model, served)
        self._served = served
        self._request = request
        self._sampling = sampling = request.sampling_params or VllmSampling.model_validate({})
        check_part(sampling, "sampling_params")
        self._request_id = request.request_id or request_id
        self._created = int(time.time())
        self.stream = bool(request.stream)
        self._tells_usage, self._tells_usage_always = usage_wanted(
            request.stream_options, stream=self.stream
        )
        self._tells_text = request.output_mode == "text"
        if self._tells_text:
            need_tokenizer(served)
        num_samples = sampling.n or 1
        require_at_most(num_samples, served.config.max_samples, "sampling_params.n")
        self._num_logprobs = self._count(sampling.logprobs, "sampling_params.logprobs")
        self._num_prompt_logprobs = self._count(
            sampling.prompt_logprobs, "sampling_params.prompt_logprobs"
        )
        if not isinstance(request.token_ids, list):
            raise bad_request(
                f"token_ids must be a list of token ids, not {shown(request.token_ids)}.",
                "token_ids",
            )
        self._prompt = checked_prompt(request.token_ids, served, "token_ids")
        self.asks = [
            Ask(
                self._prompt,
                self._params(),
                num_samples,
                stream=self._num_prompt_logprobs is None,  # they come with the whole sample
                client_id=request.request_id,
                limits=Limits(
                    num_wanted=request.n_wanted,
                    min_version=version_number(
                        request.min_weight_version, served, "min_weight_version"
                    ),
                ),
                detokenize=self._tells_text,
                text=TextStyle(
                    sampling.skip_special_tokens is False, bool(sampling.include_stop_str_in_output)
                ),
                experts_by_default=sampling.routed_experts is None
                and sampling.routed_experts_prompt_start is None,
            )
        ]
        self._begun = False

    def _count(self, asked: int | None, name: str) -> int | None:
        """How many candidates to tell; -1 is all that the server tells."""
        if asked is None or asked >= 0:
            require_logprobs(asked or 0, self._served, name)
            return asked
        most = self._served.config.max_logprobs
        return self._served.engine.vocab_size if most < 0 else most

    def _params(self) -> SamplingParams:
        request, sampling = self._request, self._sampling
        max_tokens = room(
            self._prompt, sampling.max_tokens, self._served, None, "sampling_params.max_tokens"
        )
        top = self._num_logprobs or 0
        return sampling_params(
            sampling,
            self._served,
            max_tokens=max_tokens,
            stop=checked_stop(sampling.stop, self._served, "sampling_params.stop"),
            top_logprobs=top if top > 1 else 0,  # the first candidate is the token itself
            scored_prompt=self._num_prompt_logprobs,
            renamed={
                "cache_salt": request.cache_salt,
                "priority": request.priority,
                "sampling_mask": sampling.return_sampling_mask or None,
                "adapter": self._adapter,
                "routed_experts": self._routed_experts(),
            },
            within="sampling_params.",
            behind=behind_reasoning(self._prompt, self._served, parsed=False)
            if request.reasoning_ended is False
            else AT_ONCE,
        )

    def _routed_experts(self) -> bool | None:
        """Whether experts are told: where there is a record of them and they may cost that much, as
        with vLLM not in a stream, unless the request says otherwise.
        """
        start = self._sampling.routed_experts_prompt_start
        if start is not None and start > len(self._prompt):
            raise bad_request(
                f"routed_experts_prompt_start is {start}, and the prompt has {len(self._prompt)} "
                "tokens.",
                "sampling_params.routed_experts_prompt_start",
            )
        if self._sampling.routed_experts is not None:
            return self._sampling.routed_experts
        return (self._served.engine.experts_per_token > 0 and not self.stream) or None

    # -- a stream ----------------------------------------------------------------------------------

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """New tokens, and at last why it ended."""
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
        if piece.finished is not None and self._num_prompt_logprobs is not None:
            event["prompt_logprobs"] = self._prompt_logprobs(piece.finished)
        return data_event(event)

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """The usage, if it is wanted, and the end's mark."""
        if not self._tells_usage:
            return DONE
        return (
            data_event(self._head() | {"choices": [], "usage": usage_told(usage, self._served)})
            + DONE
        )

    # -- the answer as a whole ---------------------------------------------------------------------

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Mapping[str, Any]:
        """The answer."""
        told = self._head() | {
            "model": self._adapter or self._served.name,
            "created": self._created,
            "choices": LazyArray(self._choice(choice.whole, choice.content) for choice in choices),
            "usage": usage_told(usage, self._served),
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt if self._request.return_token_ids else None,
            "kv_transfer_params": None,
        }
        first = choices[0].finished
        if self._num_prompt_logprobs is not None and first is not None:
            told["prompt_logprobs"] = self._prompt_logprobs(first)
        return told

    # -- parts -------------------------------------------------------------------------------------

    def _head(self) -> dict[str, Any]:
        return {
            "request_id": self._request_id,
            "output_mode": "text" if self._tells_text else "tokens",
        }

    def _prompt_logprobs(self, sample: TrainingSample) -> LazyArray:
        return prompt_rows(sample, self._name, self._num_prompt_logprobs)

    def _choice(self, piece: ChoiceDelta, text: str) -> dict[str, Any]:
        told: dict[str, Any] = {"index": piece.index}
        if self._tells_text:
            told["text"] = text
        told |= {
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": piece.token_ids,
            "logprobs": None,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
        }
        if self._request.flat_logprobs is not None:
            told["token_logprobs"] = flat(piece.logprobs, self._request.flat_logprobs)
        elif self._num_logprobs is not None:
            told["logprobs"] = {"content": self._content(piece)}
        if self._sampling.raw_logprobs:
            told["raw_logprobs"] = flat(
                piece.raw_logprobs or (), self._request.flat_logprobs or "list"
            )
        return told if piece.finished is None else told | self._ending(piece.finished)

    def _ending(self, sample: TrainingSample) -> dict[str, Any]:
        name = self._served.version_name
        told: dict[str, Any] = {
            "finish_reason": sample.finish_reason,
            "stop_reason": stop_reason(sample, self._served, self._sampling.stop_token_ids),
            "weight_versions": version_spans(sample.weight_versions, name),
            "weight_version": name(sample.weight_version),
            "seed": sample.seed,
        }
        if sample.sampling_mask is not None:
            told["sampling_mask"] = sample.sampling_mask.rows()
        start = self._sampling.routed_experts_prompt_start or 0
        told |= routed_experts_told(sample, npy_of, start)
        if sample.log_kept_mass is not None and self._sampling.raw_logprobs:
            told["log_kept_mass"] = flat(
                sample.log_kept_mass, self._request.flat_logprobs or "list"
            )
        return told

    def _content(self, piece: ChoiceDelta) -> list[Entry] | list[dict[str, Any]]:
        count = self._num_logprobs or 0
        told = entries(piece.token_ids, piece.logprobs, piece.top_logprobs, count)
        return [self._in_words(each) for each in told] if self._tells_text else told

    def _in_words(self, entry: Entry) -> dict[str, Any]:
        """As OpenAI's clients read it, which `output_mode: "text"` is for."""
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
    operation(VllmRequest, _ANSWER, summary="Tokens in, tokens out", streams=True),
)
