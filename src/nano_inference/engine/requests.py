"""What callers hand in, checked and made into token ids. Nothing of the engine's state changes
here.
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
    """The limits of one engine, and its tokenizer."""

    config: EngineConfig
    spec: ModelSpec
    model_folder: Path
    max_model_len: int

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, or the one at `tokenizer_path`; read when it is first asked
        for.
        """
        other = self.config.tokenizer_path
        return load_tokenizer(resolve_model(other) if other is not None else self.model_folder)

    def token_ids(self, prompt: Any) -> list[int]:
        """Token ids of a prompt of any kind. Raises `InvalidRequest`."""
        if isinstance(prompt, str):
            require_unicode(prompt, "the prompt")
            return self._nonempty(
                self.need_tokenizer("a prompt of text").encode(prompt, add_special_tokens=True)
            )
        if is_chat(prompt):
            return self._nonempty(encode_chat(self.need_tokenizer("a chat"), prompt))
        return self._nonempty(checked_ids(prompt, self.spec.vocab_size))

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer. Raises `InvalidRequest` where there is none."""
        try:
            return self.tokenizer
        except ModelLoadError as problem:
            cure = "" if "tokenizer_path" in str(problem) else "set tokenizer_path, "
            raise InvalidRequest(
                f"{what} needs a tokenizer: {problem}; {cure}or pass ids."
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
        """Raise `InvalidRequest` or `RequestTooLarge` for what this engine cannot serve.

        Args:
            prompt_len: tokens of the prompt.
            params: of the request.
            num_samples: of the request.
            max_entries: what it may cost, if that is less than any request may; see
                `nano_inference.core.budget`.
            embeds: the prompt is embedded, and the token behind it is not wanted.

        Returns:
            ids that the mask of each sample may have in all.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, not {type(params).__name__}.")
        if not is_whole(num_samples, 1):
            raise InvalidRequest(f"num_samples={num_samples!r} must be a positive integer.")
        require(SERVED_LIMITS, Setting(params, self.config))
        self._require_vocabulary(params)
        # the token that is drawn behind a prompt which is scored or embedded needs no place
        is_read = params.max_tokens == 1 and (params.prompt_logprobs or embeds)
        fills = is_read and prompt_len == self.max_model_len
        self._require_fit(prompt_len, 0 if fills else params.max_tokens)
        budget = self._budget(max_entries)
        demand = demand_of(prompt_len, params, num_samples, experts=self.experts_per_token)
        require_affordable(demand, budget)
        return most_mask_ids(demand, budget)

    @property
    def experts_per_token(self) -> int:
        """Ids of routed experts that a sample may have for each token, of all layers; 0: none."""
        moe = self.spec.moe
        if moe is None or not self.config.enable_return_routed_experts:
            return 0
        return len(moe.layers) * moe.experts_per_token

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Ids that end a sample: the request's and, unless ignored, the model's. Raises
        `InvalidRequest`.
        """
        eos = frozenset(self.spec.eos_token_ids)
        every = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos
        drawable = params.allowed_token_ids or range(self.spec.vocab_size)
        if params.min_tokens and every.issuperset(drawable):
            raise InvalidRequest(
                "every id of the "
                f"{'allowed set' if params.allowed_token_ids else 'whole vocabulary'} would end "
                "the "
                "sample, so min_tokens leaves nothing to draw."
            )
        return every

    def _budget(self, max_entries: int | None) -> int:
        most = self.config.max_request_entries
        if max_entries is None:
            return most
        if not is_whole(max_entries, 1):
            raise InvalidRequest(
                f"max_entries={max_entries!r} must be a positive integer, or None."
            )
        return min(max_entries, most)

    def _nonempty(self, ids: list[int]) -> list[int]:
        if not ids:
            raise InvalidRequest("the prompt is empty; give at least one token id.")
        beyond = max(ids)
        if beyond >= self.spec.vocab_size:
            raise InvalidRequest(
                f"the tokenizer made token id {beyond}, and the model's vocabulary ends at "
                f"{self.spec.vocab_size - 1}; "
                "tokenizer_path does not belong to this model."
            )
        return ids

    def _require_vocabulary(self, params: SamplingParams) -> None:
        size = self.spec.vocab_size
        for name, ids in (
            ("stop token id", params.stop_token_ids),
            ("logit_bias key", params.logit_bias),
            ("allowed token id", params.allowed_token_ids or ()),
        ):
            if outside := [token_id for token_id in ids if token_id >= size]:
                raise InvalidRequest(
                    f"{name} {min(outside)} is outside the vocabulary: 0 to {size - 1}."
                )
        for name, count in (
            ("top_logprobs", params.top_logprobs),
            ("prompt_top_logprobs", params.prompt_top_logprobs),
        ):
            if count > size:
                raise InvalidRequest(f"{name}={count} is more than the vocabulary has: {size}.")

    def _require_fit(self, prompt_len: int, max_tokens: int) -> None:
        longest = prompt_len + max_tokens
        if prompt_len >= self.max_model_len and max_tokens:
            raise RequestTooLarge(
                f"the prompt of {prompt_len} tokens leaves no room in "
                f"max_model_len={self.max_model_len}; at most "
                f"{self.max_model_len - 1} fit."
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
                f"max_tokens_per_batch={limit}, which bounds "
                f"a request without chunked prefill; enable it, or allow {longest} tokens a batch."
            )


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a conversation."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_text(prompt: Any) -> bool:
    """Whether a prompt is text, so that its samples are wanted as text too."""
    return isinstance(prompt, str) or is_chat(prompt)


def many_prompts(prompts: Any) -> list[Any]:
    """A list of prompts, also for a single one. Raises `InvalidRequest`."""
    if is_text(prompts):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise InvalidRequest("a chat is a list of messages, not one message; put it into a list.")
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
    """One `SamplingParams` a prompt. Raises `InvalidRequest`."""
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Iterable):
        raise InvalidRequest(
            f"sampling_params must be SamplingParams, not {type(sampling_params).__name__}."
        )
    each = list(sampling_params)
    if len(each) != num_prompts:
        raise InvalidRequest(
            f"{len(each)} sampling_params for {num_prompts} prompts; give one, or one for each."
        )
    return each


def checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    """Token ids as integers. Raises `InvalidRequest` for anything else, and for ids outside the
    vocabulary.
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
            raise InvalidRequest(f"token id {item!r} is not an integer.") from None
        if isinstance(item, bool) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token id {item!r} is outside the vocabulary: 0 to {vocab_size - 1}."
            )
        ids.append(token_id)
    return ids
