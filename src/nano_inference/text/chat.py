"""Chat templates: a conversation to the text, or the token ids, that an instruction-tuned model was trained on.

A template comes with the checkpoint, so it is untrusted code: it runs in Jinja's immutable sandbox and sees plain data.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nano_inference.errors import InvalidRequest
from nano_inference.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, object]]


def render_chat(
    template: str, messages: Messages, *, add_generation_prompt: bool = True, special_tokens: Mapping[str, str]
) -> str:
    """The conversation as text, equal to what transformers' `apply_chat_template` renders.

    Args:
        template: Jinja source.
        messages: `{"role": ..., "content": ...}` of strings, numbers, lists and mappings.
        add_generation_prompt: end with the opening of the assistant's turn.
        special_tokens: `bos_token`, `eos_token` … -> text, visible to the template by these names.

    Raises:
        InvalidRequest: there is no message, the template is broken, refuses the messages or leaves the sandbox, or a
            message holds something else than plain data.
    """
    if not messages:
        raise InvalidRequest("the conversation is empty; give at least one message")
    conversation = [_plain(message) for message in messages]
    try:
        return _compile(template).render(
            messages=conversation,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except Exception as error:  # whatever a template's code raises is the template's or the messages' fault
        raise InvalidRequest(f"the chat template failed on these messages: {error}") from error


def encode_chat(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Token ids of the conversation up to and including the opening of the assistant's turn.

    Special tokens come from the template alone: the tokenizer adds none. One that a message's text writes out becomes
    that token, as in transformers.

    Raises:
        InvalidRequest: the tokenizer has no chat template, or `render_chat` refuses.
    """
    if tokenizer.chat_template is None:
        raise InvalidRequest("the model's tokenizer has no chat template; pass plain text or token ids instead")
    text = render_chat(tokenizer.chat_template, messages, special_tokens=tokenizer.special_tokens)
    return tokenizer.encode(text, add_special_tokens=False)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training. Here it renders as what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _plain(value: object) -> Any:
    """A copy out of plain types only: the sandbox cannot know which methods of any other object do harm."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enumeration's member would be its name
    if isinstance(value, int | float):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise InvalidRequest(
        f"a chat message holds a {type(value).__name__}; strings, numbers, lists and mappings can be rendered"
    )


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model was not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
