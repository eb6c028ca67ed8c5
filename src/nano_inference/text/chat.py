"""Chat templates: from a conversation to the text or token ids that an instruction-tuned model
expects.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nano_inference.errors import InvalidRequest
from nano_inference.text import control_tokens, reuse, sandbox
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
    """Render the conversation as text, equal to transformers' `apply_chat_template`.

    Args:
        template: Jinja source.
        messages: `{"role": ..., "content": ...}` of strings, numbers, lists and mappings, as in
            OpenAI's protocol. Forms that the template does not render are rewritten
            (`messages.prepare`).
        special_tokens: `bos_token`, `eos_token` … -> text, visible to the template by these names.
        tools: `{"type": "function", "function": {"name", "description", "parameters"}}` each.
        add_generation_prompt: End with the opening of the assistant's turn.
        continue_final_message: End directly after the content of the last message, so that the
            model continues it.
        template_kwargs: More variables of the template, such as `enable_thinking`.
        documents: Texts next to the conversation, if the template renders documents.

    Raises:
        InvalidRequest: There is no message. The template is broken, rejects the messages, leaves
            the sandbox or exceeds its budget (`budget.Budget`). A message is not plain data, or a
            template variable is reserved.
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
    """Return the token ids of the conversation, by default up to the assistant's opening.

    Only the template creates special tokens. The tokenizer adds none, and a special token in a
    message, a tool's description or `template_kwargs` is encoded as plain text.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages, as for `render_chat`.
        tools: Tools that the model may call.
        add_generation_prompt: End with the opening of the assistant's turn.
        continue_final_message: End within the last message.
        template_kwargs: More variables of the template.
        documents: Texts next to the conversation.

    Raises:
        InvalidRequest: The tokenizer has no chat template, or `render_chat` rejects the input.
    """
    text, marked = render_marked(
        tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
        documents=documents,
    )
    return (
        control_tokens.encode_marked(tokenizer, text) if marked else reuse.encode(tokenizer, text)
    )


def render_marked(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    tools: Tools | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, object] | None = None,
    documents: Documents | None = None,
) -> tuple[str, bool]:
    """Return the conversation as text, with marks in control tokens that the caller wrote, and True
    if there are marks (`control_tokens.mark`). Takes the arguments of `encode_chat`.
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
    return text, marked


def warm_up(tokenizer: Tokenizer) -> None:
    """Prepare chats, so that the first one does not wait (seconds for a large vocabulary).

    Compiles and probes the template, and builds the tokenizer for control tokens in messages. A
    broken template fails later, with its first request.
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
    """Return the caller's variables as plain data."""
    if not messages:
        raise InvalidRequest("the conversation is empty; give at least one message")
    if documents and "documents" not in template:
        raise InvalidRequest(
            "the model's chat template does not render documents; put their text into a message"
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
        # any error is a fault of the template or the messages
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
        raise InvalidRequest(
            "continue_final_message requires a last message with text in its content"
        )


def _cut(text: str, end: str) -> str:
    at = text.rfind(end)
    if at < 0:
        raise InvalidRequest(
            "the chat template omits the last message, so the model cannot continue it"
        )
    # if the template trimmed the space after the mark, it would have trimmed the content too
    return text[:at] if text.startswith(f"{end} ", at) else text[:at].rstrip()


def _reason(error: Exception) -> str:
    """Return the error's first line, without addresses of objects."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r" at 0x[0-9a-fA-F]+", "", lines[0])[:500]
