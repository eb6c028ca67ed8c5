"""Bytes of tokens, for backends that cannot read a tokenizer."""

import json
import re
from typing import Any

from nano_inference.structured.backend import Vocabulary


def token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """Return the bytes that each token adds to a text. Special tokens, end-of-sequence ids, ids
    unknown to the tokenizer and bytes that are never valid UTF-8 get b"", and cannot be drawn
    under a grammar.
    """
    hidden = special_token_ids(vocabulary)
    texts = (
        b"" if token_id in hidden else vocabulary.bytes_of(token_id)
        for token_id in range(vocabulary.size)
    )
    return [b"" if _NEVER.search(text) else text for text in texts]


def special_token_ids(vocabulary: Vocabulary) -> frozenset[int]:
    """Return the tokens that no text contains: special ones, the ends, and ids without a token."""
    tokenizer: dict[str, Any] = json.loads(vocabulary.tokenizer_json)
    special = {token["id"] for token in tokenizer.get("added_tokens") or [] if token["special"]}
    empty = {each for each in range(vocabulary.size) if not vocabulary.bytes_of(each)}
    return frozenset(special | empty | set(vocabulary.eos_token_ids))


_NEVER = re.compile(rb"[\xc0\xc1\xf5-\xff]")
