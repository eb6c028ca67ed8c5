"""Parts of answers that OpenAI's two protocols share: ids, usage, errors, logprobs, events."""

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
    named_tops,
    npy_of,
    prompt_rows,
    receipt_told,
    routed_experts_told,
    token_name,
    version_spans,
)
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta, TextStyle
from nano_inference.server.api.shared.prompts import adapter_of, require_at_most
from nano_inference.server.api.shared.protocol import Ask, Builder, RequestUsage, Served
from nano_inference.server.api.shared.sampling import (
    checked_stop,
    hinted,
    kept_seconds,
    num_logprobs,
    require_logprobs,
    sampling_params,
    version_number,
)
from nano_inference.server.errors import bad_request
from nano_inference.types import Limits, TopLogprobs, TrainingSample


def fingerprint(served: Served) -> str:
    """Return OpenAI's fingerprint. Equal fingerprints mean that answers were computed equally."""
    text = f"{served.engine.model_path} {served.engine.numerics}".encode()
    return f"fp_{hashlib.sha256(text).hexdigest()[:12]}"


def usage_wanted(options: StreamOptions | None, *, stream: bool) -> tuple[bool, bool]:
    """Return two flags: True if a stream ends with the usage, and True if each of its events has
    it. Raises `ApiError` 400.
    """
    if options is None:
        return False, False
    if not stream:
        raise bad_request(
            "stream_options requires stream: true; set stream, or omit stream_options.",
            "stream_options",
        )
    return bool(options.include_usage), bool(
        options.include_usage and options.continuous_usage_stats
    )


