"""Fields of vLLM's `/inference/v1/generate`."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from nano_inference.server.api.openai.models import StreamOptions, VersionName, Wanted
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
    TokenIds,
)


class VllmSampling(SamplingFields):
    """`sampling_params`: vLLM's names, and the engine's own."""

    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    seed: Annotated[
        int | None,
        Field(ge=-(2**63), lt=2**64),
        BeforeValidator(lambda seed: None if seed == -1 else seed),  # -1 is vLLM's "no seed"
    ] = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="Default: the rest of the context"
    )
    stop: OneOrMany | None = None
    logprobs: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(
        None,
        description="Number of candidates per token, the token itself first. -1: all",
    )
    prompt_logprobs: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    logprob_token_ids: TokenIds | None = Field(
        None, description="Ids whose logprobs follow the token's own, as candidates"
    )
    prompt_logprob_token_ids: Annotated[
        Any,
        WithJsonSchema({"type": "array", "items": {"type": ["integer", "array"]}}),
    ] = Field(None, description="Ids to score at prompt positions: one list, or one for each")
    prompt_logprob_start: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        None, description="Prompt token after which the first of these positions lies"
    )
    receipt: ReceiptField = None
    return_sampling_mask: bool | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        None, description="First token of the prompt whose experts are returned"
    )
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # These fields control how vLLM produces its results. They have no effect here.
    ignored = (
        *("detokenize", "output_kind", "stream_interval", "skip_clone"),
        "spaces_between_special_tokens",
    )
    refused = {
        name: each for name, each in SamplingFields.refused.items() if name != "logprob_token_ids"
    } | {
        "flat_logprobs": (False,),
        "extra_args": ({},),
        "repetition_detection": (),
        "skip_reading_prefix_cache": (False,),
        "trace_decode_token_ids": ([],),
        "watermarking": (False,),
    }


class VllmRequest(Strict):
    """Body of `POST /inference/v1/generate`."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    # Checked by hand: pydantic would validate each of 100,000 ids.
    token_ids: Annotated[
        Any,
        WithJsonSchema(
            {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
        ),
    ]
    sampling_params: VllmSampling | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    return_token_ids: bool | None = Field(None, description="Also return the prompt's token ids")
    output_mode: Literal["tokens", "text"] | None = None
    flat_logprobs: Flat | None = Field(
        None,
        description="Return only token_logprobs: a list, or base64 of little-endian float32",
    )
    n_wanted: Wanted = None
    min_weight_version: VersionName = None
    reasoning_ended: bool | None = Field(
        None, description="If false, apply the grammar only after the reasoning"
    )
    ignored = ("token_offsets", "reasoning_parser_kwargs")
    refused: ClassVar[dict[str, Sequence[Any]]] = {
        "features": (),
        "content_parts": ([],),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    }
    elsewhere = dict.fromkeys(GrammarFields.model_fields, "put it into sampling_params.")
