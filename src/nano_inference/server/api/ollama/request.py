"""Conversion of Ollama's chats and prompts to token ids and sampling parameters."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.fields.durations import parse_duration
from nano_inference.server.api.ollama.models import (
    GenerateFields,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
)
from nano_inference.server.api.parsing import Behind
from nano_inference.server.api.parsing.tool_grammars import OfferedTool, ToolDemand
from nano_inference.server.api.shared.fields import check_part
from nano_inference.server.api.shared.grammars import grammar_of
from nano_inference.server.api.shared.prompts import (
    adapter_of,
    checked_prompt,
    encode_conversation,
    need_tokenizer,
    require_at_most,
    require_possible_length,
    too_long,
)
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.api.shared.sampling import checked_stop, num_logprobs, sampling_params
from nano_inference.server.errors import bad_request, shown
from nano_inference.structured.grammar import Grammar
from nano_inference.types import SamplingParams


def served_name(name: str) -> str:
    """Return the served name for a name with Ollama's default tag."""
    return name.removesuffix(":latest")


def keep_alive_of(value: object) -> float | None:
    """Return the seconds of a `keep_alive`, or None if it is not set. Negative ones are infinite.
    Raises `ApiError` 400.
    """
    if value is None:
        return None
    try:
        seconds = parse_duration(value)  # pyright: ignore[reportArgumentType]
    except ValueError:
        raise bad_request(
            f"keep_alive must be seconds, or a duration such as 10m, not {shown(value)}.",
            "keep_alive",
        ) from None
    return math.inf if seconds < 0 else seconds


def chat_prompt(request: OllamaChatRequest, served: Served) -> list[int]:
    """Return the token ids of a chat. Raises `ApiError` and `InvalidRequest`."""
    messages = request.messages or []
    require_at_most(len(messages), served.config.max_messages, "messages", "the number of messages")
    return _encoded(
        [_plain(message, f"messages.{index}") for index, message in enumerate(messages)],
        request,
        served,
        tools=[tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None,
    )


def generate_prompt(request: OllamaGenerateRequest, served: Served) -> list[int]:
    """Return the token ids of a prompt: after those of `context`, if there are any, the prompt in
    the chat template, or as it is with `raw` or without a template.

    Raises `ApiError` and `InvalidRequest`.
    """
    _refuse_images(request.images, "images")
    tokenizer, prompt = need_tokenizer(served), request.prompt or ""
    if request.raw:
        for name in ("system", "context"):
            if getattr(request, name):
                raise bad_request(f"raw does not support {name}; omit one of them.", name)
    if request.raw or tokenizer.chat_template is None:
        text = "\n".join(filter(None, (request.system, prompt)))
        require_possible_length(text, served, "prompt")
        return tokenizer.encode(text, add_special_tokens=True)
    system = [{"role": "system", "content": request.system}] if request.system else []
    user = {"role": "user", "content": prompt}
    token_ids = _encoded([*system, user], request, served, tools=None)
    if not request.context:
        return token_ids
    checked_prompt(request.context, served, "context")
    begin = tokenizer.encode("", add_special_tokens=True)[:1]  # comes only once
    return [*request.context, *token_ids[len(begin) if token_ids[: len(begin)] == begin else 0 :]]


def _encoded(
    messages: Sequence[Mapping[str, Any]],
    request: GenerateFields,
    served: Served,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
) -> list[int]:
    return encode_conversation(
        messages,
        served,
        tools=tools,
        template_kwargs=_thinking(request.think, served),
        add_generation_prompt=True,
        continue_final_message=False,
    )


def _thinking(think: bool | str | None, served: Served) -> dict[str, Any]:
    """Return the template variables of `think`. Raises `ApiError` 400 if the model cannot think."""
    if think is None:
        return {}
    format = served.chat_format
    if think and format.reasoning is None and not format.in_channels:
        raise bad_request(f"{shown(served.name)} does not support thinking; omit think.", "think")
    effort = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {"enable_thinking": bool(think), **effort}


def _plain(message: OllamaMessage, where: str) -> dict[str, Any]:
    """Return a message in the form for templates."""
    _refuse_images(message.images, f"{where}.images")
    plain: dict[str, Any] = {
        "role": message.role,
        "content": message.content or (None if message.tool_calls else ""),
    }
    if message.tool_name is not None:
        plain["name"] = message.tool_name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": "",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": call.function.arguments or {},
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _refuse_images(images: Sequence[Any] | None, where: str) -> None:
    if images:
        raise bad_request(f"{where} is not supported: this model reads only text.", where)


def demand_of(request: OllamaChatRequest) -> ToolDemand | None:
    """Return the tool calls that a request allows. None: it offers no tools."""
    offered = [
        OfferedTool(tool.function.name, tool.function.parameters, False)
        for tool in request.tools or ()
    ]
    return ToolDemand(offered, forced=False, parallel=True) if offered else None


def params_of(
    request: GenerateFields, prompt: list[int], served: Served, behind: Behind
) -> SamplingParams:
    """Return the sampling parameters of a request. Raises `ApiError` and `InvalidRequest`."""
    options = request.options or Options.model_validate({})
    check_part(options, "options")
    seed = {"seed": None} if options.seed == -1 else {}  # -1: a random one
    options = options.model_copy(update=seed)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs requires logprobs: true.", "top_logprobs")
    return sampling_params(
        options,
        served,
        max_tokens=_room(options, prompt, served),
        stop=checked_stop(options.stop, served, "options.stop"),
        top_logprobs=num_logprobs(request.top_logprobs, served, "top_logprobs") or 0,
        defaults=served.sampling_defaults,
        renamed={
            "adapter": adapter_of(served_name(request.model), served),
            "repetition_penalty": options.repeat_penalty,
            "grammar": _grammar(request.format, served, behind),
        },
        within="options.",
        behind=behind,
    )


def _grammar(format: object, served: Served, behind: Behind) -> Grammar | None:
    if format in (None, ""):
        return None
    need_tokenizer(served)
    return grammar_of({"format": format}, "", behind, served.engine.grammar_backend)


def _room(options: Options, prompt: Sequence[int], served: Served) -> int:
    """Return the maximum tokens of the answer. Raises `ApiError` 400 for a prompt that leaves no
    room.
    """
    most = min(options.num_ctx or served.engine.max_model_len, served.engine.max_model_len)
    left = most - len(prompt)
    asked = options.num_predict
    if asked == 0:
        raise bad_request(
            "options.num_predict is 0; give at least 1, or -1 for the rest of the context.",
            "options.num_predict",
        )
    if left < 1 and len(prompt) < served.engine.max_model_len:
        raise bad_request(
            f"the prompt has {len(prompt)} tokens, which fill options.num_ctx={options.num_ctx}; "
            "raise it, or shorten the prompt.",
            "options.num_ctx",
            "context_length_exceeded",
        )
    if left < 1:
        raise too_long(len(prompt), 1, served, "messages")
    return left if asked is None or asked < 0 else min(asked, left)
