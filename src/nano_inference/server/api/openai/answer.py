"""What OpenAI's two protocols share on the way out: ids, usage, errors, logprobs, events."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nano_inference.core.budget import Names
from nano_inference.server.api.openai.models import (
    BEYOND_OPENAI,
    OpenAIFields,
    StreamOptions,
)
from nano_inference.server.api.parsing import AT_ONCE, Behind
from nano_inference.server.api.shared.answers import (
    DONE,
    LazyArray,
    encode_line,
    npy_of,
    prompt_rows,
    routed_experts_told,
    token_name,
    version_spans,
)
from nano_inference.server.api.shared.choices import Choice, TextStyle
from nano_inference.server.api.shared.prompts import adapter_of, require_at_most
from nano_inference.server.api.shared.protocol import Ask, Builder, RequestUsage, Served
from nano_inference.server.api.shared.sampling import (
    checked_stop,
    hinted,
    kept_seconds,
    num_logprobs,
    sampling_params,
    version_number,
)
from nano_inference.server.errors import bad_request
from nano_inference.types import Limits, TrainingSample


def fingerprint(served: Served) -> str:
    """Says, as OpenAI's does, whether two answers were computed in the same way."""
    said = f"{served.engine.model_path} {served.engine.numerics}".encode()
    return f"fp_{hashlib.sha256(said).hexdigest()[:12]}"


def usage_wanted(options: StreamOptions | None, *, stream: bool) -> tuple[bool, bool]:
    """Whether a stream ends with the usage, and whether each event has it. Raises `ApiError`,
    400.
    """
    if options is None:
        return False, False
    if not stream:
        raise bad_request(
            "stream_options is for streams; set stream to true, or leave it out.", "stream_options"
        )
    return bool(options.include_usage), bool(
        options.include_usage and options.continuous_usage_stats
    )


