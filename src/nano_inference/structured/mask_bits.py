"""Masks of the tokens that may be drawn, int32 [W]. Bit i % 32 of word i // 32 is token i. Tokens
beyond the last word may not be drawn.
"""

from collections.abc import Collection

import numpy as np

WORD = 32  # tokens per word of a mask


def num_words(vocab_size: int) -> int:
    """Return the number of words of a mask."""
    return -(-vocab_size // WORD)


def cut_to(words: np.ndarray, size: int) -> np.ndarray:
    """Return a view of the ids below `size`. Clears the other bits of the last word, in place."""
    words = words[: num_words(size)]
    if size % WORD and len(words) == num_words(size):
        words[-1] &= (1 << (size % WORD)) - 1
    return words


def mask_of(token_ids: Collection[int]) -> np.ndarray:
    """Return a mask that allows only these ids: int32 [words up to the highest]."""
    ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    bits = np.zeros((int(ids.max(initial=0)) // WORD + 1) * WORD, dtype=np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def may_draw(words: np.ndarray, token_id: int) -> bool:
    """Return True if a mask allows a token."""
    word = token_id // WORD
    return word < len(words) and bool(int(words[word]) >> token_id % WORD & 1)


def bans_under(words: np.ndarray, token_ids: Collection[int]) -> Collection[int]:
    """Return the stop ids banned by `min_tokens` that stay banned under a grammar's mask: none at
    the end of the grammar, where only a stop id may follow.
    """
    return token_ids if without(words, token_ids).any() else ()


def without(words: np.ndarray, token_ids: Collection[int]) -> np.ndarray:
    """Return a copy of the mask without some ids."""
    left = words.copy()
    if token_ids:
        cut = mask_of(token_ids)[: len(left)]
        left[: len(cut)] &= ~cut
    return left
