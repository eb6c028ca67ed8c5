"""Request bodies: strict JSON within limits of depth, values and keys, and the base models that
read it. A model declares implemented, ignored and rejected fields.
"""

import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import SHOWN, bad_request, shown
from nano_inference.types import MOST_KEPT_SECONDS

log = logging.getLogger("nano_inference.server")

MAX_UNKNOWN_NAMES = 256  # unknown field names that are remembered as logged

_unknown_names: set[str] = set()
_unknown_lock = threading.Lock()


def _with_other_fields(schema: dict[str, Any], model: "type[Strict]") -> None:
    """Add a model's ignored fields and fields of other protocols to its schema."""
    properties = schema.setdefault("properties", {})
    for name in (*model.ignored, *model.elsewhere):
        title = {"title": name.replace("_", " ").title()}
        properties[name] = title if name in model.ignored else title | {"type": "null"}


class Strict(BaseModel):
    """Part of a request. Values are not converted, so numbers must be numbers. Declared fields are
    implemented. Unknown fields are kept in `model_extra`.

    Attributes:
        ignored: Names of fields that are accepted with any value and have no effect.
        refused: Names of known but unsupported fields -> harmless values, which are accepted like
            null.
        elsewhere: Names of fields of other protocols, rejected unless empty -> the remedy.
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
    """Return the request in a body. Unknown fields are accepted, and each name is logged once.

    Args:
        body: JSON. NaN, infinities, numbers beyond a double, lone surrogates and invalid UTF-8 are
            rejected.
        model: Model of the request.
        config: Server settings, with their limits.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = decode(body, config)
    _refuse_unsupported(fields, model.refused)
    for name, remedy in model.elsewhere.items():
        # empty values and n=1 have no effect, so they are accepted
        if (value := fields.pop(name, None)) and (name, value) != ("n", 1):
            raise bad_request(f"{name}: not supported here; {remedy}", name)
    _require_bias(fields, config.max_logit_bias)
    request = validated(model, fields)
    log_unknown(request)
    return request


def validated(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """Return the model of these fields. Raises `ApiError` 400, naming the field."""
    try:
        return model.model_validate(fields)
    except ValidationError as problem:
        raise bad_request(*_said(problem)) from None


def check_part(part: Strict, name: str) -> None:
    """Check a nested object in the field `name` as `read_body` checks a request."""
    _refuse_unsupported(part.model_extra or {}, part.refused, f"{name}.")
    log_unknown(part)


def _refuse_unsupported(
    fields: Mapping[str, Any], refused: Mapping[str, Sequence[Any]], within: str = ""
) -> None:
    for name, harmless in refused.items():
        value = fields.get(name)
        if value is not None and not any(_same(value, each) for each in harmless):
            where = within + name
            raise bad_request(
                f"{where} is not supported by this server; leave it out.",
                where,
                "unsupported_parameter",
            )


def _require_bias(fields: Mapping[str, Any], most: int) -> None:
    """Reject a `logit_bias` that is too long, before validating its entries delays others."""
    nested = fields.get("sampling_params")  # on vLLM's and SGLang's own routes
    for part in (fields, nested) if isinstance(nested, dict) else (fields,):
        bias = part.get("logit_bias")
        if isinstance(bias, dict) and len(bias) > most:
            raise bad_request(
                f"logit_bias has {len(bias)} entries; this server accepts at most {most}.",
                "logit_bias",
            )


def _same(value: object, other: object) -> bool:
    return (
        type(value) is type(other) and value == other if isinstance(value, bool) else value == other
    )


def _said(problem: ValidationError) -> tuple[str, str | None]:
    """Return the first error's message and its field."""
    first = problem.errors(include_url=False)[0]
    path = [str(each)[:SHOWN] for each in first["loc"]]
    # names in angle brackets are tags of our own unions
    where = ".".join(each for each in path if not each.startswith("<"))
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


# pydantic's kinds of errors -> the expected value, in JSON's terms
_WANTED: Mapping[str, str] = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "string_too_short": "a string of length {min_length} or more",
    "string_too_long": "a string of length {max_length} or less",
    "too_short": "a list of {min_length} or more",
}


def log_unknown(part: Strict) -> None:
    """Log unknown field names, once each."""
    for name in part.model_extra or ():
        if name in part.refused or name in part.ignored:
            continue
        name = name[:SHOWN]
        with _unknown_lock:
            new = name not in _unknown_names and len(_unknown_names) < MAX_UNKNOWN_NAMES
            if new:
                _unknown_names.add(name)
        if new:
            log.warning("ignoring an unknown field of a request: %s", json.dumps(name))


MOST = 2**31 - 1

TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MOST)]], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]


def _one_or_many(value: object) -> object:
    if isinstance(value, list | str):
        return [value] if isinstance(value, str) else value
    raise PydanticCustomError("one_or_many", "Input should be a string or a list of strings")


