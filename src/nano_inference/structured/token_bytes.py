"""The bytes of tokens, for backends that know no tokenizer."""

import re

from llguidance import LLTokenizer

from nano_inference.errors import InvalidRequest
from nano_inference.structured.backend import Vocabulary
from nano_inference.structured.llguidance_backend import with_plain_tokens


def token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """What each token adds to a text; b"" where it adds none: special tokens, the ends, ids that
    the tokenizer lacks, and bytes that no text in UTF-8 has. They cannot be drawn under a grammar.
    Raises `InvalidRequest`.
    """
    try:
        tokenizer = LLTokenizer(
            with_plain_tokens(vocabulary.tokenizer_json),
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos_token_ids),
        )
    except Exception as problem:
        raise InvalidRequest(
            f"this model's tokenizer cannot be read: {problem}; grammars are not possible with it."
        ) from None
    hidden = set(vocabulary.eos_token_ids)
    hidden |= {each for each in range(vocabulary.size) if tokenizer.is_special_token(each)}
    texts = (
        b"" if token_id in hidden else tokenizer.decode_bytes([token_id])
        for token_id in range(vocabulary.size)
    )
    return [b"" if _NEVER.search(text) else text for text in texts]


_NEVER = re.compile(rb"[\xc0\xc1\xf5-\xff]")
