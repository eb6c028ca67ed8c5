"""From a conversation to its prompt, and to the parser of the answer."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from nano_inference.server.api.parsing import (
    AT_ONCE,
    Behind,
    ChatFormat,
    OutputParser,
    make_parser,
    reasoning_before,
)
from nano_inference.server.api.shared.generation import Served
from nano_inference.server.api.shared.json_limits import decode
from nano_inference.server.api.shared.prompts import (
    need_tokenizer,
    require_at_most,
    require_possible_length,
)
from nano_inference.server.errors import ApiError, bad_request, shown
from nano_inference.text.chat import encode_chat
from nano_inference.text.detokenizer import SPECIAL_MARK, Detokenizer
from nano_inference.text.tokenizer import Tokenizer

log = logging.getLogger("nano_inference.server")


def text_of(content: object, where: str) -> str:
    """The text of a message's content: a string, nothing, or a list of text parts. Raises
    `ApiError`, 400.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(
            f"{where} must be a string or a list of parts, not {shown(content)}.", where
        )
    texts = [_text_of_part(part, f"{where}.{place}") for place, part in enumerate(content)]
    return "\n".join(text for text in texts if text)


def _text_of_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise bad_request(f"{where} must be an object with a type, not {shown(part)}.", where)
    if kind not in ("text", "refusal"):
        raise bad_request(f"{where} is of type {shown(kind)}; this model reads text alone.", where)
    text = part.get(kind)
    if not isinstance(text, str):
        raise bad_request(f"{where}.{kind} must be a string, not {shown(text)}.", f"{where}.{kind}")
    return text


def arguments_of(arguments: object, served: Served, where: str) -> dict[str, Any]:
    """A tool call's arguments, which come as JSON text. Raises `ApiError`, 400, unless they are an
    object.
    """
    value: object = arguments or {}
    if isinstance(arguments, str) and arguments:
        try:
            value = decode(arguments.encode(), served.config)
        except ApiError:
            value = None
    if not isinstance(value, dict):
        raise bad_request(
            f"{where} must be the JSON text of an object, not {shown(arguments)}.", where
        )
    return value


_TAIL = 64  # tokens of a prompt that say whether its template has opened the reasoning


def encode_conversation(
    messages: Sequence[Mapping[str, Any]],
    served: Served,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, object],
    add_generation_prompt: bool,
    continue_final_message: bool,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_special_tokens: bool = False,
) -> list[int]:
    """The token ids of a conversation. Arguments: see `encode_chat`; with `add_special_tokens` what
    the tokenizer puts around a text stands around it too. Raises `ApiError` and `InvalidRequest`.
    """
    tokenizer = need_tokenizer(served)
    if tools:
        require_at_most(len(tools), served.config.max_tools, "tools", "the number of tools")
        if served.chat_format.tools is None:
            _say_once()
    require_possible_length("".join(each["content"] or "" for each in messages), served, "messages")
    token_ids = encode_chat(
        tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
        documents=documents,
    )
    return _around(token_ids, tokenizer) if add_special_tokens else token_ids


def _around(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids between those that the tokenizer puts around any text."""
    bare, whole = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=True)
    begin = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return [*whole[:begin], *token_ids, *whole[begin + len(bare) :]]


@cache
def _say_once() -> None:
    log.warning(
        "a request offers tools, and this model's way to write calls is not known: its answers are "
        "text, unless it writes calls as hermes has them or tool_choice forces one; "
        "--tool-format names a way."
    )


def behind_reasoning(
    prompt: Sequence[int], served: Served, *, goes_on: bool = False, parsed: bool = True
) -> Behind:
    """What the grammar of the answer to a prompt begins behind.

    Args:
        prompt: token ids.
        served: knows how the model writes.
        goes_on: the prompt ends with the beginning of the answer.
        parsed: the answer tells reasoning apart, where it can see the markers.
    """
    if served.chat_format.reasoning is None:
        return AT_ONCE
    added = need_tokenizer(served).backend.get_added_tokens_decoder().values()
    hidden = {token.content for token in added if token.special and parsed}
    return reasoning_before(
        served.chat_format, prompt_tail=tail_of(prompt, served), goes_on=goes_on, hidden=hidden
    )


def tail_of(prompt: Sequence[int], served: Served) -> str:
    """The last words of a prompt, as `make_parser` has them."""
    return need_tokenizer(served).decode(prompt[-_TAIL:], skip_special_tokens=False)


def parser_of(
    prompt: Sequence[int], served: Served, *, tools: bool, format: ChatFormat | None = None
) -> Callable[[], OutputParser] | None:
    """Makes the parser of each answer to a prompt; None: all that the model can say is content.

    Args:
        prompt: token ids.
        served: knows how the model writes.
        tools: whether the model was shown tools.
        format: of the answers; None: the model's.
    """
    format = served.chat_format if format is None else format
    if not (format.reasoning or format.in_channels or (tools and format.tools)):
        return None
    mark = SPECIAL_MARK if format.in_channels else ""
    tail = Detokenizer(need_tokenizer(served), skip_special_tokens=False, mark=mark)
    return partial(
        make_parser,
        format,
        tools=tools,
        reasoning=True,
        prompt_tail=tail.push(prompt[-_TAIL:]) + tail.finish(),
        mark=mark,
    )
