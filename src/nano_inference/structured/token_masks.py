"""`TokenMasks`: a cache of the masks that given tokens were drawn under, for many texts at once."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from weakref import WeakValueDictionary

import numpy as np

from nano_inference.structured.compiler import GrammarCompiler
from nano_inference.structured.grammar import Grammar
from nano_inference.structured.mask_bits import may_draw
from nano_inference.structured.matching import GrammarState

MOST_BYTES = 2**27  # size of all cached masks

Text = tuple[Grammar, tuple[int, ...]]
Masks = list[np.ndarray]  # int32 [W] per token; read-only


class NotInGrammar(Exception):
    """A token of a text is forbidden at its position.

    Attributes:
        text: Index of the text.
        place: Index of the token in the text.
    """

    def __init__(self, text: int, position: int, why: str) -> None:
        super().__init__(why)
        self.text = text
        self.place = position


class TokenMasks:
    """Masks by grammar and tokens. Equal masks share one array while it is referenced. Thread-safe.

    Args:
        grammars: Compiler of the grammars.
        most_bytes: Limit of the cache. An array that several texts share counts for each of them.
    """

    def __init__(self, grammars: GrammarCompiler, most_bytes: int = MOST_BYTES) -> None:
        self._grammars = grammars
        self._most = most_bytes
        self._kept: OrderedDict[Text, tuple[Masks, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[bytes, np.ndarray] = WeakValueDictionary()
        self.num_bytes = 0

    def of(self, texts: Sequence[Text]) -> list[Masks]:
        """Return the masks of each text's tokens. A text begins with its grammar.

        Raises `NotInGrammar` and the errors of `GrammarCompiler.wait`.
        """
        by_text = {text: masks for text in texts if (masks := self._recall(text)) is not None}
        missing = [text for text in dict.fromkeys(texts) if text not in by_text]
        made = [Masks() for _ in missing]
        for at, states in self._steps(missing):
            for (row, state), (_, tokens) in ((each, missing[each[0]]) for each in states):
                if (why := _refusal(state, tokens[at])) is not None:
                    raise NotInGrammar(texts.index(missing[row]), at, why)
                made[row].append(self.shared(state.words))
        for text, masks in zip(missing, made, strict=True):
            by_text[text] = masks
            self._keep(text, masks)
        return [by_text[text] for text in texts]

    def _steps(self, texts: Sequence[Text]) -> Iterator[tuple[int, list[tuple[int, GrammarState]]]]:
        """Yield each token position with the states of the texts that have a token there, by the
        index of the text. The masks of all texts are made in one call.
        """
        states = [GrammarState(grammar) for grammar, _ in texts]
        for state, (_, tokens) in zip(states, texts, strict=True):
            if tokens:
                self._grammars.wait(state)
        for at in range(max((len(tokens) for _, tokens in texts), default=0)):
            live = [(row, state) for row, state in enumerate(states) if at < len(texts[row][1])]
            if at:
                for row, state in live:
                    state.accept(texts[row][1][at - 1])
                live[0][1].fill(state for _, state in live[1:])
            yield at, live

    def shared(self, words: np.ndarray) -> np.ndarray:
        """Return the shared array of a mask. A copy: `words` may be a row of a larger table."""
        digest = blake2b(words.data, digest_size=16).digest()
        with self._lock:
            known = self._known.get(digest)
            if known is None:
                known = self._known[digest] = words.copy()
        return known

    def _recall(self, text: Text) -> Masks | None:
        with self._lock:
            if text not in self._kept:
                return None
            self._kept.move_to_end(text)
            return self._kept[text][0]

    def _keep(self, text: Text, masks: Masks) -> None:
        size = sum({id(words): words.nbytes for words in masks}.values())
        with self._lock:
            if text in self._kept or size > self._most:
                return
            self._kept[text] = masks, size
            self.num_bytes += size
            while self.num_bytes > self._most:
                _, (_, gone) = self._kept.popitem(last=False)
                self.num_bytes -= gone


def _refusal(state: GrammarState, token_id: int) -> str | None:
    """Return why a token cannot be drawn, or None if it can."""
    if state.problem is not None:
        return f"is at a position where its grammar cannot continue: {state.problem}"
    if state.is_ended:
        return "comes after the end of its grammar"
    return None if may_draw(state.words, token_id) else "is not in its grammar"
