"""`POST /generate`, as SGLang's clients speak it.

What is particular to this server:

- `max_new_tokens` left out is all that the context leaves, where SGLang takes 128. `0` scores the
  prompt alone.
- `output_token_logprobs` are SGLang's: after temperature and penalties, before top_k, top_p and
  min_p, as a trainer over the whole vocabulary computes them. `return_sampling_mask` tells what the
  filters kept, and the logprobs of what was sampled from. At temperature 0 they are the model's
  own.
- An aborted request is answered with 200 and what it has.
- A stream's events hold all of the text, the ids and the logprobs so far, as SGLang's do; only the
  last one of a choice tells of weight versions, and of the prompt's logprobs.
- Where a sample is one of several, of a batch or by `n`, answers are a list, and events have an
  `index`.
- `priority`: higher goes first, as with SGLang; the engine's own is the other way round.
- `seed` in `meta_info` makes the same sample again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_inference.budget import Names
from nano_inference.serving.choices import Choice, Piece, TextStyle
from nano_inference.serving.dialects.sglang_answers import (
    Form,
    Wanted,
    full_logprobs,
    meta_info,
    rows,
    top_rows,
)
from nano_inference.serving.dialects.sglang_requests import (
    SAMPLING_UNSUPPORTED,
    UNSUPPORTED,
    GenerateRequest,
    Sampling,
    one_of,
    prompts_of,
)
from nano_inference.serving.errors import ApiError, bad_request, openai_error
from nano_inference.serving.parsing import OutputParser
from nano_inference.serving.protocols.cost import affordable
from nano_inference.serving.protocols.fields import (
    checked_prompt,
    checked_stop,
    need_tokenizer,
    require_at_most,
    require_logprobs,
    require_possible_length,
    room,
    sampling_params,
    version_number,
)
from nano_inference.serving.protocols.interface import Ask, Served, Usage
from nano_inference.serving.protocols.lines import DONE, data_event, encode_line
from nano_inference.serving.protocols.openapi import INTEGER, STRING, list_of, operation, thing
from nano_inference.serving.protocols.pieces import Told
from nano_inference.serving.protocols.reading import read_body, refuse_unsupported
from nano_inference.types import SamplingParams, TrainingSample

_ONE = thing(
    "text",
    "output_ids",
    "meta_info",
    text=STRING,
    output_ids=list_of(INTEGER),
    meta_info={"type": "object"},
)
_ANSWER = {"anyOf": [_ONE, list_of(_ONE)]}


class SGLangGenerate:
    """The protocol."""

    openapi: Mapping[str, Any] = operation(
        GenerateRequest,
        _ANSWER,
        summary="How token ids or a text go on, as SGLang has it",
        streams=True,
    )

    def prepare(self, body: bytes, served: Served, request_id: str) -> "GenerateBuilder":
        """Read a request."""
        return GenerateBuilder(
            read_body(body, GenerateRequest, served.config, UNSUPPORTED), served, request_id
        )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt, the id that its client knows it by, and what is to be told of it."""

    token_ids: list[int]
    request_id: str
    wanted: Wanted


@dataclass(slots=True)
class _Grown:
    """A choice of a stream so far; ids and logprobs as JSON, so that none is encoded twice."""

    text: str = ""
    num_tokens: int = 0
    ids: bytearray = field(default_factory=bytearray)
    rows: bytearray = field(default_factory=bytearray)
    tops: bytearray = field(default_factory=bytearray)


