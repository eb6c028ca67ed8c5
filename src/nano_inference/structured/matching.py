"""`GrammarState`: the grammar of one sample, with the mask of the token that comes next."""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from nano_inference.structured.backend import Backend, GrammarError, Matcher, Vocabulary
from nano_inference.structured.grammar import Grammar
from nano_inference.structured.mask_bits import cut_to, mask_of, may_draw, num_words
from nano_inference.structured.thought import Thought


class GrammarState:
    """The grammar of one sample, as far as its tokens are known.

    Until `begin` it waits for its matcher. From then on `words` is the mask of the token that
    comes next, whatever is accepted.

    Args:
        grammar: of the request.
        token_ids: that the sample has already, from where the grammar begins: its own, or those
            behind what was appended to it.
        allowed: the only ids that the request may draw; None: all.

    Attributes:
        words: int32 [W], bit i % 32 of word i // 32 is token i; tokens beyond may not be drawn.
        is_ended: the text has ended: by an end-of-sequence id, or because nothing may follow.
        problem: why it cannot go on; None: it can.
        is_ready: it waits for nothing. Another thread may make it so, and touches it no more.
        compiled: what its compiler promised it before it waited, until it has it.
    """

    __slots__ = (
        "_ahead",
        "_allowed",
        "_at_once",
        "_ends",
        "_matcher",
        "_thought",
        "_token_ids",
        "compiled",
        "grammar",
        "is_ended",
        "is_ready",
        "problem",
        "vocabulary",
        "words",
    )

    def __init__(
        self,
        grammar: Grammar,
        token_ids: Iterable[int] = (),
        allowed: Collection[int] | None = None,
    ) -> None:
        self.grammar = grammar
        self.words: np.ndarray = _NOTHING
        self.is_ended = False
        self.problem: str | None = None
        self.is_ready = False
        self.compiled: Future[Any] | None = None
        self._ahead: list[np.ndarray] = []  # masks behind the drafts of this step
        self._token_ids = list(token_ids)
        self._allowed = allowed if allowed is None else mask_of(allowed)
        self._matcher: Matcher | None = None
        self.vocabulary: Vocabulary | None = None
        self._ends: frozenset[int] = frozenset()
        # None: the text is one of the grammar. Until then the matcher waits at the beginning.
        self._thought: Thought | None = None
        # while the thought may still begin: follows the text as if it had none; None: it has one
        self._at_once: Matcher | None = None

    @property
    def num_behind(self) -> int:
        """Tokens that its matcher will have to go through first."""
        return len(self._token_ids)

    def begin(
        self,
        matcher: Matcher,
        vocabulary: Vocabulary,
        first: np.ndarray,
        thought: Thought | None = None,
    ) -> None:
        """Take a matcher at the beginning of a text, this state's alone.

        Args:
            matcher: of the grammar.
            vocabulary: that it was compiled for.
            first: its first mask; shared, so it is not written.
            thought: what may stand before the grammar, at its beginning; None: nothing.
        """
        self._matcher, self.vocabulary, self.compiled = matcher, vocabulary, None
        self._ends = frozenset(vocabulary.eos_token_ids)
        self.words, self._thought = first, thought
        if thought is not None:
            if not thought.is_open:
                self._at_once = matcher.copy()
            self.words = thought.words if thought.is_open else thought.or_none(first)
        self._cut()
        if self._token_ids:
            for token_id in self._token_ids:
                self.accept(token_id)
            self.fill()
        self._token_ids = []
        self.is_ready = True  # last: from here on the engine's thread may use it

    def fail(self, problem: str) -> None:
        """It will not get a matcher."""
        self.problem, self.is_ready = problem, True

    def accept(self, token_id: int) -> None:
        """The sample goes on with this token. `fill` has to follow before the next draw."""
        if self.is_ended or self.problem is not None:
            return
        if self._thought is not None:
            self._think(self._thought, token_id)
        else:
            self._go_on(token_id)

    def fill(self, others: Iterable["GrammarState"] = ()) -> None:
        """Make the mask of the next token, and those of other samples' next tokens, of each backend
        at once.
        """
        found: dict[Backend, list[tuple[GrammarState, Matcher]]] = {}
        for state in (self, *others):
            matcher = state.changes
            if matcher is not None:
                found.setdefault(matcher.backend, []).append((state, matcher))
        for backend, pairs in found.items():
            # a draw may still be reading the last masks
            vocabulary = pairs[0][0].vocabulary
            assert vocabulary is not None
            table = np.zeros((len(pairs), num_words(vocabulary.size)), dtype=np.int32)
            problems = backend.fill([matcher for _, matcher in pairs], table)
            for (state, _), words, problem in zip(pairs, table, problems, strict=True):
                state.take(words, problem)

    def look_ahead(self, drafts: Iterable[int]) -> int:
        """Make the masks behind drafts; returns how many drafts the grammar allows, up to the last
        behind which something may be drawn.
        """
        state, self._ahead = self.fork(), []
        for token_id in drafts:
            if not may_draw(state.words, token_id):
                break
            state.accept(token_id)
            state.fill()
            if state.is_ended or state.problem is not None:
                break
            self._ahead.append(state.words)
        return len(self._ahead)

    def mask_behind(self, num_drafts: int) -> np.ndarray:
        """The mask behind so many of the drafts that were looked at last; behind none: `words`."""
        return self._ahead[num_drafts - 1] if num_drafts else self.words

    def forced(self) -> Sequence[int]:
        """Tokens that have to follow, as the tokenizer would split them; maybe none."""
        matcher = self.changes
        return matcher.forced() if matcher is not None and self._thought is None else ()

    def fork(self) -> "GrammarState":
        """Another sample's, with the same past."""
        other = GrammarState(self.grammar)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other._token_ids = list(self._token_ids)
        if self._matcher is not None:
            other._matcher = self._matcher.copy()
        if self._at_once is not None:
            other._at_once = self._at_once.copy()
        return other

    @property
    def changes(self) -> Matcher | None:
        """What makes its next mask; None: the mask stays as it is."""
        if self.is_ended or self.problem is not None:
            return None
        return self._matcher if self._thought is None else self._at_once

    def take(self, words: np.ndarray, problem: GrammarError | None) -> None:
        """The mask of the next token is made: int32 [W], this state's from now on."""
        if problem is not None:
            self.problem = str(problem)
        else:
            assert self.vocabulary is not None
            self.words = cut_to(words, self.vocabulary.drawable)
            if self._thought is not None:
                self.words = self._thought.or_none(self.words)
            self._cut()

    def _cut(self) -> None:
        """Leave what the request allows."""
        if self._allowed is not None:
            size = min(len(self._allowed), len(self.words))
            cut = np.zeros_like(self.words)
            np.bitwise_and(self.words[:size], self._allowed[:size], out=cut[:size])
            self.words = cut
        if not self.words.any():
            also = "" if self._allowed is None else " and allowed_token_ids"
            self.problem = f"the grammar{also} left no token to draw"

    def _go_on(self, token_id: int) -> None:
        """The grammar's text goes on."""
        if token_id in self._ends:
            self.is_ended = True
        elif self._matcher is None:
            self.problem = f"token {token_id} cannot follow"
        else:
            try:
                self._matcher.accept(token_id)
            except GrammarError as problem:
                self.problem = str(problem)

    def _think(self, before: Thought, token_id: int) -> None:
        """The thought begins, goes on or is over; or the text turns out to have none."""
        assert self.vocabulary is not None
        thought = self._thought = before.behind(self.vocabulary.bytes_of(token_id))
        if thought is None and not before.is_open:
            self._matcher, self._at_once = self._at_once, None
            self._go_on(token_id)
            return
        may_begin = thought is not None and not thought.is_open
        self._at_once = _behind(self._at_once, token_id) if may_begin else None
        if thought is not None and self._at_once is None:
            self.words = thought.words
            self._cut()


def _behind(matcher: Matcher | None, token_id: int) -> Matcher | None:
    """A matcher behind one more token; None where it does not allow that."""
    try:
        if matcher is not None:
            matcher.accept(token_id)
    except GrammarError:
        return None
    return matcher


_NOTHING = np.zeros(0, dtype=np.int32)
