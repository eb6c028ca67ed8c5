"""What SGLang's clients send to `/generate`, as models. Where SGLang takes a list, there is one
entry a prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from nano_inference.serving.errors import bad_request
from nano_inference.serving.protocols import fields
from nano_inference.serving.protocols.fields import MOST, OneOrMany, SamplingFields
from nano_inference.serving.protocols.openai_requests import Hint
from nano_inference.serving.protocols.per_token import Flat
from nano_inference.serving.protocols.reading import Strict

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}

# Checked by hand: pydantic would report each of a hundred thousand ids once for each form.
InputIds = Annotated[
    Any, WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": _IDS}, {"type": "null"}]})
]
Text = Annotated[
    Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]})
]


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _one_or_list(of: dict[str, Any]) -> tuple[BeforeValidator, WithJsonSchema]:
    return BeforeValidator(_listed), WithJsonSchema(
        {"anyOf": [of, {"type": "array", "items": of}, {"type": "null"}]}
    )


_flags = _one_or_list({"type": "boolean"})
_counts = _one_or_list({"type": "integer"})
_strings = _one_or_list({"type": "string"})
# One for all prompts, or a list of one a prompt; read as a list.
Flags = Annotated[list[bool | None], _flags[0], _flags[1]]
Counts = Annotated[list[Annotated[int, Field(ge=-1, le=MOST)] | None], _counts[0], _counts[1]]
Strings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)] | None], _strings[0], _strings[1]
]


class CustomParams(Strict):
    """What slime's engine adds to SGLang's parameters."""

    return_top_p_token_ids: bool | None = Field(
        None, description="tell which ids the filters kept, flat, as base64"
    )


class Sampling(SamplingFields):
    """`sampling_params`: SGLang's names, and beside them the engine's own."""

    max_new_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        None, description="by default all that the context leaves; 0 scores the prompt alone"
    )
    min_new_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    stop: OneOrMany | None = None
    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    no_stop_trim: bool | None = Field(None, description="the text has what stopped it")
    skip_special_tokens: bool | None = Field(
        None, description="true by default: the text leaves them out"
    )
    spaces_between_special_tokens: Hint = None  # fast tokenizers know no such thing
    custom_params: CustomParams | None = None


def _tag(value: object) -> str:
    return "<many>" if isinstance(value, list) else "<one>"


OneOrManySampling = Annotated[
    Annotated[Sampling, Tag("<one>")] | Annotated[list[Sampling], Tag("<many>")],
    Discriminator(_tag),
]


class WantedVersion(Strict):
    """Which weights are to sample: exactly these, or these or newer ones, which it waits for."""

    exact_version: Annotated[Any, WithJsonSchema({"type": ["string", "integer", "null"]})] = None
    min_version: Annotated[Any, WithJsonSchema({"type": ["string", "integer", "null"]})] = None


class GenerateRequest(Strict):
    """The body of `POST /generate`."""

    text: Text = None
    input_ids: InputIds = None
    sampling_params: OneOrManySampling | None = None
    return_logprob: Flags | None = None
    logprob_start_len: Counts | None = Field(
        None, description="from which token of the prompt on it is scored; -1: no"
    )
    top_logprobs_num: Counts | None = None
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: Flags | None = Field(
        None, description="which ids the filters kept, token by token"
    )
    return_prompt_token_ids: bool | None = None
    flat_logprobs: Flat | None = Field(
        None,
        description="`token_logprobs`, a list of numbers or base64 of little-endian float32, and "
        "no rows",
    )
    stream: bool | None = None
    rid: Strings | None = None
    extra_key: Strings | None = Field(
        None, description="prefixes are shared only with requests of the same"
    )
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31)] | None = Field(
        None, description="higher goes first"
    )
    weight_version: WantedVersion | None = None
    n_wanted: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None,
        description="of `n` samples so many are wanted; when they have ended, the others are "
        "aborted",
    )
    session_id: Hint = None
    routing_key: Hint = None
    conversation_id: Hint = None
    routed_dp_rank: Hint = None
    data_parallel_rank: Hint = None
    routed_experts_start_len: Hint = None
    log_metrics: Hint = None
    no_logs: Hint = None


_EMPTY: Sequence[Any] = ([], "")
# Fields of SGLang's that ask for what this server has not got -> values that ask for nothing.
SAMPLING_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    **{
        name: harmless
        for name, harmless in fields.UNSUPPORTED.items()
        if name != "skip_special_tokens"
    },
    "json_schema": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "beam_width": (1,),
    "stream_interval": (1,),
    "watermark": (),
}
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    **SAMPLING_UNSUPPORTED,
    "image_data": _EMPTY,
    "video_data": _EMPTY,
    "audio_data": _EMPTY,
    "input_embeds": _EMPTY,
    "modalities": ([],),
    "lora_path": ([],),
    "lora_id": ([],),
    "session_params": ({},),
    "token_ids_logprob": ([],),
    "return_routed_experts": (False,),
    "return_hidden_states": (False,),
    "return_indexer_topk": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,),
    "sampling_logprobs_mode": ("selected",),
    "positional_embed_overrides": (),
    "require_reasoning": (False,),
    "max_thinking_tokens": (),
    "background": (False,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
}

_Item = TypeVar("_Item")


def one_of(values: Sequence[_Item] | None, place: int, count: int, name: str) -> _Item | None:
    """What a field says for the prompt at `place` of `count`. Raises `ApiError`, 400, if it is for
    other prompts.
    """
    if values is None:
        return None
    if len(values) not in (1, count):
        raise bad_request(
            f"{name} has {len(values)} entries for {count} prompt(s); give one, or one a prompt.",
            name,
        )
    return values[place if len(values) > 1 else 0]


def prompts_of(request: GenerateRequest) -> tuple[list[Any], bool]:
    """The prompts, texts or lists of ids, and whether they came as a list. Raises `ApiError`,
    400.
    """
    if (request.text is None) == (request.input_ids is None):
        raise bad_request("give either text or input_ids.", "text")
    name, given, is_one = "text", request.text, _is_text
    if request.text is None:
        name, given, is_one = "input_ids", request.input_ids, _is_ids
    if is_one(given):
        return [given], False
    if not isinstance(given, list) or not given or not all(is_one(each) for each in given):
        what = (
            "a string or a list of strings"
            if name == "text"
            else "a list of token ids or a list of such lists"
        )
        raise bad_request(f"{name} must be {what}, and not empty.", name)
    return given, True


_is_text: Callable[[object], bool] = lambda value: isinstance(value, str) and value != ""  # noqa: E731


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and not isinstance(value[0], list)
