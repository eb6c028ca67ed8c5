"""Conversion of vLLM's `/inference/v1/generate` requests to the engine's `Ask`."""

import time
from typing import Any, ClassVar

from nano_inference.core.budget import Names
from nano_inference.server.api.openai.answer import usage_wanted
from nano_inference.server.api.parsing import AT_ONCE
from nano_inference.server.api.shared.choices import TextStyle
from nano_inference.server.api.shared.fields import (
    check_part,
)
from nano_inference.server.api.shared.prompts import (
    adapter_of,
    behind_reasoning,
    checked_prompt,
    need_tokenizer,
    require_at_most,
    room,
)
from nano_inference.server.api.shared.protocol import Ask, Builder, Served
from nano_inference.server.api.shared.sampling import (
    checked_stop,
    require_logprobs,
    sampling_params,
    version_number,
)
from nano_inference.server.errors import bad_request, shown
from nano_inference.server.trainers.vllm.models import VllmRequest, VllmSampling
from nano_inference.types import Limits, SamplingParams


class VllmAsked(Builder):
    """Builder of one request for the engine."""

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
        self._named = tuple(sampling.logprob_token_ids or ())
        name = "sampling_params.logprob_token_ids"
        require_logprobs(len(self._named), served, name)
        self._num_prompt_logprobs = self._count(
            sampling.prompt_logprobs, "sampling_params.prompt_logprobs"
        )
        if not isinstance(request.token_ids, list):
            raise bad_request(
                f"token_ids must be a list of token ids, not {shown(request.token_ids)}.",
                "token_ids",
            )
        self._prompt = checked_prompt(request.token_ids, served, "token_ids")
        self._prompt_named = named_rows(sampling.prompt_logprob_token_ids, served)
        self._scores_prompt = self._num_prompt_logprobs is not None or bool(self._prompt_named)
        self.asks = [
            Ask(
                self._prompt,
                self._params(),
                num_samples,
                stream=not self._scores_prompt,  # those come only with the whole sample
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

    def _count(self, asked: int | None, name: str) -> int | None:
        """Return the number of candidates to return. -1 means the server's maximum."""
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
            # the first candidate is the token itself
            top_logprobs=top if top > 1 and not self._named else 0,
            scored_prompt=self._num_prompt_logprobs,
            renamed={
                "cache_salt": request.cache_salt,
                "priority": request.priority,
                "sampling_mask": sampling.return_sampling_mask or None,
                "adapter": self._adapter,
                "routed_experts": self._routed_experts(),
                "logprob_token_ids": self._named,
                "prompt_logprob_token_ids": self._prompt_named or None,
                "prompt_logprob_start": sampling.prompt_logprob_start,
                "receipt": sampling.receipt,
            },
            within="sampling_params.",
            behind=behind_reasoning(self._prompt, self._served, parsed=False)
            if request.reasoning_ended is False
            else AT_ONCE,
        )

    def _routed_experts(self) -> bool | None:
        """Return True to return the experts. The default is as in vLLM: if there is a record of
        them that fits the budget, and not in a stream.
        """
        start = self._sampling.routed_experts_prompt_start
        if start is not None and start > len(self._prompt):
            raise bad_request(
                f"routed_experts_prompt_start={start} exceeds the prompt's length "
                f"({len(self._prompt)}).",
                "sampling_params.routed_experts_prompt_start",
            )
        if self._sampling.routed_experts is not None:
            return self._sampling.routed_experts
        return (self._served.engine.experts_per_token > 0 and not self.stream) or None


def named_rows(rows: Any, served: Served) -> list[list[int]]:
    """Return the ids that a client names at prompt positions: one row for all, or one for each. As
    in vLLM, rows are padded with -1. Raises `ApiError` 400.
    """
    name = "sampling_params.prompt_logprob_token_ids"
    if rows is None:
        return []
    if not isinstance(rows, list):
        raise bad_request(
            f"{name} must be a list of ids or of such lists, not {shown(rows)}.", name
        )
    many = rows if rows and isinstance(rows[0], list) else [rows]
    kept: list[list[int]] = []
    for row in many:
        if not isinstance(row, list) or not all(type(each) is int for each in row):
            raise bad_request(f"{name} must be a list of ids or of such lists.", name)
        kept.append([each for each in row if each != -1])
    require_logprobs(max(map(len, kept), default=0), served, name)
    return kept
