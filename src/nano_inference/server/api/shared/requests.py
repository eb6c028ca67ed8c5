"""From a body's bytes to a checked request: strict JSON within limits, tables of fields that are
implemented, ignored or refused, the engine's parameters, and the prompt's token ids.
"""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from nano_inference.fields.options import is_whole
from nano_inference.server.api.parsing import (
    AT_ONCE,
    Behind,
    ChatFormat,
    OutputParser,
    make_parser,
    reasoning_before,
)
from nano_inference.server.api.shared.generation import Builder, Served
from nano_inference.server.api.shared.grammars import ROWS, grammar_of
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import SHOWN, ApiError, bad_request, shown
from nano_inference.text.chat import encode_chat
from nano_inference.text.detokenizer import SPECIAL_MARK, Detokenizer
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import MOST_KEPT_SECONDS, SamplingParams

MAX_CONTAINERS = 200_000  # `[],[],[]...` takes thirty times its length as Python objects
MAX_KEYS = 200_000  # of all objects together

# Every pattern takes about a megabyte at most: between two matches others run.
# Numbers, words, commas, colons and strings that are not long.
_RUN = re.compile(rb'(?:[^"\[\]{}]{1,1024}+|"(?:[^"\\]{1,256}+|\\.){0,64}+"){1,64}+', re.DOTALL)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# A piece of a longer string, and its end if the piece reaches it.
_PIECE = re.compile(rb'(?:[^"\\]{1,1024}+|\\.){1,1024}+("?)|"', re.DOTALL)


def check_json(body: bytes, max_depth: int, max_values: int) -> None:
    """Refuse what nests deeper than `max_depth`, or has too many values, keys, or lists and
    objects.

    Raises `ApiError` 400.
    """
    containers = body.count(b"[") + body.count(b"{")
    if containers <= max_depth and body.count(b",") < max_values and body.count(b":") <= MAX_KEYS:
        return  # nearly always, and at once: what stands in strings is counted as well
    depth = containers = values = keys = 0
    for token in _tokens(body):
        if token in b"]}":
            depth -= 1
        elif token in b"[{":
            depth += 1
            containers += 1
            _require(depth, max_depth, "nests deeper than {} levels")
            _require(containers, MAX_CONTAINERS, "has more than {} lists and objects")
        else:
            values += token.count(b",")
            keys += token.count(b":")
            _require(keys, MAX_KEYS, "has more than {} keys")
            _require(values, max_values, "has more than {} values (max_values)")


def _require(number: int, most: int, what: str) -> None:
    if number > most:
        raise bad_request(f"the body {what.format(most)}.")


def _tokens(body: bytes) -> Iterator[bytes]:
    """Brackets, and runs of what stands between them, without the strings."""
    place = 0
    while place < len(body):
        if run := _RUN.match(body, place):
            place = run.end()
            if rest := _STRING.sub(b"", run[0]):
                yield rest
        elif body[place] != _QUOTE:
            yield body[place : place + 1]
            place += 1
        else:
            place = _end_of_string(body, place + 1)


def _end_of_string(body: bytes, place: int) -> int:
    while piece := _PIECE.match(body, place):
        place = piece.end()
        if piece[1] or piece[0] == b'"':
            return place
    return len(body)  # it has none


_QUOTE = ord('"')


log = logging.getLogger("nano_inference.server")

MAX_UNKNOWN_NAMES = 256  # field names that are remembered as logged

_unknown_names: set[str] = set()
_unknown_lock = threading.Lock()


def _with_other_fields(schema: dict[str, Any], model: "type[Strict]") -> None:
    """Add to a model's schema the fields that it ignores, and those that it sends elsewhere."""
    properties = schema.setdefault("properties", {})
    for name in (*model.ignored, *model.elsewhere):
        title = {"title": name.replace("_", " ").title()}
        properties[name] = title if name in model.ignored else title | {"type": "null"}


class Strict(BaseModel):
    """A part of a request: numbers are numbers, nothing is converted; unknown fields are kept in
    `model_extra`. Its fields are what is implemented.

    Attributes:
        ignored: fields that are accepted, whatever they say, and change nothing.
        refused: fields that are known and not supported -> the values that change nothing, which
            are accepted, as null is.
        elsewhere: fields of other protocols, refused unless they are empty -> what to do instead.
    """

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        frozen=True,
        regex_engine="rust-regex",
        json_schema_extra=_with_other_fields,
    )
    ignored: ClassVar[Sequence[str]] = ()
    refused: ClassVar[dict[str, Sequence[Any]]] = {}
    elsewhere: ClassVar[Mapping[str, str]] = {}


