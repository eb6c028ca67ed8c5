"""What vLLM's token-in, token-out clients send, as models."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from nano_inference.serving.protocols import fields
from nano_inference.serving.protocols.fields import MOST, OneOrMany, SamplingFields
from nano_inference.serving.protocols.openai_requests import (
    Hint,
    StreamOptions,
    VersionName,
    Wanted,
)
from nano_inference.serving.protocols.per_token import Flat
from nano_inference.serving.protocols.reading import Strict


class GenerateSampling(SamplingFields):
    """`sampling_params`: vLLM's names, and the engine's own."""

    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
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
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # How vLLM is to make and hand over its results, which has no counterpart here, or changes
    # nothing.
    detokenize: Hint = None
    output_kind: Hint = None
    stream_interval: Hint = None
    skip_clone: Hint = None
    spaces_between_special_tokens: Hint = None
    routed_experts_prompt_start: Hint = None  # of an answer that is null: there are no experts


class GenerateRequest(Strict):
    """The body of `POST /inference/v1/generate`."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    # Checked by hand: pydantic would look at each of a hundred thousand ids.
    token_ids: Annotated[
        Any,
        WithJsonSchema(
            {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
        ),
    ]
    sampling_params: GenerateSampling | None = None
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
    token_offsets: Hint = None
    # Of grammars, which there are none of.
    reasoning_ended: Hint = None
    reasoning_parser_kwargs: Hint = None


UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "features": (),
    "content_parts": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}
SAMPLING_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    **fields.UNSUPPORTED,
    "flat_logprobs": (False,),
    "extra_args": ({},),
    "prompt_logprob_token_ids": (),
    "prompt_logprob_start": (0,),
    "repetition_detection": (),
    "skip_reading_prefix_cache": (False,),
    "trace_decode_token_ids": ([],),
    "watermarking": (False,),
}
