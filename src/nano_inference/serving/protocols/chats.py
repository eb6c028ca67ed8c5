"""What the chat protocols share: the prompt of a conversation, and the parser of what answers
it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from nano_inference.serving.parsing import OutputParser, make_parser
from nano_inference.serving.protocols.fields import (
    need_tokenizer,
    require_at_most,
    require_possible_length,
)
from nano_inference.serving.protocols.interface import Served
from nano_inference.text.chat import encode_chat
from nano_inference.text.tokenizer import Tokenizer

log = logging.getLogger("nano_inference.serving")

# Names of template arguments that other servers let a request choose -> values that ask for
# nothing.
UNSUPPORTED: Mapping[str, Sequence[Any]] = {"chat_template": ()}

_TAIL = 64  # tokens of a prompt that say whether its template has opened the reasoning


def encode(
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
        "a request offers tools, and this model's way to write calls is not known: what it "
        "answers is text. "
        "--tool-format names a way."
    )


def parser_of(
    prompt: Sequence[int], served: Served, *, tools: bool
) -> Callable[[], OutputParser] | None:
    """Makes the parser of each answer to a prompt; None: all that the model can say is content.

    Args:
        prompt: token ids.
        served: knows how the model writes.
        tools: whether the model was shown tools.
    """
    if not (served.chat_format.reasoning or (tools and served.chat_format.tools)):
        return None
    tail = need_tokenizer(served).decode(prompt[-_TAIL:], skip_special_tokens=False)
    return partial(make_parser, served.chat_format, tools=tools, reasoning=True, prompt_tail=tail)
