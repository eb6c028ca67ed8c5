"""vLLM's `/inference/v1/generate`: its fields."""

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
    SamplingFields,
    Strict,
)


class VllmSampling(SamplingFields):
    """`sampling_params`: vLLM's names, and the engine's own."""

    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    seed: Annotated[
        int | None,
        Field(ge=-(2**63), lt=2**64),
        BeforeValidator(lambda seed: None if seed == -1 else seed),  # vLLM's word for none
    ] = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="by default all that is left"
    )
    stop: OneOrMany | None = None
    logprobs: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(
        None,
        description="candidates of each token, the token itself being the first; -1: all there are",
    )
    prompt_logprobs: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    return_sampling_mask: bool | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        None, description="first token of the prompt whose experts are told"
    )
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # How vLLM is to make and hand over its results, which has no counterpart here, or changes
    # nothing.
    ignored = (
        *("detokenize", "output_kind", "stream_interval", "skip_clone"),
        "spaces_between_special_tokens",
    )
    refused = SamplingFields.refused | {
        "flat_logprobs": (False,),
        "extra_args": ({},),
        "prompt_logprob_token_ids": (),
        "prompt_logprob_start": (0,),
        "repetition_detection": (),
        "skip_reading_prefix_cache": (False,),
        "trace_decode_token_ids": ([],),
        "watermarking": (False,),
    }


class VllmRequest(Strict):
    """The body of `POST /inference/v1/generate`."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    # Checked by hand: pydantic would look at each of a hundred thousand ids.
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
    return_token_ids: bool | None = Field(None, description="the prompt's too")
    output_mode: Literal["tokens", "text"] | None = None
    flat_logprobs: Flat | None = Field(
        None, description="token_logprobs alone: a list, or base64 of float32"
    )
    n_wanted: Wanted = None
    min_weight_version: VersionName = None
    reasoning_ended: bool | None = Field(
        None, description="false: a grammar begins behind the reasoning"
    )
    ignored = ("token_offsets", "reasoning_parser_kwargs")
    refused: ClassVar[dict[str, Sequence[Any]]] = {
        "features": (),
        "content_parts": ([],),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    }
    elsewhere = dict.fromkeys(GrammarFields.model_fields, "put it into sampling_params.")
