"""Chat templates: a conversation to the text, or the token ids, that an instruction-tuned model was
trained on.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nano_inference.errors import InvalidRequest
from nano_inference.text import control_tokens, sandbox
from nano_inference.text.messages import Messages, checked_kwargs, plain, prepare
from nano_inference.text.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, object]]
Documents = Sequence[Mapping[str, object]]


def render_chat(
    template: str,
    messages: Messages,
    *,
    special_tokens: Mapping[str, str],
    tools: Tools | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, object] | None = None,
    documents: Documents | None = None,
) -> str:
    """The conversation as text, equal to what transformers' `apply_chat_template` renders.

    Args:
        template: Jinja source.
        messages: `{"role": ..., "content": ...}` of strings, numbers, lists and mappings, as
            OpenAI's protocol has them; what the template does not understand of that is rewritten
            (`messages.prepare`).
        special_tokens: `bos_token`, `eos_token` … -> text, visible to the template by these names.
        tools: `{"type": "function", "function": {"name", "description", "parameters"}}` each.
        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: end within the last message, right behind its content, for the model
            to go on.
        template_kwargs: further variables of the template, as `enable_thinking`.
        documents: texts beside the conversation, for templates that render some.

    Raises:
        InvalidRequest: there is no message, the template is broken, refuses the messages, leaves
            the sandbox or takes more than its time or size (`budget.Budget`), a message holds
            something else than plain data, or a template variable may not be set.
    """
    variables = _variables(template, messages, tools, documents, template_kwargs, special_tokens)
    return _render(
        template, variables, special_tokens, add_generation_prompt, continue_final_message
    )


def encode_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    tools: Tools | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, object] | None = None,
    documents: Documents | None = None,
) -> list[int]:
    """Token ids of the conversation, by default up to and including the opening of the assistant's
    turn.

    Special tokens come from the template alone: the tokenizer adds none, and one that is written
    out in a message, in a tool's description or in `template_kwargs` is encoded as the text it is.

    Args:
        tokenizer: with a chat template.
        messages: as for `render_chat`, like all that follows.
        tools: what the model may call.
        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: end within the last message.
        template_kwargs: further variables of the template.
        documents: texts beside the conversation.

    Raises:
        InvalidRequest: the tokenizer has no chat template, or `render_chat` refuses.
    """
    template, special_tokens = tokenizer.template_for(tools=bool(tools)), tokenizer.special_tokens
    variables = _variables(template, messages, tools, documents, template_kwargs, special_tokens)
    variables, marked = control_tokens.mark(tokenizer, variables)
    text = _render(
        template,
        variables,
        special_tokens,
        add_generation_prompt,
        continue_final_message,
        control_tokens.counter(tokenizer),
    )
    return control_tokens.encode_marked(tokenizer, text) if marked else tokenizer.encode(text)


def warm_up(tokenizer: Tokenizer) -> None:
    """Do now what would make one of the first chats wait: seconds, for a large vocabulary.

    The template is compiled and asked what it renders, and the tokenizer for control tokens in a
    caller's text is made. A template that fails does so later, with the request that it fails on.
    """
    if tokenizer.chat_template is None and tokenizer.tool_template is None:
        return
    name = next(iter(tokenizer.special_tokens.values()), "")
    for tools in ([], [_TOOL]) if tokenizer.tool_template else ([],):
        with contextlib.suppress(InvalidRequest):
            encode_chat(tokenizer, [{"role": "user", "content": name}], tools=tools)
    control_tokens.encode_marked(tokenizer, "")


_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {"name": "a", "description": "a", "parameters": {"type": "object"}},
}


def _variables(
    template: str,
    messages: Messages,
    tools: Tools | None,
    documents: Documents | None,
    kwargs: Mapping[str, object] | None,
    special_tokens: Mapping[str, str],
) -> dict[str, Any]:
    """What the caller says, as plain data."""
    if not messages:
        raise InvalidRequest("the conversation is empty; give at least one message")
    if documents and "documents" not in template:
        raise InvalidRequest(
            "the model's chat template renders no documents; put their text into a message"
        )
    return {
        **checked_kwargs(kwargs or {}, special_tokens),
        "messages": prepare(template, messages, special_tokens),
        "tools": plain(tools) if tools else None,
        "documents": plain(documents) if documents else None,
    }


def _render(
    template: str,
    variables: dict[str, Any],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
    continue_final_message: bool,
    count_tokens: Callable[[str], int] | None = None,
) -> str:
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt opens a new turn, so continue_final_message cannot continue "
            "the last one; unset one"
        )
    end = control_tokens.secret_digits()
    if continue_final_message:
        _append(variables["messages"][-1], f"{end} ")
    try:
        text = sandbox.render(
            template,
            {
                **variables,
                "add_generation_prompt": add_generation_prompt,
                **special_tokens,
            },
            count_tokens=count_tokens,
        )
    except Exception as error:
        # any error of a template's code is the template's or the messages' fault
        raise InvalidRequest(
            f"the chat template failed on these messages: {_reason(error)}"
        ) from error
    return _cut(text, end) if continue_final_message else text


def _append(message: dict[str, Any], text: str) -> None:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if isinstance(content, str):
        message["content"] = content + text
    elif texts:
        texts[-1]["text"] += text
    else:
        raise InvalidRequest("continue_final_message needs a last message with text in its content")


def _cut(text: str, end: str) -> str:
    at = text.rfind(end)
    if at < 0:
        raise InvalidRequest(
            "the chat template leaves the last message out, so it cannot be continued"
        )
    # A template that trims contents has trimmed the space behind the mark; then it would have
    # trimmed the content too.
    return text[:at] if text.startswith(f"{end} ", at) else text[:at].rstrip()


def _reason(error: Exception) -> str:
    """The error's first line, without the addresses of objects."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r" at 0x[0-9a-fA-F]+", "", lines[0])[:500]