Model = TypeVar("Model", bound=Strict)


def read_body(body: bytes, model: type[Model], config: ServerConfig) -> Model:
    """The request that a body holds. Unknown fields are accepted, and logged once a name.

    Args:
        body: JSON. NaN, infinities, numbers beyond a double, lone surrogates and bytes that are not
            UTF-8 are refused.
        model: of the request.
        config: the server's limits.

    Raises:
        ApiError: 400, naming the field.
    """
    given = decode(body, config)
    _refuse_unsupported(given, model.refused)
    for name, remedy in model.elsewhere.items():
        # null, false, zero and nothing are harmless, and so is one answer
        if (value := given.pop(name, None)) and (name, value) != ("n", 1):
            raise bad_request(f"{name}: not supported here; {remedy}", name)
    _require_bias(given, config.max_logit_bias)
    request = validated(model, given)
    log_unknown(request)
    return request


def validated(model: type[Model], given: Mapping[str, Any]) -> Model:
    """The model of these fields. Raises `ApiError` 400, naming the field."""
    try:
        return model.model_validate(given)
    except ValidationError as problem:
        raise bad_request(*_said(problem)) from None


def check_part(part: Strict, name: str) -> None:
    """What `read_body` checks of a request, of an object in its field `name`."""
    _refuse_unsupported(part.model_extra or {}, part.refused, f"{name}.")
    log_unknown(part)


def _refuse_unsupported(
    given: Mapping[str, Any], refused: Mapping[str, Sequence[Any]], within: str = ""
) -> None:
    for name, harmless in refused.items():
        value = given.get(name)
        if value is not None and not any(_same(value, each) for each in harmless):
            where = within + name
            raise bad_request(
                f"{where} is not supported by this server; leave it out.",
                where,
                "unsupported_parameter",
            )


def decode(body: bytes, config: ServerConfig) -> dict[str, Any]:
    """The JSON object that a body holds, within the server's limits. Raises `ApiError`, 400."""
    check_json(body, config.max_depth, config.max_values)
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise bad_request(f"the body is not valid JSON: {problem}") from None
    if not isinstance(given, dict):
        raise bad_request("the body must be a JSON object.")
    return given


def _require_bias(given: Mapping[str, Any], most: int) -> None:
    """Refuse too long a `logit_bias` before each entry is validated, in which others would wait."""
    nested = given.get("sampling_params")  # of vLLM's and SGLang's own routes
    for fields in (given, nested) if isinstance(nested, dict) else (given,):
        bias = fields.get("logit_bias")
        if isinstance(bias, dict) and len(bias) > most:
            raise bad_request(
                f"logit_bias has {len(bias)} entries; this server takes {most}.", "logit_bias"
            )


def _same(value: object, other: object) -> bool:
    return (
        type(value) is type(other) and value == other if isinstance(value, bool) else value == other
    )


def _said(problem: ValidationError) -> tuple[str, str | None]:
    """What is wrong first, and where."""
    first = problem.errors(include_url=False)[0]
    places = [str(each)[:SHOWN] for each in first["loc"]]
    # <these> are tags of our own
    where = ".".join(each for each in places if not each.startswith("<"))
    kind = first["type"]
    if kind == "missing":
        return f"{where} is missing.", where
    if kind == "value_error":
        what = first["msg"].removeprefix("Value error, ")
        return f"{where}: {what}" if where else what, where or None
    what = _WANTED.get(kind, first["msg"].removeprefix("Input should be ")).format(
        **first.get("ctx", {})
    )
    return f"{where} must be {what}, not {shown(first['input'])}.", where


# pydantic's kinds of errors -> what to send instead, in JSON's words
_WANTED: Mapping[str, str] = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "string_too_short": "a string of {min_length} characters or more",
    "string_too_long": "a string of {max_length} characters or less",
    "too_short": "a list of {min_length} or more",
}


def log_unknown(part: Strict) -> None:
    """Log field names that no table knows, once each."""
    for name in part.model_extra or ():
        if name in part.refused or name in part.ignored:
            continue
        name = name[:SHOWN]
        with _unknown_lock:
            new = name not in _unknown_names and len(_unknown_names) < MAX_UNKNOWN_NAMES
            if new:
                _unknown_names.add(name)
        if new:
            log.warning("requests hold an unknown field, which is ignored: %s", json.dumps(name))


