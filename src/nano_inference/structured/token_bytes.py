"""The bytes of tokens, for backends that know no tokenizer."""

import re

from nano_inference.structured.backend import Vocabulary
from nano_inference.structured.llguidance_backend import tokenizer_of


def token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """What each token adds to a text; b"" where it adds none: special tokens, the ends, ids that
    the tokenizer lacks, and bytes that no text in UTF-8 has. They cannot be drawn under a grammar.
    Raises `InvalidRequest`.
    """
    tokenizer = tokenizer_of(vocabulary)
    hidden = set(vocabulary.eos_token_ids)
    hidden |= {each for each in range(vocabulary.size) if tokenizer.is_special_token(each)}
    texts = (
        b"" if token_id in hidden else tokenizer.decode_bytes([token_id])
        for token_id in range(vocabulary.size)
    )
    return [b"" if _NEVER.search(text) else text for text in texts]


_NEVER = re.compile(rb"[\xc0\xc1\xf5-\xff]")
