"""Prompts and adapters of a request, checked against the model's limits."""

import logging
from collections.abc import Sequence

from nano_inference.server.api.shared.generation import Served
from nano_inference.server.errors import ApiError, bad_request, shown
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
