"""Fields of `POST /api/chat`, `/api/generate` and `/api/embed`, as pydantic models."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from nano_inference.server.api.shared.fields import (
    MOST,
    OneOrMany,
    SamplingFields,
    Strict,
    TokenIds,
)
from nano_inference.server.api.shared.openapi import INTEGER, STRING, list_of, thing

# how Ollama runs a model; this server decides that by itself, with the same answers
_HARDWARE = (
    *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "use_mmap", "use_mlock"),
    *("num_thread", "num_keep", "mirostat_tau", "mirostat_eta"),
)


class Options(SamplingFields):
    """Sampling parameters. The engine's own parameters are extensions."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MOST)] | None = Field(
        None, description="Maximum tokens of the answer; -1 and -2: the rest of the context"
    )
    num_ctx: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="Maximum tokens of prompt and answer, at most the model's context"
    )
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop: OneOrMany | None = None
    ignored = _HARDWARE
    refused = SamplingFields.refused | {
        "repeat_last_n": (-1,),  # penalties count the whole context
        "tfs_z": (1, 1.0),
        "mirostat": (0,),
        "penalize_newline": (True,),
        "logits_all": (False,),
        "vocab_only": (False,),
        "embedding_only": (False,),
    }


# "json" or a JSON schema; checked when the grammar is made
Format = Annotated[Any, WithJsonSchema({"type": ["string", "object", "null"]})]
KeepAlive = Annotated[Any, WithJsonSchema({"type": ["string", "number", "null"]})]


class CalledFunction(Strict):
    """Function call in an earlier answer."""

    name: str
    arguments: dict[str, Any] | None = None


class Called(Strict):
    """Tool call in an earlier answer."""

    function: CalledFunction


class OllamaMessage(Strict):
    """Message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Called] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[Any] | None = None


class OllamaFunction(Strict):
    """Function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Strict):
    """Tool that the model may use."""

    type: Literal["function"] = "function"
    function: OllamaFunction


class GenerateFields(Strict):
    """Fields of chats and completions."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    stream: bool | None = Field(None, description="Default: true")
    options: Options | None = None
    format: Format = Field(None, description='"json", or a JSON schema')
    keep_alive: KeepAlive = Field(
        None, description="Time for which the model stays loaded, such as 10m; 0: unload it"
    )
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST)] | None = None
    refused: ClassVar = {"truncate": (False,), "shift": (False,)}
    elsewhere: ClassVar[Mapping[str, str]] = {
        "max_tokens": "use options.num_predict.",
        "response_format": "use format.",
        "tool_choice": "use /v1/chat/completions.",
        "n": "send several requests.",
    }


class OllamaChatRequest(GenerateFields):
    """Body of `POST /api/chat`. Without messages, it only loads the model."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class OllamaGenerateRequest(GenerateFields):
    """Body of `POST /api/generate`. Without a prompt, it only loads the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="Send the prompt without the chat template")
    context: TokenIds | None = Field(
        None, description="The context of an earlier answer, which this prompt continues"
    )
    images: list[Any] | None = None
    refused: ClassVar = GenerateFields.refused | {"suffix": ("",), "template": ("",)}


class EmbedRequest(Strict):
    """Body of `POST /api/embed`."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    input: OneOrMany
    truncate: bool | None = Field(None, description="Cut inputs to the context. Default: true")
    keep_alive: KeepAlive = None
    refused: ClassVar = {"dimensions": ()}
    ignored = ("options",)


class OldEmbedRequest(Strict):
    """Body of `POST /api/embeddings`, the older form for one text."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    prompt: str
    keep_alive: KeepAlive = None
    ignored = ("options",)


class ShowRequest(Strict):
    """Body of `POST /api/show`."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    name: Annotated[str, Field(max_length=1024)] | None = Field(None, description="Old name")
    ignored = ("verbose",)


# schemas of answers for `/openapi.json`
_ENDING = {
    "created_at": STRING,
    "done": {"type": "boolean"},
    "done_reason": STRING,
    "total_duration": INTEGER,
    "load_duration": INTEGER,
    "prompt_eval_count": INTEGER,
    "prompt_eval_duration": INTEGER,
    "eval_count": INTEGER,
    "eval_duration": INTEGER,
}
CHAT = thing(
    *("model", "created_at", "message", "done"),
    model=STRING,
    message=thing("role", "content", role=STRING, content=STRING, thinking=STRING),
    **_ENDING,
)
GENERATED = thing(
    *("model", "created_at", "response", "done"),
    model=STRING,
    response=STRING,
    thinking=STRING,
    context=list_of(INTEGER),
    **_ENDING,
)
EMBEDDED = thing("model", "embeddings", model=STRING, embeddings=list_of(list_of({})))
ERROR = thing("error", error=STRING)
