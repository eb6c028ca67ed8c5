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
from collections.abc import Sequence
from typing import Any, ClassVar

from nano_inference.core.budget import Names
from nano_inference.server.api.parsing import AT_ONCE
from nano_inference.server.api.shared.answers import (
    DONE,
    Flat,
    LazyArray,
    data_event,
    encode_line,
    flat,
    int32_of,
    routed_experts_told,
    version_spans,
)
from nano_inference.server.api.shared.asks import (
    ApiProtocol,
    Ask,
    Builder,
    RequestUsage,
    Served,
    affordable,
)
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta, TextStyle
from nano_inference.server.api.shared.fields import (
    check_part,
)
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.api.shared.prompts import (
    behind_reasoning,
    checked_prompt,
    need_tokenizer,
    require_at_most,
    require_possible_length,
    room,
    too_long,
)
from nano_inference.server.api.shared.sampling import (
    checked_stop,
    require_logprobs,
    require_routed_experts,
    sampling_params,
    version_number,
)
from nano_inference.server.errors import ApiError, bad_request, shown
from nano_inference.server.trainers.sglang.models import (
    SglangRequest,
    SglangSampling,
    WantedVersion,
    one_of,
    prompts_of,
)
from nano_inference.server.trainers.sglang.results import (
    ANSWER,
    Grown,
    SglangPrompt,
    extend,
    finish_reason,
    finite,
    full_logprobs,
    masks_of,
    rows,
    top_rows,
)
from nano_inference.types import Limits, SamplingParams, TrainingSample