MOST = 2**31 - 1
_NONE: Mapping[str, float] = MappingProxyType({})

TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MOST)]], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]


def _one_or_many(value: object) -> object:
    if isinstance(value, list | str):
        return [value] if isinstance(value, str) else value
    raise PydanticCustomError("one_or_many", "Input should be a string or a list of strings")


# A string or a list of strings; read as a list.
OneOrMany = Annotated[
    Strings,
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


def _count_of_flag(value: object) -> object:
    return value if not isinstance(value, bool) else 0 if value else None


# How many of the most probable tokens to tell for each prompt token; `true` is 0: the prompt's own
# alone; -1: all.
PromptLogprobs = Annotated[
    int | None,
    Field(ge=-1, le=MOST),
    BeforeValidator(_count_of_flag),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": -1}, {"type": "boolean"}, {"type": "null"}]}
    ),
]


def _of(*types: str) -> WithJsonSchema:
    return WithJsonSchema({"type": [*types, "null"]})


# Checked where the grammar is made of it.
Schema = Annotated[Any, _of("object", "boolean", "string")]
Tag = Annotated[Any, _of("object", "string")]


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one grammar, and how it is to be taken."""

    json_: Schema = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    structural_tag: Tag = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    lenient: bool | None = Field(
        None, description="pass over keywords of a schema that cannot be enforced"
    )
    disable_additional_properties: bool | None = Field(
        None, description="objects of a schema that names their properties have no others"
    )
    backend: str | None = Field(None, description="that makes the masks, as vLLM names it")


class GrammarFields(Strict):
    """What asks for structured output, in the words of vLLM, old and new, TRL, SGLang and
    llama.cpp. What it means: `grammars.ROWS`.
    """

    structured_outputs: StructuredOutputs | None = None
    structured_outputs_regex: str | None = None
    guided_decoding_regex: str | None = None
    guided_json: Schema = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    json_schema: Schema = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = Field(None, description="llama.cpp's notation, or Lark's")
    structural_tag: Tag = None


class SamplingFields(GrammarFields):
    """The engine's own sampling parameters, which every protocol takes beside its own. Null: the
    default.
    """

    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="0: the most probable token alone"
    )
    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(None, description="0 and -1: all")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="token id, as a string -> bias"
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    raw_logprobs: bool | None = None
    sampling_mask: bool | None = None
    routed_experts: bool | None = Field(
        None, description="the experts of each token; needs --enable-return-routed-experts"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    keep_cache_seconds: Annotated[float, Field(ge=0, le=MOST_KEPT_SECONDS)] | None = Field(
        None, description="the cache keeps the sample's blocks for so long after its end"
    )
    cache_priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None, description="higher is evicted later; needs keep_cache_seconds"
    )
    # What other engines have.
    refused = {
        "logits_processors": ([],),
        "custom_logit_processor": (),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "typical_p": (1, 1.0),
        "bad_words": ([],),
        "stop_regex": ([], ""),
        "prompt_embeds": (),
        "truncate_prompt_tokens": (-1,),
        "logprob_token_ids": ([],),
        "thinking_token_budget": (),
        "kv_transfer_params": ({},),
        "lora_path": (),
        "vllm_xargs": ({},),
    }


# OpenAI's word for `keep_cache_seconds`
Retention = Literal["in-memory", "in_memory", "24h"]
RETENTION: Any = Field(
    None, description="24h: keep_cache_seconds=86400; in-memory: blocks are evicted like others"
)


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


def adapter_of(name: str | None, served: Served, field: str = "model") -> str | None:
    """The adapter that a client asks for by the name of a model; None: the model alone, by one of
    its names or none. Raises `ApiError`, 404, for any other name.
    """
    if name is None or name in served.all_names or name == served.engine.model_path:
        return None
    if name in (loaded := served.adapters()):
        return name
    known = ", ".join(map(shown, (served.name, *sorted(loaded))))
    raise ApiError(
        404,
        f"the model {shown(name)} does not exist; this server has {known}.",
        field,
        "model_not_found",
    )


def need_tokenizer(served: Served) -> Tokenizer:
    """The tokenizer. Raises `ApiError`, 400, where the model has none."""
    if served.tokenizer is None:
        raise bad_request(
            "the model has no tokenizer; only prompts of token ids can be served, by "
            "/v1/completions."
        )
    return served.tokenizer


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


def require_at_most(value: int, limit: int, name: str, what: str | None = None) -> None:
    """Raise `ApiError`, 400, if `value` is beyond `limit`. `what` it counts, if that is not the
    field itself.
    """
    if value > limit:
        raise bad_request(
            f"{what or name} is {shown(value)}; this server takes at most {limit}.", name
        )


def checked_prompt(
    token_ids: list[int], served: Served, name: str = "prompt", least: int = 1
) -> list[int]:
    """`token_ids`, if they are a prompt that the model could read and that leaves room for `least`
    completion tokens. Raises `ApiError`, 400.
    """
    engine = served.engine
    if not token_ids:
        raise bad_request(f"{name} is empty; give at least one token.", name)
    if len(token_ids) + least > engine.max_model_len:
        raise too_long(len(token_ids), least, served, name)
    if not all(type(each) is int for each in token_ids):
        raise bad_request(f"{name} must be text or a list of token ids.", name)
    if min(token_ids) < 0 or max(token_ids) >= engine.vocab_size:
        wrong = next(each for each in token_ids if not 0 <= each < engine.vocab_size)
        raise bad_request(
            f"{name} holds {shown(wrong)}; token ids are in [0, {engine.vocab_size}).", name
        )
    return token_ids


def prompt_list(given: object, name: str) -> list[str | list[int]]:
    """Prompts that are given as text, as token ids, or as a list of these. Raises `ApiError`,
    400.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise bad_request(
            f"{name} must be text, token ids or a list of these, not {shown(given)}.", name
        )
    if not given:
        raise bad_request(f"{name} is empty; give at least one token.", name)
    if type(given[0]) is int:
        return [given]
    for each in given:
        if not isinstance(each, str | list):
            raise bad_request(
                f"{name} holds {shown(each)}; it must be text, token ids or a list of these.", name
            )
    return given


