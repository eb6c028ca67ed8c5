"""Checks of a caller's input, and its conversion to token ids. Nothing here changes the engine's
state.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nano_inference.checkpoints.loading import resolve_model
from nano_inference.config import EngineConfig
from nano_inference.core.budget import demand_of, most_mask_ids, require_affordable
from nano_inference.errors import InvalidRequest, ModelLoadError, RequestTooLarge
from nano_inference.features import SERVED_LIMITS, Setting, require
from nano_inference.fields.options import is_whole
from nano_inference.models.spec.model import ModelSpec
from nano_inference.text.chat import encode_chat
from nano_inference.text.messages import require_unicode
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import SamplingParams

# Token ids, text, or a conversation: a list of messages, each {"role": ..., "content": ...}.
Prompt = Sequence[int] | str | Sequence[Mapping[str, Any]]
Params = SamplingParams | Iterable[SamplingParams]  # one for all prompts, or one for each


@dataclass(frozen=True)
class RequestChecks:
    """Limits of an engine, and its tokenizer."""

    config: EngineConfig
    spec: ModelSpec
    model_folder: Path
    max_model_len: int

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Model's tokenizer, or the one at `tokenizer_path`. It is loaded on first access."""
        other = self.config.tokenizer_path
        return load_tokenizer(resolve_model(other) if other is not None else self.model_folder)

    def token_ids(self, prompt: Any) -> list[int]:
        """Return the token ids of a prompt of any kind. Raises `InvalidRequest`."""
        if isinstance(prompt, str):
            require_unicode(prompt, "the prompt")
            return self._nonempty(
                self.need_tokenizer("a prompt of text").encode(prompt, add_special_tokens=True)
            )
        if is_chat(prompt):
            return self._nonempty(encode_chat(self.need_tokenizer("a chat"), prompt))
        return self._nonempty(checked_ids(prompt, self.spec.vocab_size))

    def need_tokenizer(self, what: str) -> Tokenizer:
        """Return the tokenizer. Raises `InvalidRequest` if there is none."""
        try:
            return self.tokenizer
        except ModelLoadError as problem:
            advice = "" if "tokenizer_path" in str(problem) else "set tokenizer_path, "
            raise InvalidRequest(
                f"{what} needs a tokenizer: {problem}; {advice}or pass token ids."
            ) from problem

    def require(
        self,
        prompt_len: int,
        params: Any,
        num_samples: Any,
        max_entries: int | None = None,
        *,
        embeds: bool = False,
    ) -> int:
        """Check that this engine can serve a request. Raises `InvalidRequest` or `RequestTooLarge`.

        Args:
            prompt_len: Number of prompt tokens.
            params: Sampling parameters of the request.
            num_samples: Number of samples of the request.
            max_entries: Cost limit of this request, if lower than that of all requests
                (`nano_inference.core.budget`).
            embeds: True if the prompt is embedded, so that no token is sampled after it.

        Returns:
        Maximum number of ids in the masks of each sample.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, not {type(params).__name__}.")
        if not is_whole(num_samples, 1):
            raise InvalidRequest(f"num_samples={num_samples!r} must be a positive integer.")
        require(SERVED_LIMITS, Setting(params, self.config))
        self._require_vocabulary(params)
        _require_rows(params, prompt_len)
        # the token drawn after a scored or embedded prompt needs no position of its own
        is_read = params.max_tokens == 1 and (params.scores_prompt or embeds)
        fills = is_read and prompt_len == self.max_model_len
        self._require_fit(prompt_len, 0 if fills else params.max_tokens)
        budget = self._budget(max_entries)
        demand = demand_of(prompt_len, params, num_samples, experts=self.experts_per_token)
        require_affordable(demand, budget)
        return most_mask_ids(demand, budget)

    @property
    def experts_per_token(self) -> int:
        """Number of routed expert ids per token, over all layers. 0 if they are not recorded."""
        moe = self.spec.moe
        if moe is None or not self.config.enable_return_routed_experts:
            return 0
        return len(moe.layers) * moe.experts_per_token

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the ids that end a sample: the request's and, unless ignored, the model's. Raises
        `InvalidRequest`.
        """
        eos = frozenset(self.spec.eos_token_ids)
        every = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos
        drawable = params.allowed_token_ids or range(self.spec.vocab_size)
        if params.min_tokens and every.issuperset(drawable):
            raise InvalidRequest(
                "every id of the "
                f"{'allowed set' if params.allowed_token_ids else 'whole vocabulary'} would end "
                f"the sample, so min_tokens={params.min_tokens} leaves no token to draw; allow an "
                "id that does not end it."
            )
        return every

    def _budget(self, max_entries: int | None) -> int:
        most = self.config.max_request_entries
        if max_entries is None:
            return most
        if not is_whole(max_entries, 1):
            raise InvalidRequest(f"max_entries={max_entries!r} must be a positive integer or None.")
        return min(max_entries, most)

    def _nonempty(self, ids: list[int]) -> list[int]:
        if not ids:
            raise InvalidRequest("the prompt is empty; give at least one token id.")
        beyond = max(ids)
        if beyond >= self.spec.vocab_size:
            raise InvalidRequest(
                f"the tokenizer returned token id {beyond}, but the model's vocabulary ends at "
                f"{self.spec.vocab_size - 1}; set tokenizer_path to the model's own tokenizer."
            )
        return ids

    def _require_vocabulary(self, params: SamplingParams) -> None:
        size = self.spec.vocab_size
        for name, ids in (
            ("stop token id", params.stop_token_ids),
            ("logit_bias key", params.logit_bias),
            ("allowed token id", params.allowed_token_ids or ()),
            ("logprob_token_ids entry", params.logprob_token_ids),
            *(("prompt_logprob_token_ids entry", row) for row in params.prompt_logprob_token_ids),
        ):
            if outside := [token_id for token_id in ids if token_id >= size]:
                raise InvalidRequest(
                    f"{name} {min(outside)} is outside the vocabulary (0 to {size - 1})."
                )
        for name, count in (
            ("top_logprobs", params.top_logprobs),
            ("prompt_top_logprobs", params.prompt_top_logprobs),
        ):
            if count > size:
                raise InvalidRequest(f"{name}={count} exceeds the vocabulary size ({size}).")

    def _require_fit(self, prompt_len: int, max_tokens: int) -> None:
        longest = prompt_len + max_tokens
        if prompt_len >= self.max_model_len and max_tokens:
            raise RequestTooLarge(
                f"the prompt of {prompt_len} tokens leaves no room for completions in "
                f"max_model_len={self.max_model_len}; shorten it to {self.max_model_len - 1}."
            )
        if longest > self.max_model_len:
            raise RequestTooLarge(
                f"prompt ({prompt_len}) and max_tokens={max_tokens} exceed "
                f"max_model_len={self.max_model_len}; "
                f"max_tokens={self.max_model_len - prompt_len} would fit."
            )
        limit = self.config.max_tokens_per_batch
        if not self.config.enable_chunked_prefill and longest > limit:
            raise RequestTooLarge(
                f"prompt ({prompt_len}) and max_tokens={max_tokens} exceed "
                f"max_tokens_per_batch={limit}, which limits requests without chunked prefill; "
                f"enable chunked prefill, or set max_tokens_per_batch={longest}."
            )


