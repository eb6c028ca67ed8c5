"""Tokenizer of a Hugging Face folder. Uses only the `tokenizers` library, since importing
transformers is slow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from nano_inference.errors import InvalidRequest, ModelLoadError, one_line
from nano_inference.system.regular_files import MISSING_TOKENIZER, read_json
from nano_inference.text.added_tokens import add_tokens, with_special_tokens_map
from nano_inference.text.template_files import read_templates

# Characters. `encode` holds the interpreter lock, for seconds if a text has megabytes.
# `encode_batch` releases it, but is slower for short texts.
LONG = 4096
_CURE = "set tokenizer_path to a folder that has the model's tokenizer.json"


@dataclass(frozen=True, repr=False, eq=False)
class Tokenizer:
    """Tokenizer of a model. Made by `load_tokenizer`.

    Attributes:
        backend: Tokenizer of the `tokenizers` library.
        vocab_size: Number of token ids, including added tokens. A model's embedding may have more
            rows.
        eos_token_id: Id of `special_tokens["eos_token"]`, or None if there is no such token.
        special_tokens: Variables of chat templates: `bos_token`, `eos_token` … -> the token's text.
        chat_template: Jinja source of the chat template, or None.
        tool_template: Jinja source of the template for chats with tools, or None.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    eos_token_id: int | None
    special_tokens: Mapping[str, str]
    chat_template: str | None
    tool_template: str | None = None

    def template_for(self, *, tools: bool) -> str:
        """Return the template of a chat. Raises `InvalidRequest` if there is none."""
        template = (self.tool_template if tools else None) or self.chat_template
        if template is not None:
            return template
        if self.tool_template is not None:
            raise InvalidRequest(
                "the model's tokenizer has a chat template only for chats with tools; give tools, "
                "or pass plain text or token ids instead"
            )
        raise InvalidRequest(
            "the model's tokenizer has no chat template; pass plain text or token ids instead"
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`. Special tokens in `text` always become their ids."""
        return encode_ids(self.backend, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Invalid UTF-8 becomes U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def encode_ids(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False
) -> list[int]:
    """Return the token ids of `text`. Other threads run while a long text is encoded."""
    if len(text) <= LONG:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder has a tokenizer, or a note on why it is missing."""
    return any((folder / name).is_file() for name in ("tokenizer.json", MISSING_TOKENIZER))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load `tokenizer.json`, `tokenizer_config.json`, chat templates and added tokens of `folder`.

    Raises:
        ModelLoadError: A file is missing or malformed.
    """
    if (reason := folder / MISSING_TOKENIZER).is_file():
        raise ModelLoadError(f"{reason.read_text('utf-8')}; {_CURE}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ModelLoadError(f"the tokenizer file {folder / name} is missing")
    backend = _load_backend(folder / "tokenizer.json")
    config = with_special_tokens_map(folder, read_json(folder / "tokenizer_config.json"))
    try:
        add_tokens(backend, folder, config)
    except Exception as error:  # wrong values, and the library's bare Exception
        raise ModelLoadError(
            f"cannot read the added tokens of {folder}: {one_line(error)}"
        ) from error
    special_tokens = _special_tokens(config)
    eos_token = special_tokens.get("eos_token")
    eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
    templates = read_templates(folder, config)
    return Tokenizer(
        backend=backend,
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        eos_token_id=eos_token_id,
        special_tokens=special_tokens,
        chat_template=templates.default,
        tool_template=templates.tools,
    )


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ModelLoadError(f"cannot read the tokenizer file {path}: {error}") from error
    # a file may have the truncation and padding of its training
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `{"eos_token": "</s>", ...}`. The config has a token as text, or as an object with the
    text in `content`.
    """
    tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens
