"""From a request's fields to the engine's sampling parameters."""

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
from nano_inference.server.errors import ApiError, bad_request, shown
from nano_inference.types import MOST_KEPT_SECONDS, SamplingParams

_NONE: Mapping[str, float] = MappingProxyType({})


def kept_seconds(retention: Retention | None, fields: "SamplingFields") -> float | None:
    """How long a retention keeps the blocks of a request; None: it does not say. Raises
    `ApiError`.
    """
    if retention is None:
        return None
    seconds = MOST_KEPT_SECONDS if retention == "24h" else 0.0
    if fields.keep_cache_seconds not in (None, seconds):
        raise bad_request(
            f'prompt_cache_retention="{retention}" and keep_cache_seconds say different things; '
            "leave one of them out.",
            "prompt_cache_retention",
        )
    return seconds


def hinted(seconds: float | None, served: Served) -> dict[str, Any]:
    """Fields of `SamplingParams` of a time in the words of another API. There it is a hint: without
    a prefix cache it has no effect, nor has the priority that goes with it.
    """
    if not seconds:
        return {}
    if not served.engine.enable_prefix_caching:
        return {"cache_priority": 0}
    return {"keep_cache_seconds": seconds}


def checked_stop(stop: Sequence[str] | None, served: Served, name: str = "stop") -> tuple[str, ...]:
    """Stop strings within the limits. Raises `ApiError`, 400."""
    strings, config = tuple(stop or ()), served.config
    if len(strings) > config.max_stop:
        raise bad_request(
            f"{name} holds {len(strings)} strings; this server takes {config.max_stop}.", name
        )
    for string in strings:
        if not string:
            raise bad_request(
                f"{name} holds an empty string, which would end every answer at once.", name
            )
        if len(string) > config.max_stop_length:
            raise bad_request(
                f"{name} holds a string of {len(string)} characters; this server takes "
                f"{config.max_stop_length}.",
                name,
            )
    if strings:
        need_tokenizer(served)
    return strings


def require_logprobs(count: int, served: Served, name: str) -> None:
    """Raise `ApiError`, 400, for more logprobs a token than the server tells."""
    most = served.config.max_logprobs
    require_at_most(count, served.engine.vocab_size if most < 0 else most, name)


def require_routed_experts(served: Served, name: str) -> None:
    """Raise `ApiError`, 400, where the engine keeps no record of experts."""
    if not served.engine.experts_per_token:
        raise bad_request(
            f"{name}: this server keeps no record of routed experts; start it with "
            "--enable-return-routed-experts.",
            name,
        )


def num_logprobs(asked: int | None, served: Served, name: str) -> int | None:
    """How many logprobs a token are asked for; -1: of the whole vocabulary. Raises `ApiError`, 400,
    for too many.
    """
    count = served.engine.vocab_size if asked == -1 else asked
    require_logprobs(count or 0, served, name)
    return count


def version_number(name: object, served: Served, field: str) -> int | None:
    """The engine's number of a weight version that a client names, by a string or a number; None:
    it names none.

    Raises `ApiError`: 400 for something else, and for one that cannot come, 409 for a name that no
    version has or can get.
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
            409, f"there is no weight version {shown(name)}.", field, "weight_version_gone"
        )
    newest = served.engine.weight_version
    if number > newest and not served.config.rl:
        raise bad_request(
            f"{field}: version {shown(name)} cannot come: {newest} serves, and weights change "
            "only with --rl.",
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
    """The engine's parameters.

    Args:
        fields: of the request.
        served: has the limits.
        max_tokens: completion tokens at most.
        stop: see `checked_stop`.
        top_logprobs: most probable tokens to tell of each token.
        scored_prompt: and of each token of the prompt; None: the prompt is not scored.
        defaults: for what the request leaves out, such as `Served.sampling_defaults`; without them
            it is neutral.
        renamed: fields that the protocol names otherwise; None: they are left out.
        within: stands before the names of fields in what is said of a grammar.
        behind: what a grammar begins behind; see `behind_reasoning`.

    Raises:
        ApiError: 400, a value is beyond the limits, or a grammar is none.
        InvalidRequest: values that contradict each other.
    """
    vocab_size = served.engine.vocab_size
    given = fields.model_dump(include=_NAMES, exclude_none=True)
    given |= {name: value for name, value in renamed.items() if value is not None}
    if (top_k := given.get("top_k")) is not None:
        given["top_k"] = 0 if top_k < 0 else min(top_k, vocab_size)
    # OpenAI's range begins there; the engine's is of prefixes that hold something
    if given.get("top_p") == 0:
        del given["top_p"]
        given["top_k"] = 1
    if "seed" in given:
        given["seed"] %= 2**64  # a signed one is the unsigned one of the same bits
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"], vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in given:
            given[name] = _token_ids(given[name], name, vocab_size)
    if given.get("routed_experts"):
        require_routed_experts(served, f"{within}routed_experts")
    if scored_prompt is not None:
        given |= {"prompt_logprobs": True, "prompt_top_logprobs": scored_prompt}
    grammar = grammar_of(
        _said_of_grammars(fields, within), within, behind, served.engine.grammar_backend
    )
    if grammar is not None:
        need_tokenizer(served)
        given["grammar"] = grammar
    own = {"max_tokens": max_tokens, "stop": tuple(stop), "top_logprobs": top_logprobs}
    return SamplingParams(**{**defaults, **given, **own})


# each protocol has its own range of temperatures
_NAMES = {*SamplingFields.model_fields, "temperature"} - {*GrammarFields.model_fields}
_OF_GRAMMARS = {*GrammarFields.model_fields, *(name.split(".")[0] for name in ROWS)}
# What stands in a body that asks for a grammar; the last may hide a letter of a name.
_WORDS = (
    *(b"structured_outputs", b"guided_", b"response_format", b"output_format", b"output_config"),
    *(b"json_schema", b"json_object", b"regex", b"ebnf", b"grammar", b"structural_tag", b"\\u00"),
    *(b"tool_choice", b"strict"),
)


def may_ask_for_grammar(body: bytes) -> bool:
    """Whether reading a body may take seconds, because it holds a grammar."""
    return any(word in body for word in _WORDS)


def _said_of_grammars(fields: SamplingFields, within: str) -> dict[str, Any]:
    if fields.structured_outputs is not None:
        check_part(fields.structured_outputs, f"{within}structured_outputs")
    names = {name for name in fields.model_fields_set if name in _OF_GRAMMARS}
    return fields.model_dump(include=names, by_alias=True, exclude_unset=True) if names else {}


def _bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise bad_request(
                f"logit_bias has the key {shown(key)}; keys are token ids in [0, {vocab_size}), "
                "as strings.",
                "logit_bias",
            )
    return {int(key): value for key, value in bias.items()}


def _token_ids(ids: Sequence[int], name: str, vocab_size: int) -> frozenset[int]:
    kept = frozenset(ids)
    if kept and max(kept) >= vocab_size:
        raise bad_request(f"{name} holds {max(kept)}; token ids are in [0, {vocab_size}).", name)
    return kept