def usage_told(usage: RequestUsage, served: Served) -> dict[str, Any]:
    """Return the numbers of tokens for the client."""
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if not served.config.hide_cached_tokens:
        fields["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return fields


def stop_reason(
    sample: TrainingSample, served: Served, stop_token_ids: Sequence[int] | None
) -> str | int | None:
    """Return vLLM's stop reason of a sample: None for an end-of-sequence id of the model, unless
    the request has the id in its `stop_token_ids`.
    """
    reason = sample.stop_reason
    is_implicit = reason in served.engine.eos_token_ids and reason not in (stop_token_ids or ())
    return None if is_implicit else reason


_CUT = "truncate_prompt_tokens"


# fields that vLLM sends as null if they have no value; OpenAI omits them
_NULLS_OF_VLLM = frozenset(
    (
        *("token_ids", "prompt_token_ids", "prompt_logprobs", "routed_experts", "stop_reason"),
        *("kv_transfer_params", "reasoning", "reasoning_content"),
    )
)


class OpenAIBuilder(Builder):
    """Base of the builders of completions and chat completions.

    Args:
        request: Request, whose shared fields are checked here.
        served: Served model.
        request_id: Id of the request, used in the answer's id.
        kind: `object` of an answer.
        chunk_kind: `object` of an event.
        prefix: Prefix of the answer's id.
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
        # clients of vLLM read these fields without checking if they are present
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

    def tops_of(self, piece: ChoiceDelta) -> Sequence[TopLogprobs]:
        """Return the candidates of each token: the ids that the client named, or the most probable
        tokens.
        """
        if piece.token_id_logprobs is not None:
            return named_tops(self.request.logprob_token_ids or (), piece.token_id_logprobs)
        return piece.top_logprobs or (TopLogprobs((), ()),) * len(piece.token_ids)

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
        """Return the `Ask` of one prompt. `more` holds further fields of `Ask`."""
        request = self.request
        named = request.logprob_token_ids or ()
        require_logprobs(len(named), self.served, "logprob_token_ids")
        params = sampling_params(
            request,
            self.served,
            max_tokens=max_tokens,
            stop=self.stop,
            top_logprobs=0 if named else top_logprobs,
            scored_prompt=scored_prompt,
            defaults=self.served.sampling_defaults,
            renamed={
                "adapter": self._adapter,
                "routed_experts": self._routed_experts(),
                "logprob_token_ids": named,
                "receipt": request.receipt,
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
            **({"stream": scored_prompt is None} | more),  # scores are only in the whole sample
        )

    def _routed_experts(self) -> bool | None:
        """Return True if experts are reported. By default they are for clients that ask for token
        ids, because these are trainers, and vLLM's server reports experts to them.
        """
        request = self.request
        if request.routed_experts is not None:
            return request.routed_experts
        recorded = self.served.engine.experts_per_token > 0
        return (recorded and bool(request.return_token_ids) and not request.stream) or None

    def cut(self, prompt: list[int], max_tokens: int | None) -> list[int]:
        """Return the prompt, truncated as the request asks, and count what is gone. `max_tokens` is
        the limit of the completion. None: reserve one token.
        """
        most = self.request.truncate_prompt_tokens
        if most is None or len(prompt) <= most:
            return prompt
        if most == -1:
            most = max(1, self.served.engine.max_model_len - max(1, max_tokens or 1))
        if most == 0:
            raise bad_request(
                "truncate_prompt_tokens is 0, which leaves no prompt; give -1 or at least 1.", _CUT
            )
        self.num_truncated += len(prompt) - most
        return prompt[:most] if self.request.truncation_side == "right" else prompt[-most:]

    # -- answers -----------------------------------------------------------------------------------

    def usage_of(self, usage: RequestUsage, choices: Sequence[Choice] = ()) -> dict[str, Any]:
        """Return the numbers of tokens for the client, with those of the choices' reasoning."""
        fields = usage_told(usage, self.served)
        if reasoning := self._reasoning_tokens(choices):
            fields["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return fields

    def _reasoning_tokens(self, choices: Sequence[Choice]) -> int:
        # counted in the text: a piece may hold reasoning and content, and markers are in neither
        if self.served.tokenizer is None or self.make_parser is None:
            return 0
        return sum(
            len(self.served.tokenizer.encode(each.reasoning)) for each in choices if each.reasoning
        )

    def event(
        self, choice: Mapping[str, Any], usage: RequestUsage, more: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return an event with one choice's new part. `more` holds fields next to the choices."""
        close, choice = self.close, self.without_nulls(choice)
        extra = self.without_nulls(more or {})
        if self.continuous_usage or extra:
            if self.include_usage:
                extra["usage"] = self.usage_of(usage) if self.continuous_usage else None
            close = b"]," + encode_line(extra)[1:] + b"\n\n"
        return self._open + encode_line(choice) + close

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """Return a choice with new text and no other values."""
        raise NotImplementedError

    def text_event(self, index: int, text: str) -> bytes:
        """Return an event with one choice's new text and no other values."""
        around = self._around.get(index)
        if around is None:
            choice = encode_line(self.without_nulls(self.text_choice(index, "")))
            before, _, after = choice.partition(b'""')  # the only empty string
            around = self._around[index] = (self._open + before, after + self.close)
        return around[0] + encode_line(text) + around[1]

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """Return the usage, if the client asked for it, and the end of the stream."""
        if not self.include_usage:
            return DONE
        return self._no_choice + encode_line(self.usage_of(usage, choices)) + b"}\n\n" + DONE

    def without_nulls(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a part of an answer without nulls that only vLLM sends. Nulls are kept if the
        server has `--rl`, or the request has a field that OpenAI does not have.
        """
        return {
            name: value
            for name, value in fields.items()
            if self._sends_nulls or value is not None or name not in _NULLS_OF_VLLM
        }

    def ending(self, sample: TrainingSample) -> dict[str, Any]:
        """Return the fields of a finished choice that OpenAI does not have."""
        fields: dict[str, Any] = {
            "stop_reason": stop_reason(sample, self.served, self.request.stop_token_ids),
            "seed": sample.seed,
            "weight_version": self._version(sample.weight_version),
        }
        if self.served.config.rl or len(sample.weight_versions) > 1:
            fields["weight_versions"] = version_spans(sample.weight_versions, self._version)
        if sample.sampling_mask is not None:
            mask = sample.sampling_mask
            fields["sampling_mask"] = {"offsets": mask.offsets, "token_ids": mask.token_ids}
        fields |= routed_experts_told(sample, npy_of)
        fields |= receipt_told(sample, hides_cached=self.served.config.hide_cached_tokens)
        if sample.log_kept_mass is not None and self.request.raw_logprobs:
            fields["log_kept_mass"] = sample.log_kept_mass
        return fields

    def _version(self, version: int) -> int | str:
        """Return the trainer's name of a weight version with `--rl`, else the engine's number."""
        return self.served.version_name(version) if self.served.config.rl else version

    @property
    def names_ids(self) -> bool:
        """True if logprobs name tokens by their ids. If the request does not say, the server's
        setting decides.
        """
        asked = self.request.return_tokens_as_token_ids
        return self.served.config.return_tokens_as_token_ids if asked is None else asked

    def token_text(self, token_id: int) -> str:
        """Return the name of a token in logprobs."""
        if self.names_ids or self.texts is None:
            return token_name(token_id)
        return self.texts.text(token_id)

    def prompt_logprobs(self, sample: TrainingSample) -> LazyArray:
        """Return one entry per prompt token."""
        return prompt_rows(sample, self._decoded, self.num_prompt_logprobs)

    def _decoded(self, token_id: int) -> str | None:
        return None if self.texts is None else self.texts.text(token_id)
