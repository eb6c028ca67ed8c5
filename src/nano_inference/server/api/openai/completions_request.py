"""Conversion of a request of `POST /v1/completions` to the engine's `Ask`s."""

from dataclasses import dataclass

from nano_inference.server.api.openai.answer import OpenAIBuilder
from nano_inference.server.api.openai.models import (
    CompletionRequest,
)
from nano_inference.server.api.shared.prompts import (
    checked_prompt,
    need_tokenizer,
    prompt_list,
    require_at_most,
    require_possible_length,
    room,
)
from nano_inference.server.api.shared.protocol import Ask, Served, affordable
from nano_inference.server.api.shared.sampling import num_logprobs
from nano_inference.server.errors import bad_request

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt with its text. None: the client sent token ids."""

    token_ids: list[int]
    text: str | None


class CompletionAsked(OpenAIBuilder):
    """Asks of one request, without its answer."""

    names = OpenAIBuilder.names | {
        "top_logprobs": "logprobs",
        "prompt_top_logprobs": "prompt_logprobs (with echo also logprobs)",
    }

    def __init__(self, request: CompletionRequest, served: Served, request_id: str) -> None:
        super().__init__(
            request,
            served,
            request_id,
            kind="text_completion",
            chunk_kind="text_completion",
            prefix="cmpl-",
        )
        self.request: CompletionRequest = request
        self.echo = bool(request.echo)
        self.logprobs = num_logprobs(request.logprobs, served, "logprobs")
        if request.logprob_token_ids and self.logprobs is None:
            raise bad_request("logprob_token_ids requires logprobs.", "logprob_token_ids")
        if self.logprobs is not None and self.texts is None:
            raise bad_request(
                "logprobs requires a tokenizer, which the model does not have; omit it.", "logprobs"
            )
        # the engine draws at least one token, which is hidden if the client wants none
        newer = request.max_completion_tokens is not None
        self._max_tokens_name = "max_completion_tokens" if newer else "max_tokens"
        self._max_tokens = request.max_completion_tokens if newer else request.max_tokens
        self._hides = self._max_tokens == 0
        scored = self.num_prompt_logprobs
        if self.echo and self.logprobs is not None:
            scored = max(scored or 0, self.logprobs)
        self._prompts = self._read_prompts(request.prompt)
        asks = (self._ask(prompt, scored) for prompt in self._prompts)
        self.asks = affordable(asks, served, self.names)

    def _read_prompts(self, prompt: object) -> list[TextPrompt]:
        prompts = prompt_list(prompt, "prompt")
        require_at_most(
            len(prompts) * self.num_samples,
            self.served.config.max_samples,
            "prompt",
            "n times the number of prompts",
        )
        return [self._read_prompt(each) for each in prompts]

    def _read_prompt(self, prompt: str | list[int]) -> TextPrompt:
        if isinstance(prompt, list):
            return TextPrompt(self._checked(self._cut(prompt)), None)
        tokenizer = need_tokenizer(self.served)
        require_possible_length(prompt, self.served, "prompt")
        add = self.request.add_special_tokens is not False
        whole = tokenizer.encode(prompt, add_special_tokens=add)
        token_ids = self._cut(whole)
        return TextPrompt(
            self._checked(token_ids), prompt if len(token_ids) == len(whole) else None
        )

    def _checked(self, token_ids: list[int]) -> list[int]:
        return checked_prompt(token_ids, self.served, least=0 if self._hides else 1)

    def _cut(self, token_ids: list[int]) -> list[int]:
        return self.cut(
            token_ids, DEFAULT_MAX_TOKENS if self._max_tokens is None else self._max_tokens
        )

    def _ask(self, prompt: TextPrompt, scored: int | None) -> Ask:
        # max_tokens=0 is valid even if the prompt fills the context; the engine draws one token
        asked, served = self._max_tokens, self.served
        left = room(prompt.token_ids, asked, served, DEFAULT_MAX_TOKENS, self._max_tokens_name)
        max_tokens = max(1, left)
        # scores of the prompt precede the completion's
        repeats = self.echo or bool(self.request.return_token_ids) or scored is not None
        streams = scored is None and not self._hides
        top_logprobs = self.logprobs or 0
        return self.ask(
            prompt.token_ids,
            max_tokens,
            top_logprobs,
            scored,
            stream=streams,
            repeats_prompt=repeats,
        )
