"""A model's tokenizer in llguidance's form, in which text never becomes a special token.

llguidance splits forced text with the tokenizer that it gets. A model's tokenizer reads the name of
a special token as that token: a forced `<|im_end|>` would end the sample, and any other special
token would contradict the grammar. So the split runs without special tokens.
"""

import json
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from nano_inference.errors import InvalidRequest
from nano_inference.structured.backend import Vocabulary
from nano_inference.structured.token_bytes import special_token_ids


def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    """Build a vocabulary's tokenizer for llguidance. Raises `InvalidRequest`."""
    try:
        ends = list(vocabulary.eos_token_ids)
        return LLTokenizer(TokenizerWrapper(_Split(vocabulary)), eos_token=ends)
    except Exception as problem:
        raise InvalidRequest(
            f"llguidance cannot read this model's tokenizer: {problem}; use the model without "
            "grammars, or choose another backend."
        ) from None


class _Split:
    """Splits text into tokens that are not special, for `TokenizerWrapper`.

    Attributes:
        eos_token_id: First id that ends a text. `LLTokenizer` takes the others as an argument.
        tokens: Bytes of each token. A special token has its name.
        special_token_ids: Tokens that no text contains.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = special_token_ids(vocabulary)
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens = [
            vocabulary.bytes_of(each) or b"<[%d]>" % each for each in range(vocabulary.size)
        ]
        self.special_token_ids = sorted(special)
        self._special = special
        tokenizer: dict[str, Any] = json.loads(vocabulary.tokenizer_json)
        self._tokenizer = Tokenizer.from_str(_without(tokenizer, special))
        # the library renumbers added tokens if some are missing
        ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
        left = self._tokenizer.get_added_tokens_decoder()
        self._id_of = {each: ids[token.content] for each, token in left.items()}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for token_id in self._encode(text):
            if token_id in self._special:  # the vocabulary may also have its name as a piece
                for character in self.tokens[token_id].decode():
                    ids += self._encode(character)
            else:
                ids.append(token_id)
        return ids

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self._id_of.get(each, each) for each in ids]


def _without(tokenizer: dict[str, Any], special: frozenset[int]) -> str:
    """Return a tokenizer without special tokens, and without parts that lengthen or cut a text:
    padding, a space in front, and tokens that take the spaces around them.
    """
    added: list[dict[str, Any]] = tokenizer.get("added_tokens") or []
    changes = {
        "added_tokens": [
            token
            for token in added
            if token["id"] not in special and not token["lstrip"] and not token["rstrip"]
        ],
        "normalizer": _without_prefix(tokenizer.get("normalizer")),
        "padding": None,
        "pre_tokenizer": _without_prefix(tokenizer.get("pre_tokenizer")),
        "truncation": None,
    }
    return json.dumps({**tokenizer, **changes}, ensure_ascii=False)


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer that puts no space in front of a text."""
    match part:
        case None | {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**part, "add_prefix_space": False}
        case {"type": "Sequence"}:
            name = "normalizers" if "normalizers" in part else "pretokenizers"
            parts = [_without_prefix(each) for each in part[name]]
            return {**part, name: [each for each in parts if each is not None]}
        case _:
            return part