class SglangBuilder(Builder):
    """One request. See `Builder`."""

    names: ClassVar[Names] = {
        "num_samples": "sampling_params.n",
        "max_tokens": "sampling_params.max_new_tokens",
        "top_logprobs": "top_logprobs_num",
        "prompt_top_logprobs": "top_logprobs_num",
    }

    def __init__(self, request: SglangRequest, served: Served, request_id: str) -> None:
        self.served = served
        self.request = request
        self.stream = bool(request.stream)
        self._started = time.perf_counter()
        names_tokens = bool(request.return_text_in_logprobs)
        if names_tokens:
            need_tokenizer(served)
        self._texts = served.token_texts if names_tokens else None  # where logprobs name tokens
        self._flat: Flat | None = request.flat_logprobs  # numbers instead of rows
        wanted = request.weight_version or WantedVersion.model_validate({})
        self._limits = Limits(
            num_wanted=request.n_wanted,
            min_version=version_number(wanted.min_version, served, "weight_version.min_version"),
            exact_version=version_number(
                wanted.exact_version, served, "weight_version.exact_version"
            ),
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
        self.asks = affordable(asks, served, self.names)
        self._grown: dict[int, Grown] = {}

    # -- the request -------------------------------------------------------------------------------

    def _sampling(self, place: int, count: int) -> SglangSampling:
        given = self.request.sampling_params
        sampling = (
            given
            if isinstance(given, SglangSampling)
            else one_of(given, place, count, "sampling_params")
        )
        sampling = sampling if sampling is not None else SglangSampling.model_validate({})
        check_part(sampling, "sampling_params")
        return sampling

    def _read(self, given: str | list[int]) -> list[int]:
        if isinstance(given, list):
            return checked_prompt(given, self.served, "input_ids", least=0)
        require_possible_length(given, self.served, "text")
        token_ids = need_tokenizer(self.served).encode(given, add_special_tokens=True)
        return checked_prompt(token_ids, self.served, "text", least=0)

    def _prompt(
        self, given: Any, sampling: SglangSampling, place: int, count: int, request_id: str
    ) -> SglangPrompt:
        request, token_ids = self.request, self._read(given)
        name = one_of(request.rid, place, count, "rid") or request_id
        if count > 1 and (request.rid is None or len(request.rid) == 1):
            name = f"{name}_{place}"  # as SGLang makes one name many
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
        return SglangPrompt(
            token_ids,
            name,
            logprobs=logprobs,
            scored_from=start if logprobs and start is not None and start >= 0 else None,
            top=top if logprobs else 0,
            mask=bool(one_of(request.return_sampling_mask, place, count, "return_sampling_mask")),
            flat_mask=custom is not None and bool(custom.return_top_p_token_ids),
            raw_logprobs=bool(sampling.raw_logprobs),
            experts_from=self._experts_from(sampling, place, count, len(token_ids)),
            hides=sampling.max_new_tokens == 0,
        )

    def _experts_from(
        self, sampling: SglangSampling, place: int, count: int, num_tokens: int
    ) -> int | None:
        request, name = self.request, "return_routed_experts"
        if not (
            one_of(request.return_routed_experts, place, count, name) or sampling.routed_experts
        ):
            return None
        require_routed_experts(self.served, name)
        name = "routed_experts_start_len"
        start = one_of(request.routed_experts_start_len, place, count, name) or 0
        if not 0 <= start <= num_tokens:
            raise bad_request(f"{name} is {start}, and the prompt has {num_tokens} tokens.", name)
        return start

    def _ask(self, prompt: SglangPrompt, sampling: SglangSampling, place: int) -> Ask:
        return Ask(
            prompt.token_ids,
            self._params(prompt, sampling, place),
            self.num_samples,
            # The prompt's scores, and masks, come with the whole sample.
            stream=prompt.scored_from is None
            and not (prompt.hides or prompt.mask or prompt.flat_mask),
            client_id=prompt.request_id,
            unique=self.request.rid is not None,
            limits=self._limits,
            text=TextStyle(
                special_tokens=sampling.skip_special_tokens is False,
                stop=bool(sampling.no_stop_trim),
            ),
            repeats_prompt=prompt.scored_from is not None
            or bool(self.request.return_prompt_token_ids),
        )

    def _params(self, prompt: SglangPrompt, sampling: SglangSampling, place: int) -> SamplingParams:
        request = self.request
        left = room(prompt.token_ids, sampling.max_new_tokens, self.served, None, "max_new_tokens")
        if not left and not prompt.hides:
            name = "text" if self.request.input_ids is None else "input_ids"
            raise too_long(len(prompt.token_ids), 1, self.served, name)
        return sampling_params(
            sampling,
            self.served,
            max_tokens=max(1, left),
            stop=checked_stop(sampling.stop, self.served, "sampling_params.stop"),
            top_logprobs=prompt.top,
            scored_prompt=None if prompt.scored_from is None else prompt.top,
            renamed={
                "seed": sampling.sampling_seed,
                "min_tokens": sampling.min_new_tokens,
                "cache_salt": one_of(request.extra_key, place, len(self._prompts), "extra_key"),
                "priority": None if request.priority is None else -request.priority,
                "adapter": self._adapter(place),
                "sampling_mask": prompt.mask or prompt.flat_mask or None,
                "routed_experts": prompt.experts_from is not None or None,
            },
            within="sampling_params.",
            behind=behind_reasoning(prompt.token_ids, self.served, parsed=False)
            if request.require_reasoning
            else AT_ONCE,
        )

    def _adapter(self, place: int) -> str | None:
        name = one_of(self.request.lora_path, place, len(self._prompts), "lora_path")
        if name is not None and name not in self.served.adapters():
            raise ApiError(
                404, f"the adapter {shown(name)} is not loaded.", "lora_path", "model_not_found"
            )
        return name

    # -- a stream ----------------------------------------------------------------------------------

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """All of a choice so far; the end of it in full."""
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
            # Base64 cannot grow; the last event has it.
            name = b"output_token_logprobs" if self._flat is None else b"token_logprobs"
            if self._flat != "base64":
                parts += [b',"', name, b'":[', grown.rows, b"]"]
            if prompt.top:
                parts += [b',"output_top_logprobs":[', grown.tops, b"]"]
        parts.append(b'},"index":%d}\n\n' % index if self._is_list else b"}}\n\n")
        return b"".join(parts)

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """The end's mark."""
        self._correct(usage)
        return DONE

    def failure(self, problem: ApiError) -> bytes:
        """What went wrong, and the end's mark."""
        return super().failure(problem) + DONE

    # -- the answer as a whole ---------------------------------------------------------------------

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Any:
        """One object, or a list of them for a batch or several samples."""
        self._correct(usage)
        told = (
            self._told(choice.index, choice.finished, choice.content)
            for choice in choices
            if choice.finished is not None
        )
        return LazyArray(told) if self._is_list else next(told)

    # -- parts -------------------------------------------------------------------------------------

    def _told(self, index: int, sample: TrainingSample, text: str) -> dict[str, Any]:
        """A choice in full."""
        prompt = self._prompts[index // self.num_samples]
        told: dict[str, Any] = {
            "text": "" if prompt.hides else text,
            "output_ids": () if prompt.hides else sample.completion_tokens,
            "meta_info": self._meta_info(prompt, sample),
        }
        if self.request.return_prompt_token_ids:
            told["prompt_token_ids"] = prompt.token_ids
        if self.stream and self._is_list:
            told["index"] = index
        return told

    def _meta_info(self, prompt: SglangPrompt, sample: TrainingSample) -> dict[str, Any]:
        version_name = self.served.version_name
        ids, spans = sample.completion_tokens, sample.weight_versions
        ending = finish_reason(sample, len(ids))
        if prompt.hides:
            ids, spans, ending = (), (), {"type": "length", "length": 0}
        told: dict[str, Any] = {
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
            told["cached_tokens"] = sample.cached_tokens
        if prompt.logprobs:
            told |= self._logprobs(prompt, sample, ids)
        if prompt.raw_logprobs and not prompt.hides:
            told["output_token_raw_logprobs"] = finite(sample.raw_logprobs or ())
        if prompt.experts_from is not None:
            told |= routed_experts_told(sample, int32_of, prompt.experts_from, hides=prompt.hides)
        return told if prompt.hides else told | masks_of(prompt, sample)

    def _logprobs(
        self, prompt: SglangPrompt, sample: TrainingSample, ids: Sequence[int]
    ) -> dict[str, Any]:
        values = full_logprobs(sample.logprobs, sample.log_kept_mass)[: len(ids)]
        begin, scored = prompt.scored_from, list[Any]()
        if begin is not None and sample.prompt_logprobs is not None:
            # The first row has no logprob, as SGLang has it, also where there is a token before it.
            scores = [None, *finite(sample.prompt_logprobs[begin + 1 :])]
            scored = rows(scores, sample.prompt_tokens[begin:], self._texts)
        told: dict[str, Any] = {
            "input_token_logprobs": scored,
            "output_token_logprobs_length": len(ids),
        }
        if self._flat is None:
            told["output_token_logprobs"] = rows(values, ids, self._texts)
        else:
            told["token_logprobs"] = flat(values, self._flat)
        if prompt.top:
            tops, scored_tops = (sample.top_logprobs or ())[: len(ids)], list[Any]()
            if begin is not None and sample.prompt_top_logprobs is not None:
                rest = sample.prompt_top_logprobs[begin + 1 :]
                scored_tops = [None, *top_rows(rest, prompt.top, self._texts)]
            told["output_top_logprobs"] = top_rows(
                tops, prompt.top, self._texts, sample.log_kept_mass
            )
            told["input_top_logprobs"] = scored_tops[: len(scored)]
        return told

    def _correct(self, usage: RequestUsage) -> None:
        """Tokens that were drawn only to score a prompt do not count."""
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
