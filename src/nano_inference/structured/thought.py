"""Thought: reasoning, as free text, before the text of a grammar. A closing marker ends it, and an
opening marker may begin it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from nano_inference.structured.backend import Vocabulary
from nano_inference.structured.grammar import Grammar
from nano_inference.structured.mask_bits import mask_of, num_words, without

MOST_KEPT = 8  # pairs of markers per vocabulary


@dataclass(frozen=True, slots=True)
class ThoughtMasks:
    """Masks of a thought's tokens, by the number of marker bytes that the text has so far.

    Attributes:
        opens, closes: The markers.
        opening: Tokens that continue `opens`, by the number of its bytes so far.
        both: Tokens that complete `opens` and also hold `closes`, by the same number. No text may
            begin with them.
        inside: Tokens within a thought, by the number of bytes of `closes` at the end of the text.
            A token that closes the thought holds nothing after the marker, so the next token is
            the first of the grammar.
    """

    opens: bytes
    closes: bytes
    opening: tuple[np.ndarray, ...]
    both: tuple[np.ndarray, ...]
    inside: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Thought:
    """Progress of one sample's thought.

    Attributes:
        masks: Masks of the thought's tokens.
        opened: Number of bytes of `opens` that the text has.
        closed: Number of bytes of `closes` that the text ends with.
    """

    masks: ThoughtMasks
    opened: int = 0
    closed: int = 0

    @property
    def is_open(self) -> bool:
        """True if the thought has begun. Until then the text may still be one of the grammar."""
        return self.opened == len(self.masks.opens)

    @property
    def words(self) -> np.ndarray:
        """Tokens that continue the thought, int32 [W]. Shared: do not write to it."""
        return self.masks.inside[self.closed] if self.is_open else self.masks.opening[self.opened]

    def or_none(self, words: np.ndarray) -> np.ndarray:
        """Return the tokens of the thought, and those of `words`, a mask of text without one."""
        return words & ~self.masks.both[self.opened] | self.words

    def behind(self, said: bytes) -> "Thought | None":
        """Advance by one token of these bytes. None: the thought is over, or the text has none."""
        masks = self.masks
        if not self.is_open:
            missing = masks.opens[self.opened :]
            if said and len(said) < len(missing) and missing.startswith(said):
                return replace(self, opened=self.opened + len(said))
            if not said.startswith(missing):
                return None
            said = said[len(missing) :]
        text = masks.closes[: self.closed] + said
        if masks.closes in text:
            return None
        return Thought(masks, len(masks.opens), _overlap(text, masks.closes))


class Thoughts:
    """Thoughts of one vocabulary, by their markers. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._masks = lru_cache(MOST_KEPT)(self._make)

    def of(self, grammar: Grammar) -> Thought | None:
        """Return the thought that may precede a grammar, or None."""
        if not grammar.after:
            return None
        return Thought(self._masks(grammar.opened_by.encode(), grammar.after.encode()))

    def _make(self, opens: bytes, closes: bytes) -> ThoughtMasks:
        vocabulary = self._vocabulary
        size = vocabulary.drawable
        texts = [(i, vocabulary.bytes_of(i)) for i in range(size)]
        # tokens that may exceed the closing marker, and tokens that may be part of the opening one
        beyond = [(i, text) for i, text in texts if closes[-1] in text[:-1]]
        parts = [
            (i, text)
            for i, text in texts
            if text and (text in opens or (opens and opens[-1] in text))
        ]
        # a sample must not end before it has reached its grammar
        free = without(_mask(range(size), size), vocabulary.eos_token_ids)

        def begins(missing: bytes) -> Callable[[bytes], bool]:
            return lambda text: text.startswith(missing) and closes in text[len(missing) :]

        def goes_on(missing: bytes) -> Callable[[bytes], bool]:
            return lambda text: (
                missing.startswith(text)
                or (text.startswith(missing) and closes not in text[len(missing) :])
            )

        def says_more(known: bytes) -> Callable[[bytes], bool]:
            return lambda text: -1 < (known + text).find(closes) < len(known + text) - len(closes)

        missing = [opens[at:] for at in range(len(opens))]
        return ThoughtMasks(
            opens,
            closes,
            opening=tuple(_mask(_those(parts, goes_on(each)), size) for each in missing),
            both=tuple(_mask(_those(parts, begins(each)), size) for each in missing),
            inside=tuple(
                without(free, _those(beyond, says_more(closes[:at]))) for at in range(len(closes))
            ),
        )


def _those(texts: Iterable[tuple[int, bytes]], fits: Callable[[bytes], bool]) -> list[int]:
    return [token_id for token_id, text in texts if fits(text)]


def _mask(token_ids: Iterable[int], size: int) -> np.ndarray:
    """Return a mask of `size` ids in which only `token_ids` are set."""
    words = np.zeros(num_words(size), dtype=np.int32)
    some = mask_of([*token_ids])[: len(words)]
    words[: len(some)] = some
    return words


def _overlap(text: bytes, marker: bytes) -> int:
    """Return the length of the longest proper prefix of the marker that the text ends with."""
    most = min(len(marker) - 1, len(text))
    return next(size for size in range(most, -1, -1) if text.endswith(marker[:size]))
