"""From a text, token ids or a conversation to a prompt within the model's limits, and to the parser
of the answer.
"""

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
from nano_inference.server.api.shared.fields import decode
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.errors import ApiError, bad_request, shown
from nano_inference.text.chat import encode_chat
from nano_inference.text.detokenizer import SPECIAL_MARK, Detokenizer
from nano_inference.text.tokenizer import Tokenizer

log = logging.getLogger("nano_inference.server")


def adapter_of(name: str | None, served: Served, field: str = "model") -> str | None:
    """The adapter that a client asks for by the name of a model; None: the model alone, by one of
    its names or none. Raises `ApiError`, 404, for any other name.
    """
    if name is None or name in served.all_names or name == served.engine.model_path:
        return None
    if name in (loaded := served.adapters()):
        return name
    known = ", ".join(map(shown, (served.name, *sorted(loaded))))
    raise ApiError(
        404,
        f"the model {shown(name)} does not exist; this server has {known}.",
        field,
        "model_not_found",
    )


def need_tokenizer(served: Served) -> Tokenizer:
    """The tokenizer. Raises `ApiError`, 400, where the model has none."""
    if served.tokenizer is None:
        raise bad_request(
            "the model has no tokenizer; only prompts of token ids can be served, by "
            "/v1/completions."
        )
    return served.tokenizer


def require_at_most(value: int, limit: int, name: str, what: str | None = None) -> None:
    """Raise `ApiError`, 400, if `value` is beyond `limit`. `what` it counts, if that is not the
    field itself.
    """
    if value > limit:
        raise bad_request(
            f"{what or name} is {shown(value)}; this server takes at most {limit}.", name
        )


def checked_prompt(
    token_ids: list[int], served: Served, name: str = "prompt", least: int = 1
) -> list[int]:
    """`token_ids`, if they are a prompt that the model could read and that leaves room for `least`
    completion tokens. Raises `ApiError`, 400.
    """
    engine = served.engine
    if not token_ids:
        raise bad_request(f"{name} is empty; give at least one token.", name)
    if len(token_ids) + least > engine.max_model_len:
        raise too_long(len(token_ids), least, served, name)
    if not all(type(each) is int for each in token_ids):
        raise bad_request(f"{name} must be text or a list of token ids.", name)
    if min(token_ids) < 0 or max(token_ids) >= engine.vocab_size:
        wrong = next(each for each in token_ids if not 0 <= each < engine.vocab_size)
        raise bad_request(
            f"{name} holds {shown(wrong)}; token ids are in [0, {engine.vocab_size}).", name
        )
    return token_ids


def prompt_list(given: object, name: str) -> list[str | list[int]]:
    """Prompts that are given as text, as token ids, or as a list of these. Raises `ApiError`,
    400.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise bad_request(
            f"{name} must be text, token ids or a list of these, not {shown(given)}.", name
        )
    if not given:
        raise bad_request(f"{name} is empty; give at least one token.", name)
    if type(given[0]) is int:
        return [given]
    for each in given:
        if not isinstance(each, str | list):
            raise bad_request(
                f"{name} holds {shown(each)}; it must be text, token ids or a list of these.", name
            )
    return given


def room(
    token_ids: Sequence[int], asked: int | None, served: Served, default: int | None, name: str
) -> int:
    """Completion tokens at most.

    Args:
        token_ids: the prompt.
        asked: what the client wants; None: `default`, or what the context leaves if that is less.
        served: has the context's length.
        default: None: all that the context leaves.
        name: of the client's field.

    Raises:
        ApiError: 400, if prompt and `asked` do not fit together.
    """
    left = served.engine.max_model_len - len(token_ids)
    if asked is None:
        return left if default is None else min(left, default)
    if asked > left:
        raise too_long(len(token_ids), asked, served, name)
    return asked


def too_long(num_prompt_tokens: int, max_tokens: int, served: Served, name: str) -> ApiError:
    """400: it does not fit into the context."""
    limit = served.engine.max_model_len
    left = limit - num_prompt_tokens
    remedy = (
        f"shorten {name}"
        if left < 1 or name in ("prompt", "messages")
        else f"lower {name} to {left}"
    )
    return bad_request(  # clients that shorten conversations by themselves look for OpenAI's words
        f"This model's maximum context length is {limit} tokens, and the request is longer: "
        f"{num_prompt_tokens} in the "
        f"prompt and {shown(max_tokens)} for the completion; {remedy}.",
        name,
        "context_length_exceeded",
    )


def require_possible_length(text: str, served: Served, name: str) -> None:
    """Refuse a text that cannot fit whatever its tokens are, before time is spent on it. Raises
    `ApiError`, 400.
    """
    longest = served.longest_token
    if longest is not None and len(text) > longest * served.engine.max_model_len:
        raise bad_request(
            f"{name} has {len(text)} characters, more than the model's context of "
            f"{served.engine.max_model_len} tokens "
            "can hold.",
            name,
            "context_length_exceeded",
        )


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