def room(
    token_ids: Sequence[int], asked: int | None, served: Served, default: int | None, name: str
) -> int:
    """Completion tokens at most.

    Args:
        token_ids: the prompt.
        asked: what the client wants; None: `default`, or what the context leaves if that is less.
        served: has the context's length.
        default: None: all that the context leaves.
        name: of the client's field.

    Raises:
        ApiError: 400, if prompt and `asked` do not fit together.
    """
    left = served.engine.max_model_len - len(token_ids)
    if asked is None:
        return left if default is None else min(left, default)
    if asked > left:
        raise too_long(len(token_ids), asked, served, name)
    return asked


def too_long(num_prompt_tokens: int, max_tokens: int, served: Served, name: str) -> ApiError:
    """400: it does not fit into the context."""
    limit = served.engine.max_model_len
    left = limit - num_prompt_tokens
    remedy = (
        f"shorten {name}"
        if left < 1 or name in ("prompt", "messages")
        else f"lower {name} to {left}"
    )
    return bad_request(  # clients that shorten conversations by themselves look for OpenAI's words
        f"This model's maximum context length is {limit} tokens, and the request is longer: "
        f"{num_prompt_tokens} in the "
        f"prompt and {shown(max_tokens)} for the completion; {remedy}.",
        name,
        "context_length_exceeded",
    )


def require_possible_length(text: str, served: Served, name: str) -> None:
    """Refuse a text that cannot fit whatever its tokens are, before time is spent on it. Raises
    `ApiError`, 400.
    """
    longest = served.longest_token
    if longest is not None and len(text) > longest * served.engine.max_model_len:
        raise bad_request(
            f"{name} has {len(text)} characters, more than the model's context of "
            f"{served.engine.max_model_len} tokens "
            "can hold.",
            name,
            "context_length_exceeded",
        )


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


