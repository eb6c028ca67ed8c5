"""A thought: what may stand before the text of a grammar, told by the text that closes it and maybe
one that opens it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from nano_inference.structured.backend import Vocabulary
from nano_inference.structured.grammar import Grammar
from nano_inference.structured.mask_bits import mask_of, num_words, without

MOST_KEPT = 8  # pairs of markers of a vocabulary


@dataclass(frozen=True, slots=True)
class ThoughtMasks:
    """The tokens of a thought, by how much of a marker is there.

    Attributes:
        opens, closes: the markers.
        opening: for each number of bytes of `opens`, less than all: the tokens that go on with it.
        both: likewise: tokens that hold a whole thought and more, which no text may begin with.
        inside: for each number of bytes of `closes`, less than all, that the text ends with: the
            tokens of a thought. Where one closes it, it says no more than that: the token behind is
            the first of the grammar.
    """

    opens: bytes
    closes: bytes
    opening: tuple[np.ndarray, ...]
    both: tuple[np.ndarray, ...]
    inside: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Thought:
    """How far the thought of one sample has come.

    Attributes:
        masks: by its markers.
        opened: bytes of `opens` that are there.
        closed: bytes of `closes` that the text ends with.
    """

    masks: ThoughtMasks
    opened: int = 0
    closed: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it has begun. Until then the text may still be one of the grammar."""
        return self.opened == len(self.masks.opens)

    @property
    def words(self) -> np.ndarray:
        """The tokens that it goes on with, int32 [W]; shared, so it is not written."""
        return self.masks.inside[self.closed] if self.is_open else self.masks.opening[self.opened]

    def or_none(self, words: np.ndarray) -> np.ndarray:
        """The tokens that it goes on with, or a text without one, of which `words` is the mask."""
        return words & ~self.masks.both[self.opened] | self.words

    def behind(self, said: bytes) -> "Thought | None":
        """Behind one more token, of these bytes. None: it is over, or the text has none."""
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
    """The thoughts of a vocabulary, by their markers. Any thread may call it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._masks = lru_cache(MOST_KEPT)(self._make)

    def of(self, grammar: Grammar) -> Thought | None:
        """What may stand before a grammar; None: nothing."""
        if not grammar.after:
            return None
        return Thought(self._masks(grammar.opened_by.encode(), grammar.after.encode()))

    def _make(self, opens: bytes, closes: bytes) -> ThoughtMasks:
        vocabulary = self._vocabulary
        size = vocabulary.drawable
        texts = [(i, vocabulary.bytes_of(i)) for i in range(size)]
        # those that say more than a marker, and those that say a part of the first
        beyond = [(i, text) for i, text in texts if closes[-1] in text[:-1]]
        parts = [
            (i, text)
            for i, text in texts
            if text and (text in opens or (opens and opens[-1] in text))
        ]
        # no sample may end before it has come to its grammar
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
    """A mask of this many ids."""
    words = np.zeros(num_words(size), dtype=np.int32)
    some = mask_of([*token_ids])[: len(words)]
    words[: len(some)] = some
    return words


def _overlap(text: bytes, marker: bytes) -> int:
    """Length of the longest end of a text that is a beginning of the marker, less than all."""
    most = min(len(marker) - 1, len(text))
    return next(size for size in range(most, -1, -1) if text.endswith(marker[:size]))
