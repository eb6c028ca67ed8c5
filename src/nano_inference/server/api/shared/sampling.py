"""Conversion of a request's fields to the engine's sampling parameters."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nano_inference.fields.options import is_whole
from nano_inference.server.api.parsing import (
    AT_ONCE,
    Behind,
)
from nano_inference.server.api.shared.fields import (
    GrammarFields,
    Retention,
    SamplingFields,
    check_part,
)
from nano_inference.server.api.shared.grammars import ROWS, grammar_of
from nano_inference.server.api.shared.prompts import need_tokenizer, require_at_most
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.api.shared.thoughts import take_budget
from nano_inference.server.errors import ApiError, bad_request, shown
from nano_inference.types import MOST_KEPT_SECONDS, SamplingParams

_NONE: Mapping[str, float] = MappingProxyType({})


def kept_seconds(retention: Retention | None, fields: "SamplingFields") -> float | None:
    """Return the seconds for which a retention keeps a request's blocks, or None if it is not set.
    Raises `ApiError`.
    """
    if retention is None:
        return None
    seconds = MOST_KEPT_SECONDS if retention == "24h" else 0.0
    if fields.keep_cache_seconds not in (None, seconds):
        raise bad_request(
            f'prompt_cache_retention="{retention}" and keep_cache_seconds contradict each other; '
            "omit one of them.",
            "prompt_cache_retention",
        )
    return seconds


def hinted(seconds: float | None, served: Served) -> dict[str, Any]:
    """Return fields of `SamplingParams` for a cache time from another API's field. Such a time is
    only a hint: without a prefix cache, time and priority have no effect.
    """
    if not seconds:
        return {}
    if not served.engine.enable_prefix_caching:
        return {"cache_priority": 0}
    return {"keep_cache_seconds": seconds}


def checked_stop(stop: Sequence[str] | None, served: Served, name: str = "stop") -> tuple[str, ...]:
    """Return the stop strings if they are within the limits. Raises `ApiError` 400."""
    strings, config = tuple(stop or ()), served.config
    if len(strings) > config.max_stop:
        raise bad_request(
            f"{name} holds {len(strings)} strings; this server accepts at most {config.max_stop}.",
            name,
        )
    for string in strings:
        if not string:
            raise bad_request(
                f"{name} holds an empty string, which would end every answer at its start.",
                name,
            )
        if len(string) > config.max_stop_length:
            raise bad_request(
                f"{name} holds a string of {len(string)} characters; this server accepts at most "
                f"{config.max_stop_length}.",
                name,
            )
    if strings:
        need_tokenizer(served)
    return strings


def require_logprobs(count: int, served: Served, name: str) -> None:
    """Raise `ApiError` 400 for more logprobs per token than the server reports."""
    most = served.config.max_logprobs
    require_at_most(count, served.engine.vocab_size if most < 0 else most, name)


def require_routed_experts(served: Served, name: str) -> None:
    """Raise `ApiError` 400 if the engine does not record experts."""
    if not served.engine.experts_per_token:
        raise bad_request(
            f"{name}: this server keeps no record of routed experts; start it with "
            "--enable-return-routed-experts.",
            name,
        )


def num_logprobs(asked: int | None, served: Served, name: str) -> int | None:
    """Return the number of logprobs per token that a request asks for. -1 is the whole vocabulary.
    Raises `ApiError` 400 if there are too many.
    """
    count = served.engine.vocab_size if asked == -1 else asked
    require_logprobs(count or 0, served, name)
    return count


def version_number(name: object, served: Served, field: str) -> int | None:
    """Return the engine's number of the weight version that a client names by a string or a number.
    None: the client names none.

    Raises `ApiError`: 400 for a malformed name and for a version that cannot come, 409 for a name
    that no version has or can get.
    """
    if name is None:
        return None
    if is_whole(name, 0) and name < 2**63:
        name = str(name)
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        raise bad_request(
            f"{field} must be the name of a weight version, not {shown(name)}.", field
        )
    number = served.version_number(name)
    if number is None:
        raise ApiError(
            409, f"weight version {shown(name)} does not exist.", field, "weight_version_gone"
        )
    newest = served.engine.weight_version
    if number > newest and not served.config.rl:
        raise bad_request(
            f"{field}: version {shown(name)} cannot become live: version {newest} is live, and "
            "weights change only with --rl.",
            field,
        )
    return number


def sampling_params(
    fields: SamplingFields,
    served: Served,
    *,
    max_tokens: int,
    stop: Sequence[str] = (),
    top_logprobs: int = 0,
    scored_prompt: int | None = None,
    defaults: Mapping[str, float] = _NONE,
    renamed: Mapping[str, Any] = _NONE,
    within: str = "",
    behind: Behind = AT_ONCE,
) -> SamplingParams:
    """Return the engine's sampling parameters for a request.

    Args:
        fields: Fields of the request.
        served: Served model, with its limits.
        max_tokens: Maximum number of completion tokens.
        stop: Stop strings, from `checked_stop`.
        top_logprobs: Number of most probable tokens to report per token.
        scored_prompt: Number of most probable tokens to report per prompt token. None: the prompt
            is not scored.
        defaults: Values of omitted fields, such as `Served.sampling_defaults`. Empty: neutral ones.
        renamed: Fields that the protocol names differently. None: omitted.
        within: Prefix of field names in errors about grammars.
        behind: Text that precedes the grammar, from `behind_reasoning`.

    Raises:
        ApiError: 400, a value is beyond the limits, or a grammar is invalid.
        InvalidRequest: Values contradict each other.
    """
    vocab_size = served.engine.vocab_size
    options = fields.model_dump(include=_NAMES, exclude_none=True)
    options |= {name: value for name, value in renamed.items() if value is not None}
    if (top_k := options.get("top_k")) is not None:
        options["top_k"] = 0 if top_k < 0 else min(top_k, vocab_size)
    # 0 is valid for OpenAI, but the engine needs a prefix with at least one token
    if options.get("top_p") == 0:
        del options["top_p"]
        options["top_k"] = 1
    if "seed" in options:
        options["seed"] %= 2**64  # a negative seed is the unsigned one of the same bits
    if "logit_bias" in options:
        options["logit_bias"] = _bias(options["logit_bias"], vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in options:
            options[name] = _token_ids(options[name], name, vocab_size)
    if options.get("routed_experts"):
        require_routed_experts(served, f"{within}routed_experts")
    if scored_prompt is not None:
        options |= {"prompt_logprobs": True, "prompt_top_logprobs": scored_prompt}
    take_budget(options, within)
    grammar = grammar_of(
        _said_of_grammars(fields, within), within, behind, served.engine.grammar_backend
    )
    if grammar is not None:
        need_tokenizer(served)
        options["grammar"] = grammar
    fixed = {"max_tokens": max_tokens, "stop": tuple(stop), "top_logprobs": top_logprobs}
    return SamplingParams(**{**defaults, **options, **fixed})


# each protocol has its own range of temperatures
_NAMES = {*SamplingFields.model_fields, "temperature"} - {*GrammarFields.model_fields}
_OF_GRAMMARS = {*GrammarFields.model_fields, *(name.split(".")[0] for name in ROWS)}
# words in bodies that ask for a grammar; the escape may hide a letter of such a word
_WORDS = (
    *(b"structured_outputs", b"guided_", b"response_format", b"output_format", b"output_config"),
    *(b"json_schema", b"json_object", b"regex", b"ebnf", b"grammar", b"structural_tag", b"\\u00"),
    *(b"tool_choice", b"strict", b'"format"'),
)


def may_ask_for_grammar(body: bytes) -> bool:
    """Return True if a body may hold a grammar, so that reading it may take seconds."""
    return any(word in body for word in _WORDS)


def _said_of_grammars(fields: SamplingFields, within: str) -> dict[str, Any]:
    if fields.structured_outputs is not None:
        check_part(fields.structured_outputs, f"{within}structured_outputs")
    names = fields.model_fields_set & _OF_GRAMMARS & type(fields).model_fields.keys()
    return fields.model_dump(include=names, by_alias=True, exclude_unset=True) if names else {}


def _bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise bad_request(
                f"logit_bias has the key {shown(key)}; keys are token ids in "
                f"[0, {vocab_size}), as strings.",
                "logit_bias",
            )
    return {int(key): value for key, value in bias.items()}


def _token_ids(ids: Sequence[int], name: str, vocab_size: int) -> frozenset[int]:
    kept = frozenset(ids)
    if kept and max(kept) >= vocab_size:
        raise bad_request(f"{name} holds {max(kept)}; token ids are in [0, {vocab_size}).", name)
    return kept