class GenerateBuilder:
    """One request. See `Builder`."""

    make_parser: Callable[[], OutputParser] | None = None
    names: Names = {  # noqa: RUF012 - as `Builder` has it
        "num_samples": "sampling_params.n",
        "max_tokens": "sampling_params.max_new_tokens",
        "top_logprobs": "top_logprobs_num",
        "prompt_top_logprobs": "top_logprobs_num",
    }

    def __init__(self, request: GenerateRequest, served: Served, request_id: str) -> None:
        self.served = served
        self.request = request
        self.stream = bool(request.stream)
        self._started = time.perf_counter()
        names_tokens = bool(request.return_text_in_logprobs)
        if names_tokens:
            need_tokenizer(served)
        self._form = Form(
            served.token_texts if names_tokens else None,
            request.flat_logprobs,
            served.version_name,
            not served.config.hide_cached_tokens,
        )
        version = request.weight_version
        self._min_version = version and version_number(
            version.min_version, served, "weight_version.min_version"
        )
        self._exact_version = version and version_number(
            version.exact_version, served, "weight_version.exact_version"
        )
        given, is_batch = prompts_of(request)
        samplings = [self._sampling(place, len(given)) for place in range(len(given))]
        self.num_samples = samplings[0].n or 1
        if any((each.n or 1) != self.num_samples for each in samplings):
            raise bad_request(
                "sampling_params.n must be the same for all prompts.", "sampling_params.n"
            )
        require_at_most(
            len(given) * self.num_samples,
            served.config.max_samples,
            "sampling_params.n",
            "n times the prompts",
        )
        self._is_list = is_batch or self.num_samples > 1
        self._prompts = [
            self._prompt(prompt, samplings[place], place, len(given), request_id)
            for place, prompt in enumerate(given)
        ]
        asks = (
            self._ask(prompt, samplings[place], place) for place, prompt in enumerate(self._prompts)
        )
        self.asks: Sequence[Ask] = affordable(asks, served, self.names)
        self._grown: dict[int, _Grown] = {}

    # -- the request -------------------------------------------------------------------------------

    def _sampling(self, place: int, count: int) -> Sampling:
        given = self.request.sampling_params
        sampling = (
            given if isinstance(given, Sampling) else one_of(given, place, count, "sampling_params")
        )
        sampling = sampling if sampling is not None else Sampling.model_validate({})
        refuse_unsupported(sampling.model_extra or {}, SAMPLING_UNSUPPORTED, "sampling_params")
        return sampling

    def _prompt(
        self, given: Any, sampling: Sampling, place: int, count: int, request_id: str
    ) -> _Prompt:
        token_ids = self._read(given)
        names = self.request.rid
        name = one_of(names, place, count, "rid") or request_id
        if count > 1 and (names is None or len(names) == 1):
            name = f"{name}_{place}"  # as SGLang makes one name many
        return _Prompt(token_ids, name, self._wanted(token_ids, sampling, place, count))

    def _read(self, given: str | list[int]) -> list[int]:
        if isinstance(given, list):
            return checked_prompt(given, self.served, "input_ids")
        require_possible_length(given, self.served, "text")
        return checked_prompt(
            need_tokenizer(self.served).encode(given, add_special_tokens=True), self.served, "text"
        )

    def _wanted(self, token_ids: list[int], sampling: Sampling, place: int, count: int) -> Wanted:
        request = self.request
        logprobs = bool(one_of(request.return_logprob, place, count, "return_logprob"))
        start = one_of(request.logprob_start_len, place, count, "logprob_start_len")
        if start is not None and start >= len(token_ids):
            raise bad_request(
                f"logprob_start_len is {start}, and the prompt has {len(token_ids)} tokens.",
                "logprob_start_len",
            )
        top = max(0, one_of(request.top_logprobs_num, place, count, "top_logprobs_num") or 0)
        require_logprobs(top, self.served, "top_logprobs_num")
        custom = sampling.custom_params
        return Wanted(
            logprobs=logprobs,
            scored_from=start if logprobs and start is not None and start >= 0 else None,
            top=top if logprobs else 0,
            mask=bool(one_of(request.return_sampling_mask, place, count, "return_sampling_mask")),
            flat_mask=custom is not None and bool(custom.return_top_p_token_ids),
            raw_logprobs=bool(sampling.raw_logprobs),
            hides=sampling.max_new_tokens == 0,
        )

    def _ask(self, prompt: _Prompt, sampling: Sampling, place: int) -> Ask:
        wanted = prompt.wanted
        return Ask(
            prompt.token_ids,
            self._params(prompt, sampling, place),
            self.num_samples,
            # The prompt's scores, and masks, come with the whole sample.
            stream=wanted.scored_from is None
            and not (wanted.hides or wanted.mask or wanted.flat_mask),
            client_id=prompt.request_id,
            unique=self.request.rid is not None,
            num_wanted=self.request.n_wanted,
            min_version=self._min_version,
            exact_version=self._exact_version,
            text=TextStyle(
                special_tokens=sampling.skip_special_tokens is False,
                stop=bool(sampling.no_stop_trim),
            ),
            repeats_prompt=wanted.scored_from is not None
            or bool(self.request.return_prompt_token_ids),
        )

    def _params(self, prompt: _Prompt, sampling: Sampling, place: int) -> SamplingParams:
        wanted, request = prompt.wanted, self.request
        asked = 1 if wanted.hides else sampling.max_new_tokens
        more: dict[str, Any] = {"top_logprobs": wanted.top}
        if wanted.scored_from is not None:
            more |= {"prompt_logprobs": True, "prompt_top_logprobs": wanted.top}
        if sampling.temperature is not None:
            more["temperature"] = sampling.temperature
        said: dict[str, Any] = {
            "seed": sampling.sampling_seed,
            "min_tokens": sampling.min_new_tokens,
            "cache_salt": one_of(request.extra_key, place, len(self._prompts), "extra_key"),
            "priority": None if request.priority is None else -request.priority,
        }
        if wanted.mask or wanted.flat_mask:
            said["sampling_mask"] = True
        return sampling_params(
            sampling.model_copy(
                update={name: value for name, value in said.items() if value is not None}
            ),
            self.served,
            max_tokens=room(prompt.token_ids, asked, self.served, None, "max_new_tokens"),
            stop=checked_stop(sampling.stop, self.served, "sampling_params.stop"),
            **more,
        )

    # -- a stream ----------------------------------------------------------------------------------

    def start(self, usage: Usage) -> bytes:
        """Nothing comes before the first tokens."""
        return b""

    def chunk(self, piece: Piece, usage: Usage) -> bytes:
        """All of a choice so far; the end of it in full."""
        prompt = self._prompts[piece.index // self.num_samples]
        grown = self._grown.get(piece.index)
        if grown is None:
            grown = self._grown[piece.index] = _Grown()
        self._grow(grown, piece, prompt.wanted)
        if piece.finished is not None:
            return data_event(self._told(piece.index, piece.finished, grown.text))
        return b"" if not piece.token_ids else self._growing(grown, piece.index, prompt)

    def _grow(self, grown: _Grown, piece: Piece, wanted: Wanted) -> None:
        new = piece.token_ids
        grown.text += piece.content
        if piece.finished is not None:
            return
        grown.num_tokens += len(new)
        _extend(grown.ids, new)
        if wanted.logprobs:
            values = full_logprobs(piece.logprobs, piece.log_kept_mass)
            _extend(
                grown.rows,
                rows(values, new, self._form.texts) if self._form.flat is None else values,
            )
            if wanted.top:
                tops = top_rows(
                    piece.top_logprobs or (), wanted.top, self._form.texts, piece.log_kept_mass
                )
                _extend(grown.tops, tops)

    def _growing(self, grown: _Grown, index: int, prompt: _Prompt) -> bytes:
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
        if prompt.wanted.logprobs:
            # Base64 cannot grow; whoever wants it reads the last event.
            name = b"output_token_logprobs" if self._form.flat is None else b"token_logprobs"
            if self._form.flat != "base64":
                parts += [b',"', name, b'":[', grown.rows, b"]"]
            if prompt.wanted.top:
                parts += [b',"output_top_logprobs":[', grown.tops, b"]"]
        parts.append(b'},"index":%d}\n\n' % index if self._is_list else b"}}\n\n")
        return b"".join(parts)

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The end's mark."""
        self._correct(usage)
        return DONE

    def failure(self, problem: ApiError) -> bytes:
        """What went wrong, and the end's mark."""
        return data_event(openai_error(problem)) + DONE

    # -- the answer as a whole ---------------------------------------------------------------------

    def response(self, choices: Sequence[Choice], usage: Usage) -> Any:
        """One object, or a list of them for a batch or several samples."""
        self._correct(usage)
        told = (
            self._told(choice.index, choice.finished, choice.content)
            for choice in choices
            if choice.finished is not None
        )
        return Told(told) if self._is_list else next(told)

    # -- parts -------------------------------------------------------------------------------------

    def _told(self, index: int, sample: TrainingSample, text: str) -> dict[str, Any]:
        """A choice in full."""
        prompt = self._prompts[index // self.num_samples]
        wanted = prompt.wanted
        seconds = time.perf_counter() - self._started
        told: dict[str, Any] = {
            "text": "" if wanted.hides else text,
            "output_ids": () if wanted.hides else sample.completion_tokens,
            "meta_info": meta_info(prompt.request_id, sample, wanted, self._form, seconds),
        }
        if self.request.return_prompt_token_ids:
            told["prompt_token_ids"] = prompt.token_ids
        if self.stream and self._is_list:
            told["index"] = index
        return told

    def _correct(self, usage: Usage) -> None:
        """Tokens that nobody asked for are not told of."""
        if all(prompt.wanted.hides for prompt in self._prompts):
            usage.completion_tokens = 0


def _extend(array: bytearray, values: Sequence[Any]) -> None:
    """Put values behind those in an array of JSON, which stands without its brackets."""
    if values:
        if array:
            array += b","
        array += encode_line(values)[1:-1]
