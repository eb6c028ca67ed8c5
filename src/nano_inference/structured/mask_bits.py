"""Masks: which tokens may be drawn, int32 [W]. Bit i % 32 of word i // 32 is token i; tokens beyond
may not be drawn.
"""

from collections.abc import Collection

import numpy as np

WORD = 32  # tokens that a word of a mask tells of


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // WORD)


def cut_to(words: np.ndarray, size: int) -> np.ndarray:
    """A mask of the ids below `size` alone: a view; the rest of its last word is cleared."""
    words = words[: num_words(size)]
    if size % WORD and len(words) == num_words(size):
        words[-1] &= (1 << (size % WORD)) - 1
    return words


def mask_of(token_ids: Collection[int]) -> np.ndarray:
    """A mask that allows these ids alone: int32 [words up to the highest]."""
    ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    bits = np.zeros((int(ids.max(initial=0)) // WORD + 1) * WORD, dtype=np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def may_draw(words: np.ndarray, token_id: int) -> bool:
    """Whether a mask allows a token."""
    word = token_id // WORD
    return word < len(words) and bool(int(words[word]) >> token_id % WORD & 1)


def bans_under(words: np.ndarray, token_ids: Collection[int]) -> Collection[int]:
    """Those of the stop ids that `min_tokens` bans which stay banned under the mask of a grammar:
    at the grammar's end, where nothing but a stop id may follow, none.
    """
    return token_ids if without(words, token_ids).any() else ()


def without(words: np.ndarray, token_ids: Collection[int]) -> np.ndarray:
    """A mask without some ids."""
    left = words.copy()
    if token_ids:
        cut = mask_of(token_ids)[: len(left)]
        left[: len(cut)] &= ~cut
    return left