# a string or a list of strings, read as a list
OneOrMany = Annotated[
    Strings,
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


def _count_of_flag(value: object) -> object:
    return value if not isinstance(value, bool) else 0 if value else None


# number of most probable tokens to report per prompt token; `true` is 0: only the prompt's own
# token; -1: all
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


# checked when the grammar is made
Schema = Annotated[Any, _of("object", "boolean", "string")]
Tag = Annotated[Any, _of("object", "string")]


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one grammar and its options."""

    json_: Schema = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    structural_tag: Tag = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    lenient: bool | None = Field(
        None, description="Ignore keywords of a schema that cannot be enforced"
    )
    disable_additional_properties: bool | None = Field(
        None, description="Forbid undeclared properties in objects that declare properties"
    )
    backend: str | None = Field(None, description="Backend that makes the masks, by vLLM's name")


class GrammarFields(Strict):
    """Fields that ask for structured output, with their names in vLLM (old and new), TRL, SGLang
    and llama.cpp. `grammars.ROWS` defines their meaning.
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


# a name of `thinking_token_budget` in another API
Budget = Annotated[
    Annotated[int, Field(ge=-1, le=MOST)] | None,
    Field(description="Other name of thinking_token_budget; -1: no limit"),
]


class SamplingFields(GrammarFields):
    """Sampling parameters of the engine, which every protocol accepts next to its own. Null is the
    default.
    """

    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="0: only the most probable token"
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
        None, description="Experts of each token; requires --enable-return-routed-experts"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    keep_cache_seconds: Annotated[float, Field(ge=0, le=MOST_KEPT_SECONDS)] | None = Field(
        None, description="Time that the sample's blocks stay cached after its end, in seconds"
    )
    cache_priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None, description="Higher is evicted later; requires keep_cache_seconds"
    )
    bad_words: Strings | None = Field(
        None, description="Texts that the answer must not contain, with or without a space before"
    )
    thinking_token_budget: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        None, description="Close the thought after this many tokens"
    )
    thinking_budget_tokens: Budget = None
    reasoning_budget_tokens: Budget = None
    thinking_budget: Budget = None
    # fields of other engines
    refused = {
        "logits_processors": ([],),
        "custom_logit_processor": (),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "typical_p": (1, 1.0),
        "stop_regex": ([], ""),
        "prompt_embeds": (),
        "truncate_prompt_tokens": (-1,),
        "logprob_token_ids": ([],),
        "kv_transfer_params": ({},),
        "lora_path": (),
        "vllm_xargs": ({},),
    }


# field of the protocols whose answers hold receipts
ReceiptField = Annotated[
    bool | None,
    Field(description="Return a line for `nano-inference verify` with each sample"),
]
# OpenAI's values for `keep_cache_seconds`
Retention = Literal["in-memory", "in_memory", "24h"]
RETENTION: Any = Field(
    None, description="24h: keep_cache_seconds=86400; in-memory: blocks are evicted like others"
)


MAX_CONTAINERS = 200_000  # `[],[],[]...` takes thirty times its length as Python objects
MAX_KEYS = 200_000  # limit for all objects together

# Every pattern matches about a megabyte at most, so that other threads run between two matches.
# _RUN: numbers, words, commas, colons and short strings
_RUN = re.compile(rb'(?:[^"\[\]{}]{1,1024}+|"(?:[^"\\]{1,256}+|\\.){0,64}+"){1,64}+', re.DOTALL)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# a piece of a longer string, with its closing quote if the piece reaches it
_PIECE = re.compile(rb'(?:[^"\\]{1,1024}+|\\.){1,1024}+("?)|"', re.DOTALL)


def check_json(body: bytes, max_depth: int, max_values: int) -> None:
    """Reject a body that is nested deeper than `max_depth`, or has too many values, keys, or lists
    and objects.

    Raises `ApiError` 400.
    """
    containers = body.count(b"[") + body.count(b"{")
    if containers <= max_depth and body.count(b",") < max_values and body.count(b":") <= MAX_KEYS:
        return  # fast path for nearly every body: these counts include characters in strings
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


def _require(number: int, most: int, problem: str) -> None:
    if number > most:
        raise bad_request(f"the body {problem.format(most)}.")


def _tokens(body: bytes) -> Iterator[bytes]:
    """Yield brackets, and the runs between them without their strings."""
    at = 0
    while at < len(body):
        if run := _RUN.match(body, at):
            at = run.end()
            if rest := _STRING.sub(b"", run[0]):
                yield rest
        elif body[at] != _QUOTE:
            yield body[at : at + 1]
            at += 1
        else:
            at = _end_of_string(body, at + 1)


def _end_of_string(body: bytes, at: int) -> int:
    while piece := _PIECE.match(body, at):
        at = piece.end()
        if piece[1] or piece[0] == b'"':
            return at
    return len(body)  # unterminated


_QUOTE = ord('"')


def decode(body: bytes, config: ServerConfig) -> dict[str, Any]:
    """Return the JSON object in a body, within the server's limits. Raises `ApiError` 400."""
    check_json(body, config.max_depth, config.max_values)
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise bad_request(f"the body is not valid JSON: {problem}") from None
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object.")
    return fields
