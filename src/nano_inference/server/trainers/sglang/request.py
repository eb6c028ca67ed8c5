"""Conversion of SGLang's `/generate` requests to the engine's `Ask`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from nano_inference.core.budget import Names
from nano_inference.server.api.parsing import AT_ONCE
from nano_inference.server.api.shared.answers import (
    Flat,
)
from nano_inference.server.api.shared.choices import TextStyle
from nano_inference.server.api.shared.fields import (
    check_part,
)
from nano_inference.server.api.shared.prompts import (
    behind_reasoning,
    checked_prompt,
    need_tokenizer,
    require_at_most,
    require_possible_length,
    room,
    too_long,
)
from nano_inference.server.api.shared.protocol import (
    Ask,
    Builder,
    Served,
    affordable,
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
)
from nano_inference.types import Limits, SamplingParams


@dataclass(frozen=True, slots=True)
class SglangPrompt:
    """A prompt, and the requested details of its samples.

    Attributes:
        request_id: Id that the client knows.
        logprobs: True to return logprobs of the completion.
        scored_from: First token of the prompt whose logprob is returned. None: none.
        top: Number of most probable tokens returned per position.
        named: Ids whose logprobs are returned at every position.
        mask: True to return the ids that the filters kept.
        flat_mask: True to return them in slime's format.
        raw_logprobs: True to return the model's own logprobs.
        experts_from: First token whose routed experts are returned. None: none.
        hides: True if nothing was requested: the engine's single token is not returned.
    """

    token_ids: list[int]
    request_id: str
    logprobs: bool
    scored_from: int | None
    top: int
    named: tuple[int, ...]
    mask: bool
    flat_mask: bool
    raw_logprobs: bool
    experts_from: int | None
    hides: bool


_Item = TypeVar("_Item")


def one_of(values: Sequence[_Item] | None, index: int, count: int, name: str) -> _Item | None:
    """Return a field's value for the prompt at `index` of `count`. Raises `ApiError` 400 if the
    field has another number of values.
    """
    if values is None:
        return None
    if len(values) not in (1, count):
        raise bad_request(
            f"{name} has {len(values)} entries for {count} prompt(s); send one, or one per prompt.",
            name,
        )
    return values[index if len(values) > 1 else 0]


def prompts_of(request: SglangRequest) -> tuple[list[Any], bool]:
    """Return the prompts (texts or lists of ids), and True if they came as a list. Raises
    `ApiError` 400.
    """
    if (request.text is None) == (request.input_ids is None):
        raise bad_request("set either text or input_ids, not both.", "text")
    name, prompts, is_one = "text", request.text, _is_text
    if request.text is None:
        name, prompts, is_one = "input_ids", request.input_ids, _is_ids
    if is_one(prompts):
        return [prompts], False
    if not isinstance(prompts, list) or not prompts or not all(is_one(each) for each in prompts):
        what = (
            "a nonempty string or a list of such strings"
            if name == "text"
            else "a nonempty list of token ids or a list of such lists"
        )
        raise bad_request(f"{name} must be {what}.", name)
    return prompts, True


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and not isinstance(value[0], list)


class SglangAsked(Builder):
    """Builder of one request for the engine."""

    names: ClassVar[Names] = {
        "num_samples": "sampling_params.n",
        "max_tokens": "sampling_params.max_new_tokens",
        "top_logprobs": "top_logprobs_num",
        "prompt_top_logprobs": "top_logprobs_num",
        "named": "the number of token_ids_logprob",
        "prompt_named": "the number of token_ids_logprob",
    }

    def __init__(self, request: SglangRequest, served: Served, request_id: str) -> None:
        self.served = served
        self.request = request
        self.stream = bool(request.stream)
        self._started = time.perf_counter()
        names_tokens = bool(request.return_text_in_logprobs)
        if names_tokens:
            need_tokenizer(served)
        self._texts = served.token_texts if names_tokens else None  # for rows of logprobs
        self._flat: Flat | None = request.flat_logprobs  # format of plain logprobs instead of rows
        wanted = request.weight_version or WantedVersion.model_validate({})
        self._limits = Limits(
            num_wanted=request.n_wanted,
            min_version=version_number(wanted.min_version, served, "weight_version.min_version"),
            exact_version=version_number(
                wanted.exact_version, served, "weight_version.exact_version"
            ),
        )
        prompts, is_batch = prompts_of(request)
        samplings = [self._sampling(index, len(prompts)) for index in range(len(prompts))]
        self.num_samples = samplings[0].n or 1
        if any((each.n or 1) != self.num_samples for each in samplings):
            raise bad_request(
                "sampling_params.n must be the same for all prompts.", "sampling_params.n"
            )
        require_at_most(
            len(prompts) * self.num_samples,
            served.config.max_samples,
            "sampling_params.n",
            "n times the prompts",
        )
        self._is_list = is_batch or self.num_samples > 1
        self._prompts = [
            self._prompt(prompt, samplings[index], index, len(prompts), request_id)
            for index, prompt in enumerate(prompts)
        ]
        asks = (
            self._ask(prompt, samplings[index], index) for index, prompt in enumerate(self._prompts)
        )
        self.asks = affordable(asks, served, self.names)

    def _sampling(self, index: int, count: int) -> SglangSampling:
        params = self.request.sampling_params
        sampling = (
            params
            if isinstance(params, SglangSampling)
            else one_of(params, index, count, "sampling_params")
        )
        sampling = sampling if sampling is not None else SglangSampling.model_validate({})
        check_part(sampling, "sampling_params")
        return sampling

    def _read(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return checked_prompt(prompt, self.served, "input_ids", least=0)
        require_possible_length(prompt, self.served, "text")
        token_ids = need_tokenizer(self.served).encode(prompt, add_special_tokens=True)
        return checked_prompt(token_ids, self.served, "text", least=0)

    def _prompt(
        self, raw_prompt: Any, sampling: SglangSampling, index: int, count: int, request_id: str
    ) -> SglangPrompt:
        request, token_ids = self.request, self._read(raw_prompt)
        name = one_of(request.rid, index, count, "rid") or request_id
        if count > 1 and (request.rid is None or len(request.rid) == 1):
            name = f"{name}_{index}"  # SGLang's way to make unique names
        logprobs = bool(one_of(request.return_logprob, index, count, "return_logprob"))
        start = one_of(request.logprob_start_len, index, count, "logprob_start_len")
        if start is not None and start >= len(token_ids):
            raise bad_request(
                f"logprob_start_len={start} must be below the prompt's length ({len(token_ids)}).",
                "logprob_start_len",
            )
        top = max(0, one_of(request.top_logprobs_num, index, count, "top_logprobs_num") or 0)
        require_logprobs(top, self.served, "top_logprobs_num")
        custom = sampling.custom_params
        return SglangPrompt(
            token_ids,
            name,
            logprobs=logprobs,
            scored_from=start if logprobs and start is not None and start >= 0 else None,
            top=top if logprobs else 0,
            named=self._named(index, count, logprobs=logprobs),
            mask=bool(one_of(request.return_sampling_mask, index, count, "return_sampling_mask")),
            flat_mask=custom is not None and bool(custom.return_top_p_token_ids),
            raw_logprobs=bool(sampling.raw_logprobs),
            experts_from=self._experts_from(sampling, index, count, len(token_ids)),
            hides=sampling.max_new_tokens == 0,
        )

    def _named(self, index: int, count: int, *, logprobs: bool) -> tuple[int, ...]:
        """Return the ids that the client names for a prompt. Raises `ApiError` 400."""
        name, asked = "token_ids_logprob", self.request.token_ids_logprob
        if asked is None:
            return ()
        is_one = isinstance(asked, list) and not any(isinstance(each, list) for each in asked)
        ids = one_of([asked] if is_one else asked, index, count, name) if asked != [] else []
        if not isinstance(ids, list | None) or not all(type(each) is int for each in ids or ()):
            raise bad_request(f"{name} must be a list of ids, or one such list per prompt.", name)
        if ids and not logprobs:
            raise bad_request(f"{name} requires return_logprob: true.", name)
        require_logprobs(len(ids or ()), self.served, name)
        return tuple(ids or ())

    def _experts_from(
        self, sampling: SglangSampling, index: int, count: int, num_tokens: int
    ) -> int | None:
        request, name = self.request, "return_routed_experts"
        if not (
            one_of(request.return_routed_experts, index, count, name) or sampling.routed_experts
        ):
            return None
        require_routed_experts(self.served, name)
        name = "routed_experts_start_len"
        start = one_of(request.routed_experts_start_len, index, count, name) or 0
        if not 0 <= start <= num_tokens:
            raise bad_request(f"{name}={start} must be in [0, {num_tokens}].", name)
        return start

    def _ask(self, prompt: SglangPrompt, sampling: SglangSampling, index: int) -> Ask:
        return Ask(
            prompt.token_ids,
            self._params(prompt, sampling, index),
            self.num_samples,
            # the prompt's scores, and masks, come only with the whole sample
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

    def _params(self, prompt: SglangPrompt, sampling: SglangSampling, index: int) -> SamplingParams:
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
                "cache_salt": one_of(request.extra_key, index, len(self._prompts), "extra_key"),
                "priority": None if request.priority is None else -request.priority,
                "adapter": self._adapter(index),
                "logprob_token_ids": prompt.named,
                **_scored_ids(prompt),
                "sampling_mask": prompt.mask or prompt.flat_mask or None,
                "routed_experts": prompt.experts_from is not None or None,
                "thinking_budget": self._thinking_budget(sampling, index),
                "receipt": sampling.receipt,
            },
            within="sampling_params.",
            behind=behind_reasoning(prompt.token_ids, self.served, parsed=False)
            if request.require_reasoning
            else AT_ONCE,
        )

    def _thinking_budget(self, sampling: SglangSampling, index: int) -> int | None:
        custom = sampling.custom_params
        if custom is not None and custom.thinking_budget is not None:
            return custom.thinking_budget
        name = "max_thinking_tokens"
        return one_of(self.request.max_thinking_tokens, index, len(self._prompts), name)

    def _adapter(self, index: int) -> str | None:
        name = one_of(self.request.lora_path, index, len(self._prompts), "lora_path")
        if name is not None and name not in self.served.adapters():
            raise ApiError(
                404, f"the adapter {shown(name)} is not loaded.", "lora_path", "model_not_found"
            )
        return name


def _scored_ids(prompt: SglangPrompt) -> dict[str, Any]:
    """Return the parameters for the named ids' logprobs at prompt positions."""
    begin = prompt.scored_from
    if begin is None or begin > len(prompt.token_ids) - 2:  # the first position has no logprob
        return {}
    return {
        "prompt_logprob_token_ids": (prompt.named,) if prompt.named else None,
        "prompt_logprob_start": begin if prompt.named else None,
    }