def text_of(content: object, where: str) -> str:
    """The text of a message's content: a string, nothing, or a list of text parts. Raises
    `ApiError`, 400.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(
            f"{where} must be a string or a list of parts, not {shown(content)}.", where
        )
    texts = [_text_of_part(part, f"{where}.{place}") for place, part in enumerate(content)]
    return "\n".join(text for text in texts if text)


def _text_of_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise bad_request(f"{where} must be an object with a type, not {shown(part)}.", where)
    if kind not in ("text", "refusal"):
        raise bad_request(f"{where} is of type {shown(kind)}; this model reads text alone.", where)
    text = part.get(kind)
    if not isinstance(text, str):
        raise bad_request(f"{where}.{kind} must be a string, not {shown(text)}.", f"{where}.{kind}")
    return text


def arguments_of(arguments: object, served: Served, where: str) -> dict[str, Any]:
    """A tool call's arguments, which come as JSON text. Raises `ApiError`, 400, unless they are an
    object.
    """
    value: object = arguments or {}
    if isinstance(arguments, str) and arguments:
        try:
            value = decode(arguments.encode(), served.config)
        except ApiError:
            value = None
    if not isinstance(value, dict):
        raise bad_request(
            f"{where} must be the JSON text of an object, not {shown(arguments)}.", where
        )
    return value


_TAIL = 64  # tokens of a prompt that say whether its template has opened the reasoning


def encode_conversation(
    messages: Sequence[Mapping[str, Any]],
    served: Served,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, object],
    add_generation_prompt: bool,
    continue_final_message: bool,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_special_tokens: bool = False,
) -> list[int]:
    """The token ids of a conversation. Arguments: see `encode_chat`; with `add_special_tokens` what
    the tokenizer puts around a text stands around it too. Raises `ApiError` and `InvalidRequest`.
    """
    tokenizer = need_tokenizer(served)
    if tools:
        require_at_most(len(tools), served.config.max_tools, "tools", "the number of tools")
        if served.chat_format.tools is None:
            _say_once()
    require_possible_length("".join(each["content"] or "" for each in messages), served, "messages")
    token_ids = encode_chat(
        tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
        documents=documents,
    )
    return _around(token_ids, tokenizer) if add_special_tokens else token_ids


def _around(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids between those that the tokenizer puts around any text."""
    bare, whole = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=True)
    begin = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return [*whole[:begin], *token_ids, *whole[begin + len(bare) :]]


@cache
def _say_once() -> None:
    log.warning(
        "a request offers tools, and this model's way to write calls is not known: its answers are "
        "text, unless it writes calls as hermes has them or tool_choice forces one; "
        "--tool-format names a way."
    )


def behind_reasoning(
    prompt: Sequence[int], served: Served, *, goes_on: bool = False, parsed: bool = True
) -> Behind:
    """What the grammar of the answer to a prompt begins behind.

    Args:
        prompt: token ids.
        served: knows how the model writes.
        goes_on: the prompt ends with the beginning of the answer.
        parsed: the answer tells reasoning apart, where it can see the markers.
    """
    if served.chat_format.reasoning is None:
        return AT_ONCE
    added = need_tokenizer(served).backend.get_added_tokens_decoder().values()
    hidden = {token.content for token in added if token.special and parsed}
    return reasoning_before(
        served.chat_format, prompt_tail=tail_of(prompt, served), goes_on=goes_on, hidden=hidden
    )


def tail_of(prompt: Sequence[int], served: Served) -> str:
    """The last words of a prompt, as `make_parser` has them."""
    return need_tokenizer(served).decode(prompt[-_TAIL:], skip_special_tokens=False)


def parser_of(
    prompt: Sequence[int], served: Served, *, tools: bool, format: ChatFormat | None = None
) -> Callable[[], OutputParser] | None:
    """Makes the parser of each answer to a prompt; None: all that the model can say is content.

    Args:
        prompt: token ids.
        served: knows how the model writes.
        tools: whether the model was shown tools.
        format: of the answers; None: the model's.
    """
    format = served.chat_format if format is None else format
    if not (format.reasoning or format.in_channels or (tools and format.tools)):
        return None
    mark = SPECIAL_MARK if format.in_channels else ""
    tail = Detokenizer(need_tokenizer(served), skip_special_tokens=False, mark=mark)
    return partial(
        make_parser,
        format,
        tools=tools,
        reasoning=True,
        prompt_tail=tail.push(prompt[-_TAIL:]) + tail.finish(),
        mark=mark,
    )


@dataclass(frozen=True)
class ApiProtocol:
    """How a protocol reads requests that generate.

    Attributes:
        request: the body.
        builder: makes a builder of the body, what is served and the request's id. It raises
            `ApiError`, `InvalidRequest` and the like, and may take a while (templates, tokenising).
        openapi: what `/openapi.json` says of its route; see `openapi.py`.
    """

    request: type[Strict]
    builder: Callable[[Any, Served, str], Builder]
    openapi: Mapping[str, Any]

    def prepare(self, body: bytes, served: Served, request_id: str) -> Builder:
        """Read a request; in a thread where the body is large."""
        return self.builder(read_body(body, self.request, served.config), served, request_id)
