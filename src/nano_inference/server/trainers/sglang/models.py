"""Fields of SGLang's `/generate`."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from nano_inference.server.api.shared.answers import (
    Flat,
)
from nano_inference.server.api.shared.fields import (
    MOST,
    GrammarFields,
    OneOrMany,
    ReceiptField,
    SamplingFields,
    Strict,
)

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}

# Checked by hand: pydantic would report each of 100,000 ids once for each alternative.
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
# one for all prompts, or a list with one per prompt; read as a list
Flags = Annotated[list[bool | None], _flags[0], _flags[1]]
Counts = Annotated[list[Annotated[int, Field(ge=-1, le=MOST)] | None], _counts[0], _counts[1]]
Strings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)] | None], _strings[0], _strings[1]
]


class CustomParams(Strict):
    """Parameters that slime and SGLang's logit processors add."""

    return_top_p_token_ids: bool | None = Field(
        None, description="Return the ids that the filters kept, flat, as base64"
    )
    thinking_budget: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(
        None, description="Close the thought after this many tokens. -1: no limit"
    )


class SglangSampling(SamplingFields):
    """`sampling_params`: SGLang's names, and the engine's own."""

    max_new_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        None, description="Default: the rest of the context. 0 only scores the prompt"
    )
    min_new_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    stop: OneOrMany | None = None
    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    no_stop_trim: bool | None = Field(None, description="Include the stop string in the text")
    skip_special_tokens: bool | None = Field(
        None, description="Remove special tokens from the text. Default: true"
    )
    custom_params: CustomParams | None = None
    receipt: ReceiptField = None
    ignored = ("spaces_between_special_tokens",)  # has no effect on fast tokenizers
    refused = SamplingFields.refused | {
        "beam_width": (1,),
        "stream_interval": (1,),
        "watermark": (),
    }


def _tag(value: object) -> str:
    return "<many>" if isinstance(value, list) else "<one>"


OneOrManySampling = Annotated[
    Annotated[SglangSampling, Tag("<one>")] | Annotated[list[SglangSampling], Tag("<many>")],
    Discriminator(_tag),
]


class WantedVersion(Strict):
    """Required weights: an exact version, or a minimum version that the request waits for."""

    exact_version: Annotated[Any, WithJsonSchema({"type": ["string", "integer", "null"]})] = None
    min_version: Annotated[Any, WithJsonSchema({"type": ["string", "integer", "null"]})] = None


class SglangRequest(Strict):
    """Body of `POST /generate`."""

    text: Text = None
    input_ids: InputIds = None
    sampling_params: OneOrManySampling | None = None
    return_logprob: Flags | None = None
    logprob_start_len: Counts | None = Field(
        None, description="Score the prompt from this token on. -1: do not score it"
    )
    top_logprobs_num: Counts | None = None
    token_ids_logprob: Annotated[
        Any, WithJsonSchema({"type": ["array", "null"], "items": {"type": ["integer", "array"]}})
    ] = Field(None, description="Ids whose logprobs to return: one list, or one per prompt")
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: Flags | None = Field(
        None, description="Return the ids that the filters kept, for each token"
    )
    return_routed_experts: Flags | None = Field(
        None,
        description="Return the experts of each token. Requires --enable-return-routed-experts",
    )
    routed_experts_start_len: Counts | None = Field(
        None, description="First token whose experts are returned"
    )
    return_prompt_token_ids: bool | None = None
    flat_logprobs: Flat | None = Field(
        None,
        description="Return `token_logprobs` instead of rows: a list of numbers, or base64 of "
        "little-endian float32",
    )
    stream: bool | None = None
    rid: Strings | None = None
    extra_key: Strings | None = Field(
        None, description="Share prefixes only with requests that have the same key"
    )
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31)] | None = Field(
        None, description="Higher goes first"
    )
    lora_path: Strings | None = Field(None, description="Name of a loaded adapter. null: none")
    weight_version: WantedVersion | None = None
    n_wanted: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None,
        description="Stop after this number of the `n` samples has ended; the others are aborted",
    )
    max_thinking_tokens: Counts | None = Field(
        None, description="Close the thought after this many tokens. -1: no limit"
    )
    require_reasoning: bool | None = Field(
        None, description="Apply the grammar only after the reasoning"
    )
    ignored = (
        *("session_id", "routing_key", "conversation_id", "routed_dp_rank", "data_parallel_rank"),
        *("log_metrics", "no_logs"),
    )
    refused = {
        name: each for name, each in SglangSampling.refused.items() if name != "lora_path"
    } | {
        "image_data": ([], ""),
        "video_data": ([], ""),
        "audio_data": ([], ""),
        "input_embeds": ([], ""),
        "modalities": ([],),
        "lora_id": ([],),
        "session_params": ({},),
        "return_hidden_states": (False,),
        "return_indexer_topk": (False,),
        "return_flat_raw_top_logprobs": (False,),
        "return_flat_raw_output_top_logprobs": (False,),
        "return_flat_raw_top_logprobs_b64": (False,),
        "sampling_logprobs_mode": ("selected",),
        "positional_embed_overrides": (),
        "background": (False,),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
    }
    elsewhere = dict.fromkeys(GrammarFields.model_fields, "put it into sampling_params.")
