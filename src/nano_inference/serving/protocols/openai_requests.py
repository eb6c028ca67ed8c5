"""What OpenAI's clients send, as models. Fields beside OpenAI's own are named as in vLLM where it
has them.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from nano_inference.serving.protocols import chats, fields
from nano_inference.serving.protocols.fields import MOST, OneOrMany, PromptLogprobs, SamplingFields
from nano_inference.serving.protocols.per_token import Flat
from nano_inference.serving.protocols.reading import Strict

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

# Checked by hand: pydantic would report each of a hundred thousand ids once for each form.
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
Content = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]
# Accepted whatever it says: it changes nothing here.
Hint = Annotated[Any, WithJsonSchema({})]


# True or false; some trainers say 1 and 0.
Flag = Annotated[
    bool | None,
    BeforeValidator(lambda value: bool(value) if type(value) is int and value in (0, 1) else value),
    WithJsonSchema({"type": ["boolean", "null"]}),
]


# Of the `n` samples of a prompt, how many may finish; when they have, the others end as "abort"
# with what they have.
Wanted = (
    Annotated[int, Field(ge=1, le=MOST, description="of n samples, how many may finish")] | None
)
# As its trainer calls it; trainers that count say the number.
VersionName = Annotated[Any, WithJsonSchema({"type": ["string", "integer", "null"]})]


class StreamOptions(Strict):
    """What a stream holds beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIFields(SamplingFields):
    """What both routes take."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    stop: OneOrMany | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description='logprobs name tokens "token_id:123"'
    )
    prompt_logprobs: PromptLogprobs = None
    include_stop_str_in_output: bool | None = Field(
        None, description="the text ends with the stop string that ended it"
    )
    skip_special_tokens: bool | None = Field(
        None, description="false: the text names special tokens"
    )
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="the answer's id, behind its prefix; by it the request can be aborted"
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(
        None,
        description="cut the prompt to so many tokens; -1: to what the context leaves beside the "
        "completion",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="what is cut off; left by default"
    )
    n_wanted: Wanted = None
    min_weight_version: VersionName = None
    best_of: Annotated[int, Field(ge=1, le=MOST)] | None = Field(None, description="must equal n")
    user: Hint = None
    metadata: Hint = None
    service_tier: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_options: Hint = None
    prompt_cache_retention: Hint = None


class CompletionRequest(OpenAIFields):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        None, description="16 by default"
    )
    max_completion_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        None, description="max_tokens, newer"
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(None, description="-1: all")
    flat_logprobs: Flat | None = Field(
        None, description="token_logprobs alone, in each choice, and token_ids"
    )
    add_special_tokens: bool | None = Field(
        None, description="what the tokenizer puts around a text; true by default"
    )


class FunctionCall(Strict):
    """What an earlier answer called."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[Any, WithJsonSchema({"type": "string"})] = None


class ToolCallMessage(Strict):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict):
    """A tool that the model may use."""

    type: Literal["function"] = "function"
    function: Function


class ChatTemplateFields(Strict):
    """How a chat becomes a prompt."""

    tools: list[Tool] | None = None
    tool_choice: Annotated[
        Any, WithJsonSchema({"anyOf": [{"enum": ["auto", "none", None]}, {"type": "object"}]})
    ] = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="what the tokenizer puts around a text, too"
    )
    documents: list[dict[str, Any]] | None = Field(
        None, description="for templates that render some"
    )
    continue_final_message: bool | None = None


class ChatRequest(OpenAIFields, ChatTemplateFields):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="by default all that is left"
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = None
    logprobs: Flag = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(None, description="-1: all")
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = Field(
        None, description="false: reasoning is left out of the answer"
    )
    verbosity: Hint = None
    store: Hint = None  # nothing is kept


UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    **{
        name: harmless
        for name, harmless in fields.UNSUPPORTED.items()
        if name != "truncate_prompt_tokens"
    },
    "response_format": ({"type": "text"},),
    "moderation": (),
}
COMPLETION_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    **UNSUPPORTED,
    "suffix": ("",),
    "store": (False,),
    "top_logprobs": (0,),  # a chat's: without it the answer would be another than was meant
}
CHAT_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    **UNSUPPORTED,
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    **chats.UNSUPPORTED,
    "echo": (False,),
}
