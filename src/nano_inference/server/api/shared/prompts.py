"""Prompts within the model's limits, from text, token ids or conversations, and the parsers of
their answers.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from nano_inference.server.api.parsing import (
    AT_ONCE,
    Behind,
    ChatFormat,
    Schemas,
    make_parser,
    markers_of,
    reasoning_before,
)
from nano_inference.server.api.shared.fields import decode
from nano_inference.server.api.shared.protocol import AnswerParsers, Served
from nano_inference.server.api.shared.thoughts import History, require_kept, with_history
from nano_inference.server.errors import ApiError, bad_request, shown
from nano_inference.text.chat import encode_chat
from nano_inference.text.detokenizer import SPECIAL_MARK, Detokenizer
from nano_inference.text.tokenizer import Tokenizer

log = logging.getLogger("nano_inference.server")


def adapter_of(name: str | None, served: Served, field: str = "model") -> str | None:
    """Return the adapter that a request's model name selects, or None for the base model. Raises
    `ApiError` 404 for an unknown name.
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
    """Return the tokenizer. Raises `ApiError` 400 if the model has none."""
    if served.tokenizer is None:
        raise bad_request(
            "the model has no tokenizer; send prompts of token ids to /v1/completions."
        )
    return served.tokenizer


def require_at_most(value: int, limit: int, name: str, subject: str | None = None) -> None:
    """Raise `ApiError` 400 if `value` exceeds `limit`. `subject` names the counted things, if they
    are not the field itself.
    """
    if value > limit:
        raise bad_request(
            f"{subject or name} is {shown(value)}; this server accepts at most {limit}.", name
        )


def checked_prompt(
    token_ids: list[int], served: Served, name: str = "prompt", least: int = 1
) -> list[int]:
    """Return `token_ids` if they are a valid prompt that leaves room for `least` completion tokens.
    Raises `ApiError` 400.
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


def prompt_list(prompts: object, name: str) -> list[str | list[int]]:
    """Return a list of prompts from text, token ids, or a list of these. Raises `ApiError` 400."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list):
        raise bad_request(
            f"{name} must be text, token ids or a list of these, not {shown(prompts)}.", name
        )
    if not prompts:
        raise bad_request(f"{name} is empty; give at least one token.", name)
    if type(prompts[0]) is int:
        return [prompts]
    for prompt in prompts:
        if not isinstance(prompt, str | list):
            raise bad_request(
                f"{name} holds {shown(prompt)}; it must be text, token ids or a list of these.",
                name,
            )
    return prompts


def room(
    token_ids: Sequence[int], asked: int | None, served: Served, default: int | None, name: str
) -> int:
    """Return the maximum number of completion tokens.

    Args:
        token_ids: The prompt.
        asked: The client's maximum. None: `default`, or the rest of the context if that is less.
        served: Served model, with the length of its context.
        default: Default maximum. None: the rest of the context.
        name: Name of the client's field.

    Raises:
        ApiError: 400, the prompt and `asked` do not fit into the context together.
    """
    left = served.engine.max_model_len - len(token_ids)
    if asked is None:
        return left if default is None else min(left, default)
    if asked > left:
        raise too_long(len(token_ids), asked, served, name)
    return asked


def too_long(num_prompt_tokens: int, max_tokens: int, served: Served, name: str) -> ApiError:
    """Return the error, 400, for a request that does not fit into the context."""
    limit = served.engine.max_model_len
    left = limit - num_prompt_tokens
    remedy = (
        f"shorten {name}"
        if left < 1 or name in ("prompt", "messages")
        else f"lower {name} to {left}"
    )
    return bad_request(  # OpenAI's wording, by which clients recognize it and shorten prompts
        f"This model's maximum context length is {limit} tokens, and the request is longer: "
        f"{num_prompt_tokens} in the "
        f"prompt and {shown(max_tokens)} for the completion; {remedy}.",
        name,
        "context_length_exceeded",
    )


def require_possible_length(text: str, served: Served, name: str) -> None:
    """Reject a text that cannot fit into the context, before time is spent on tokenizing it. Raises
    `ApiError` 400.
    """
    longest = served.longest_token
    if longest is not None and len(text) > longest * served.engine.max_model_len:
        raise bad_request(
            f"{name} has {len(text)} characters, more than the model's context of "
            f"{served.engine.max_model_len} tokens can hold; shorten it.",
            name,
            "context_length_exceeded",
        )