def usage_told(usage: RequestUsage, served: Served) -> dict[str, Any]:
    """Tokens, as clients see them."""
    told: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if not served.config.hide_cached_tokens:
        told["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return told


def stop_reason(
    sample: TrainingSample, served: Served, own: Sequence[int] | None
) -> str | int | None:
    """What ended a sample, as vLLM has it: None for the model's own end, unless the request names
    it too (`own`).
    """
    reason = sample.stop_reason
    return None if reason in served.engine.eos_token_ids and reason not in (own or ()) else reason


_CUT = "truncate_prompt_tokens"


# Fields that vLLM sends as null if there is nothing to say; OpenAI does not send them.
_NULLS_OF_VLLM = frozenset(
    (
        *("token_ids", "prompt_token_ids", "prompt_logprobs", "routed_experts", "stop_reason"),
        *("kv_transfer_params", "reasoning", "reasoning_content"),
    )
)


class OpenAIBuilder(Builder):
    """What builders of both routes have in common.

    Args:
        request: checked for what both routes share.
        served: what is served.
        request_id: the rest of the answer's id.
        kind: `object` of an answer.
        chunk_kind: `object` of an event.
        prefix: of the answer's id.
    """

    names: ClassVar[Names] = {"num_samples": "n", "prompt_top_logprobs": "prompt_logprobs"}

    def __init__(
        self,
        request: OpenAIFields,
        served: Served,
        request_id: str,
        *,
        kind: str,
        chunk_kind: str,
        prefix: str,
    ) -> None:
        self._adapter = adapter_of(request.model, served)
        self.served = served
        self.client_id = request.request_id
        request_id = request.request_id or request_id
        self.num_samples = request.n or 1
        # clients of vLLM read fields without asking whether they are there
        self._sends_nulls = served.config.rl or not BEYOND_OPENAI.isdisjoint(
            request.model_fields_set
        )
        if request.best_of is not None and request.best_of != self.num_samples:
            raise bad_request(
                "best_of must equal n: this server returns all samples that it draws.", "best_of"
            )
        require_at_most(self.num_samples, served.config.max_samples, "n")
        self.num_prompt_logprobs = num_logprobs(request.prompt_logprobs, served, "prompt_logprobs")
        self.stream = bool(request.stream)
        self.include_usage, self.continuous_usage = usage_wanted(
            request.stream_options, stream=self.stream
        )
        self.stop = checked_stop(request.stop, served)
        self.request = request
        self.texts = served.token_texts
        self.head = {
            "id": f"{prefix}{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self._adapter or served.name,
            "system_fingerprint": fingerprint(served),
        }
        head = encode_line(self.head | {"object": chunk_kind})[:-1]
        self._open = b"data: " + head + b',"choices":['
        self.close = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._no_choice = b"data: " + head + b',"choices":[],"usage":'

    # -- requests ----------------------------------------------------------------------------------

    def ask(
        self,
        prompt: list[int],
        max_tokens: int,
        top_logprobs: int,
        scored_prompt: int | None,
        behind: Behind = AT_ONCE,
        **more: bool,
    ) -> Ask:
        """One prompt for the engine. Arguments: see `sampling_params`; `more`: of `Ask`."""
        request = self.request
        params = sampling_params(
            request,
            self.served,
            max_tokens=max_tokens,
            stop=self.stop,
            top_logprobs=top_logprobs,
            scored_prompt=scored_prompt,
            defaults=self.served.sampling_defaults,
            renamed={
                "adapter": self._adapter,
                "routed_experts": self._routed_experts(),
                **hinted(kept_seconds(request.prompt_cache_retention, request), self.served),
            },
            behind=behind,
        )
        return Ask(
            prompt,
            params,
            self.num_samples,
            client_id=self.client_id,
            text=TextStyle(
                request.skip_special_tokens is False, bool(request.include_stop_str_in_output)
            ),
            limits=Limits(
                num_wanted=request.n_wanted,
                min_version=version_number(
                    request.min_weight_version, self.served, "min_weight_version"
                ),
            ),
            experts_by_default=request.routed_experts is None,
            **({"stream": scored_prompt is None} | more),  # scores come with the whole sample
        )

    def _routed_experts(self) -> bool | None:
        """Whether experts are told. Those of vLLM's server are, which trainers ask for token
        ids.
        """
        request = self.request
        if request.routed_experts is not None:
            return request.routed_experts
        recorded = self.served.engine.experts_per_token > 0
        return (recorded and bool(request.return_token_ids) and not request.stream) or None

    def cut(self, prompt: list[int], max_tokens: int | None) -> list[int]:
        """The prompt as short as the request wants it. `max_tokens`: of the completion; None: one
        at least.
        """
        most = self.request.truncate_prompt_tokens
        if most is None or len(prompt) <= most:
            return prompt
        if most == -1:
            most = max(1, self.served.engine.max_model_len - max(1, max_tokens or 1))
        if most == 0:
            raise bad_request(
                "truncate_prompt_tokens is 0, which leaves no prompt; give -1, or 1 or more.", _CUT
            )
        return prompt[:most] if self.request.truncation_side == "right" else prompt[-most:]

    # -- answers -----------------------------------------------------------------------------------

    def usage_of(self, usage: RequestUsage, choices: Sequence[Choice] = ()) -> dict[str, Any]:
        """Tokens, as clients see them."""
        told = usage_told(usage, self.served)
        if reasoning := self._reasoning_tokens(choices):
            told["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return told

    def _reasoning_tokens(self, choices: Sequence[Choice]) -> int:
        # Counted in the text: a piece may hold reasoning and content, and markers are in neither.
        if self.served.tokenizer is None or self.make_parser is None:
            return 0
        return sum(
            len(self.served.tokenizer.encode(each.reasoning)) for each in choices if each.reasoning
        )

    def event(
        self, choice: Mapping[str, Any], usage: RequestUsage, more: Mapping[str, Any] | None = None
    ) -> bytes:
        """One choice's news as an event; `more` stands beside the choices."""
        close, choice = self.close, self.without_nulls(choice)
        beside = self.without_nulls(more or {})
        if self.continuous_usage or beside:
            if self.include_usage:
                beside["usage"] = self.usage_of(usage) if self.continuous_usage else None
            close = b"]," + encode_line(beside)[1:] + b"\n\n"
        return self._open + encode_line(choice) + close

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """One choice's new text, with nothing else to tell."""
        raise NotImplementedError

    def text_event(self, index: int, text: str) -> bytes:
        """One choice's new text as an event that tells nothing else."""
        around = self._around.get(index)
        if around is None:
            choice = encode_line(self.without_nulls(self.text_choice(index, "")))
            before, _, after = choice.partition(b'""')  # the only empty string
            around = self._around[index] = (self._open + before, after + self.close)
        return around[0] + encode_line(text) + around[1]

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """The usage, if it is wanted, and the end's mark."""
        if not self.include_usage:
            return DONE
        return self._no_choice + encode_line(self.usage_of(usage, choices)) + b"}\n\n" + DONE

    def without_nulls(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """A part of an answer without the nulls that only vLLM sends, unless the server has `--rl`
        or the request has a field that OpenAI does not have.
        """
        return {
            name: value
            for name, value in told.items()
            if self._sends_nulls or value is not None or name not in _NULLS_OF_VLLM
        }

    def ending(self, sample: TrainingSample) -> dict[str, Any]:
        """What else is told of a choice that has ended."""
        told: dict[str, Any] = {
            "stop_reason": stop_reason(sample, self.served, self.request.stop_token_ids),
            "seed": sample.seed,
            "weight_version": self._version(sample.weight_version),
        }
        if self.served.config.rl or len(sample.weight_versions) > 1:
            told["weight_versions"] = version_spans(sample.weight_versions, self._version)
        if sample.sampling_mask is not None:
            mask = sample.sampling_mask
            told["sampling_mask"] = {"offsets": mask.offsets, "token_ids": mask.token_ids}
        told |= routed_experts_told(sample, npy_of)
        if sample.log_kept_mass is not None and self.request.raw_logprobs:
            told["log_kept_mass"] = sample.log_kept_mass
        return told

    def _version(self, version: int) -> int | str:
        """As trainers call it, where there are some; else the engine's number."""
        return self.served.version_name(version) if self.served.config.rl else version

    @property
    def names_ids(self) -> bool:
        """Whether logprobs name tokens by their ids: the request says so, or the server where it
        does not.
        """
        asked = self.request.return_tokens_as_token_ids
        return self.served.config.return_tokens_as_token_ids if asked is None else asked

    def token_text(self, token_id: int) -> str:
        """A token's name in logprobs."""
        if self.names_ids or self.texts is None:
            return token_name(token_id)
        return self.texts.text(token_id)

    def prompt_logprobs(self, sample: TrainingSample) -> LazyArray:
        """One entry a prompt token."""
        return prompt_rows(sample, self._decoded, self.num_prompt_logprobs)

    def _decoded(self, token_id: int) -> str | None:
        return None if self.texts is None else self.texts.text(token_id)