def _require_rows(params: SamplingParams, prompt_len: int) -> None:
    """Require one row of named ids for all prompt positions, or one for each."""
    rows, start = len(params.prompt_logprob_token_ids), params.prompt_logprob_start
    if not rows:
        return
    positions = prompt_len - 1 - start
    if positions < 1:
        raise InvalidRequest(
            f"prompt_logprob_start={start} leaves no position in a prompt of {prompt_len} tokens; "
            "a token must follow."
        )
    if rows not in (1, positions):
        raise InvalidRequest(
            f"prompt_logprob_token_ids has {rows} rows for {positions} positions (a prompt of "
            f"{prompt_len} tokens after prompt_logprob_start={start}); pass one list of ids, or "
            "one list for each position."
        )


def is_chat(prompt: Any) -> bool:
    """Return True if a prompt is a conversation."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_text(prompt: Any) -> bool:
    """Return True if a prompt is text or a conversation, so that its samples have `text`."""
    return isinstance(prompt, str) or is_chat(prompt)


def many_prompts(prompts: Any) -> list[Any]:
    """Return prompts as a list, even for a single prompt. Raises `InvalidRequest`."""
    if is_text(prompts):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise InvalidRequest("a chat must be a list of messages; put the message into a list.")
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__"):
        raise InvalidRequest(
            f"prompts must be token ids, strings or chats, not {type(prompts).__name__}."
        )
    many = list(prompts)
    if not many:
        raise InvalidRequest("prompts is empty; give at least one prompt.")
    single = all(isinstance(item, int) or getattr(item, "ndim", None) == 0 for item in many)
    return [many] if single else many


def params_for(sampling_params: Params, num_prompts: int) -> list[SamplingParams]:
    """Return one `SamplingParams` per prompt. Raises `InvalidRequest`."""
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Iterable):
        raise InvalidRequest(
            f"sampling_params must be SamplingParams, not {type(sampling_params).__name__}."
        )
    params = list(sampling_params)
    if len(params) != num_prompts:
        raise InvalidRequest(
            f"got {len(params)} sampling_params for {num_prompts} prompts; pass one, or one per "
            "prompt."
        )
    return params


def checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    """Return token ids as integers. Raises `InvalidRequest` for other values and for ids outside
    the vocabulary.
    """
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__iter__"):
        raise InvalidRequest(
            f"a prompt must be token ids, a string or a chat, not {type(prompt).__name__}."
        )
    ids: list[int] = []
    for item in prompt:
        try:
            token_id = operator.index(item)
        except TypeError:
            raise InvalidRequest(f"token id {item!r} must be an integer.") from None
        if isinstance(item, bool) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token id {item!r} is outside the vocabulary (0 to {vocab_size - 1})."
            )
        ids.append(token_id)
    return ids