def text_of(content: object, where: str) -> str:
    """Return the text of a message's content: a string, null, or a list of text parts. Raises
    `ApiError` 400.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(
            f"{where} must be a string or a list of parts, not {shown(content)}.", where
        )
    texts = [_text_of_part(part, f"{where}.{index}") for index, part in enumerate(content)]
    return "\n".join(text for text in texts if text)


def _text_of_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise bad_request(f"{where} must be an object with a type, not {shown(part)}.", where)
    if kind not in ("text", "refusal"):
        raise bad_request(f"{where} is of type {shown(kind)}; this model reads only text.", where)
    text = part.get(kind)
    if not isinstance(text, str):
        raise bad_request(f"{where}.{kind} must be a string, not {shown(text)}.", f"{where}.{kind}")
    return text


def arguments_of(arguments: object, served: Served, where: str) -> dict[str, Any]:
    """Return the arguments of a tool call, which are JSON text. Raises `ApiError` 400 unless they
    are an object.
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


_TAIL = 64  # prompt tokens to search for a template's opening of the reasoning


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
    history: History | None = None,
) -> list[int]:
    """Return the token ids of a conversation. The arguments are those of `encode_chat`. With
    `add_special_tokens` they are surrounded by the tokens that the tokenizer puts around any text.
    `history` keeps or strips the reasoning of earlier turns. Raises `ApiError` and
    `InvalidRequest`.
    """
    tokenizer = need_tokenizer(served)
    if tools:
        require_at_most(len(tools), served.config.max_tools, "tools", "the number of tools")
        if served.chat_format.tools is None:
            _say_once()
    require_possible_length("".join(each["content"] or "" for each in messages), served, "messages")
    messages, template_kwargs = with_history(messages, history, served, template_kwargs)
    token_ids = encode_chat(
        tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
        documents=documents,
    )
    if history == "keep":
        require_kept(messages, token_ids, served)
    return _around(token_ids, tokenizer) if add_special_tokens else token_ids


def _around(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the ids between those that the tokenizer puts around any text."""
    bare, whole = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=True)
    begin = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return [*whole[:begin], *token_ids, *whole[begin + len(bare) :]]


@cache
def _say_once() -> None:
    log.warning(
        "a request offers tools, but this model's notation of tool calls is unknown: only calls "
        "in Hermes's notation are recognized; set --tool-format to choose another."
    )


def behind_reasoning(
    prompt: Sequence[int], served: Served, *, goes_on: bool = False, parsed: bool = True
) -> Behind:
    """Return the text that precedes the grammar of an answer.

    Args:
        prompt: Token ids.
        served: Served model, with its notation.
        goes_on: True if the prompt ends with the beginning of the answer.
        parsed: True if the answer separates reasoning by its markers, if they are visible.
    """
    if served.chat_format.reasoning is None:
        return AT_ONCE
    added = need_tokenizer(served).backend.get_added_tokens_decoder().values()
    hidden = {token.content for token in added if token.special and parsed}
    return reasoning_before(
        served.chat_format, prompt_tail=tail_of(prompt, served), goes_on=goes_on, hidden=hidden
    )


def tail_of(prompt: Sequence[int], served: Served) -> str:
    """Return the end of a prompt as text, as `make_parser` reads it."""
    return need_tokenizer(served).decode(prompt[-_TAIL:], skip_special_tokens=False)


def parser_of(
    prompt: Sequence[int],
    served: Served,
    *,
    tools: Schemas | None,
    format: ChatFormat | None = None,
) -> AnswerParsers | None:
    """Return a function that makes the parser of each answer. None: the model's output is only
    content.

    Args:
        prompt: Token ids.
        served: Served model, with its notation.
        tools: Schemas of the offered tools' arguments, by name. None: the prompt offers no tools.
        format: Notation of the answers. None: the model's.
    """
    format = served.chat_format if format is None else format
    if not (format.reasoning or format.in_channels or (tools is not None and format.tools)):
        return None
    mark = SPECIAL_MARK if format.in_channels else ""
    tail = Detokenizer(need_tokenizer(served), skip_special_tokens=False, mark=mark)
    make = partial(
        make_parser,
        format,
        tools=tools,
        reasoning=True,
        prompt_tail=tail.push(prompt[-_TAIL:]) + tail.finish(),
        mark=mark,
    )
    shown = markers_of(format) if tools is not None else frozenset[str]()
    return AnswerParsers(make, marked=format.in_channels, shown=shown)
