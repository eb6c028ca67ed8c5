"""`GrammarState`: the grammar of one sample, with the mask of its next token."""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from nano_inference.structured.backend import Backend, GrammarError, Matcher, Vocabulary
from nano_inference.structured.grammar import Grammar
from nano_inference.structured.mask_bits import cut_to, mask_of, may_draw, num_words
from nano_inference.structured.thought import Thought


class GrammarState:
    """The grammar of one sample, at the end of the sample's known tokens.

    The state waits for its matcher until `begin`. From then on `words` is the mask of the next
    token.

    Args:
        grammar: Grammar of the request.
        token_ids: Tokens that the sample already has, from the beginning of the grammar: its own,
            or those after text that was appended to it.
        allowed: Only ids that the request may draw; None: all.

    Attributes:
        words: Mask, int32 [W]. Bit i % 32 of word i // 32 is token i; tokens beyond are forbidden.
        is_ended: True if the text has ended with an end-of-sequence id.
        problem: Reason why the sample cannot continue, or None.
        is_ready: True if the state waits for nothing. Another thread may set it, and does not use
            the state afterwards.
        compiled: The compiler's future, from before the state waited until `begin`.
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
        self._ahead: list[np.ndarray] = []  # masks after the drafts of this step
        self._token_ids = list(token_ids)
        self._allowed = allowed if allowed is None else mask_of(allowed)
        self._matcher: Matcher | None = None
        self.vocabulary: Vocabulary | None = None
        self._ends: frozenset[int] = frozenset()
        # None: the text is one of the grammar. Until then the matcher waits at the beginning.
        self._thought: Thought | None = None
        # matcher of the text as one without a thought; None once that is ruled out
        self._at_once: Matcher | None = None

    @property
    def num_behind(self) -> int:
        """Number of tokens that the matcher must process first."""
        return len(self._token_ids)

    def begin(
        self,
        matcher: Matcher,
        vocabulary: Vocabulary,
        first: np.ndarray,
        thought: Thought | None = None,
    ) -> None:
        """Take ownership of a matcher at the beginning of a text.

        Args:
            matcher: Matcher of the grammar.
            vocabulary: Vocabulary that it was compiled for.
            first: Its first mask. Shared: do not write to it.
            thought: Thought that may precede the grammar, at its beginning; None: none may.
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
        self.is_ready = True  # last: from now on the engine's thread may use it

    def fail(self, problem: str) -> None:
        """Record that the state will not get a matcher."""
        self.problem, self.is_ready = problem, True

    def accept(self, token_id: int) -> None:
        """Advance by one token. Call `fill` before the next draw."""
        if self.is_ended or self.problem is not None:
            return
        if self._thought is not None:
            self._think(self._thought, token_id)
        else:
            self._go_on(token_id)

    def fill(self, others: Iterable["GrammarState"] = ()) -> None:
        """Make the mask of the next token, also for other samples. Masks of one backend are made in
        one call.
        """
        by_backend: dict[Backend, list[tuple[GrammarState, Matcher]]] = {}
        for state in (self, *others):
            matcher = state.changes
            if matcher is not None:
                by_backend.setdefault(matcher.backend, []).append((state, matcher))
        for backend, pairs in by_backend.items():
            # not written in place: a draw may still be reading the last masks
            vocabulary = pairs[0][0].vocabulary
            assert vocabulary is not None
            table = np.zeros((len(pairs), num_words(vocabulary.size)), dtype=np.int32)
            problems = backend.fill([matcher for _, matcher in pairs], table)
            for (state, _), words, problem in zip(pairs, table, problems, strict=True):
                state.take(words, problem)

    def look_ahead(self, drafts: Iterable[int]) -> int:
        """Make the masks after drafts. Return the number of drafts that the grammar allows, up to
        the last one that some token can follow.
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
        """Return the mask after the first `num_drafts` drafts of `look_ahead`. 0: `words`."""
        return self._ahead[num_drafts - 1] if num_drafts else self.words

    def forced(self) -> Sequence[int]:
        """Return the tokens that must follow, split as the tokenizer would, or nothing."""
        matcher = self.changes
        return matcher.forced() if matcher is not None and self._thought is None else ()

    def fork(self) -> "GrammarState":
        """Return a copy for another sample with the same past."""
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
        """Matcher that makes the next mask, or None if the mask does not change."""
        if self.is_ended or self.problem is not None:
            return None
        return self._matcher if self._thought is None else self._at_once

    def take(self, words: np.ndarray, problem: GrammarError | None) -> None:
        """Set the mask of the next token, int32 [W], and own it from now on."""
        if problem is not None:
            self.problem = str(problem)
        else:
            assert self.vocabulary is not None
            self.words = cut_to(words, self.vocabulary.drawable)
            if self._thought is not None:
                self.words = self._thought.or_none(self.words)
            self._cut()

    def _cut(self) -> None:
        """Remove tokens that the request does not allow."""
        if self._allowed is not None:
            size = min(len(self._allowed), len(self.words))
            cut = np.zeros_like(self.words)
            np.bitwise_and(self.words[:size], self._allowed[:size], out=cut[:size])
            self.words = cut
        if not self.words.any():
            also = "" if self._allowed is None else " and allowed_token_ids"
            self.problem = f"the grammar{also} left no token to draw"

    def _go_on(self, token_id: int) -> None:
        """Advance the text of the grammar."""
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
        """Advance the thought, which may begin, continue or end, or turn out to be absent."""
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
    """Return the matcher after one more token, or None if it does not allow that token."""
    try:
        if matcher is not None:
            matcher.accept(token_id)
    except GrammarError:
        return None
    return matcher


_NOTHING = np.zeros(0, dtype=np.int32)
