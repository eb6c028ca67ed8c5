"""Masks that a sample's token ids determine: a budget of thought, and bad words.

A rule stores nothing that its sample's ids do not determine. It remembers how far it has read them,
so that a step reads only new ones.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from nano_inference.structured.mask_bits import mask_of, may_draw, without

Text = TypeVar("Text", bytes, tuple[int, ...])
NO_IDS: tuple[int, ...] = ()
MOST_UNREAD = 64  # tokens that are read together, if none can exceed the budget


class Turn(NamedTuple):
    """Thoughts of a turn up to some token.

    Attributes:
        thinks: True within a thought.
        spent: Number of tokens of thought in this turn.
        opened: Length of the opening marker's part that the text ends with, in bytes or ids.
        closed: Length of the closing marker's part that the text ends with, in bytes.
        forced: Number of the closing marker's ids that the sample ends with.
    """

    thinks: bool = False
    spent: int = 0
    opened: int = 0
    closed: int = 0
    forced: int = 0


BEGUN = Turn()


@dataclass(frozen=True)
class ThoughtBudget:
    """A limit of the tokens of thought in a turn. A turn begins after an end-of-sequence id.

    Attributes:
        most: Maximum number of tokens between the markers, over all thoughts of the turn.
        opens: Opening marker: its ids if it has a token of its own, otherwise its bytes.
        closes: Bytes of the closing marker. Any tokens may write them.
        closing_ids: Ids of the closing marker, forced one by one after the last token of thought.
        eos_token_ids: Ids that end a turn.
        bytes_of: Function that returns the bytes of a token.
    """

    most: int
    opens: tuple[int, ...] | bytes
    closes: bytes
    closing_ids: tuple[int, ...]
    eos_token_ids: AbstractSet[int]
    bytes_of: Callable[[int], bytes] = field(compare=False)

    def first_of_turn(self, token_ids: Sequence[int]) -> int:
        """Return the index of the last turn's first token."""
        ends = (i for i in range(len(token_ids) - 1, -1, -1) if token_ids[i] in self.eos_token_ids)
        return next(ends, -1) + 1

    def after(self, turn: Turn, token_id: int) -> Turn:
        """Return the thoughts of a turn after one more token."""
        if token_id in self.eos_token_ids:
            return BEGUN
        if not turn.thinks:
            return self._looking(turn, token_id)
        said = self.bytes_of(token_id)
        is_far = not (turn.closed or turn.forced) and self.closes[0] not in said
        if is_far and token_id != self.closing_ids[0]:  # almost every token
            return Turn(True, turn.spent + 1)
        text = self.closes[: turn.closed] + said
        if self.closes in text:
            return Turn(spent=turn.spent)
        ids = (*self.closing_ids[: turn.forced], token_id)
        closed, forced = _overlap(text, self.closes), _overlap(ids, self.closing_ids)
        return Turn(True, turn.spent + 1, 0, closed, forced)

    def _looking(self, turn: Turn, token_id: int) -> Turn:
        """Return the turn after a token outside of a thought."""
        opens = self.opens
        if isinstance(opens, tuple):
            if not turn.opened and token_id != opens[0]:
                return turn
            opened = _overlap((*opens[: turn.opened], token_id), opens, whole=True)
            return Turn(opened == len(opens), turn.spent, opened)
        before, marker, rest = (opens[: turn.opened] + self.bytes_of(token_id)).partition(opens)
        if not marker:
            return Turn(False, turn.spent, _overlap(before, opens))
        if self.closes in rest:
            return Turn(spent=turn.spent)
        return Turn(True, turn.spent, 0, _overlap(rest, self.closes))

    def forced(self, turn: Turn) -> tuple[int, ...]:
        """Return the ids that must follow."""
        over = turn.thinks and turn.spent >= self.most
        return self.closing_ids[turn.forced :] if over else NO_IDS


def _overlap(text: Text, marker: Text, *, whole: bool = False) -> int:
    """Return the length of the longest prefix of the marker that the text ends with. Unless
    `whole`, the marker itself does not count.
    """
    most = min(len(marker) - (not whole), len(text))
    return next(size for size in range(most, -1, -1) if text[len(text) - size :] == marker[:size])


class BadWords:
    """Words, as token ids, that a completion must not contain. The last id of a word is banned
    where the ids before it are its other ids.

    Args:
        words: Ids of the words, none of them empty.
    """

    def __init__(self, words: Collection[tuple[int, ...]]) -> None:
        self.always = frozenset(word[0] for word in words if len(word) == 1)
        self.longest = max(map(len, words), default=0)
        self._by_last: dict[int, list[tuple[int, ...]]] = {}  # by the id before the banned one
        for word in dict.fromkeys(words):
            if len(word) > 1:
                self._by_last.setdefault(word[-2], []).append(word)

    def banned(self, completion: Sequence[int]) -> frozenset[int]:
        """Return the ids that must not follow the end of a completion."""
        if not completion or completion[-1] not in self._by_last:
            return self.always
        more = [
            word[-1]
            for word in self._by_last[completion[-1]]
            if tuple(completion[-len(word) + 1 :]) == word[:-1]
        ]
        return self.always.union(more) if more else self.always


@dataclass(frozen=True)
class Rules:
    """Rules of a request.

    Attributes:
        free: Mask of the ids that the request may draw without rules, int32 [W].
        thought: Budget of thought, or None.
        bad_words: Words that the completion must not contain, or None.
        others: Mask of `free` without the ids that are always banned, int32 [W].
        closing: Masks that allow one id of the closing marker, by id.
    """

    free: np.ndarray
    thought: ThoughtBudget | None = None
    bad_words: BadWords | None = None
    others: np.ndarray = field(init=False)
    closing: Mapping[int, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        always = self.bad_words.always if self.bad_words is not None else ()
        closing = self.thought.closing_ids if self.thought is not None else ()
        object.__setattr__(self, "others", without(self.free, always))
        object.__setattr__(self, "closing", {each: mask_of((each,)) for each in closing})


class TokenRules:
    """Rules of one sample, at the end of its known tokens.

    Args:
        rules: Rules of the request.
        num_prompt_tokens: Number of tokens before the completion.
    """

    def __init__(self, rules: Rules, num_prompt_tokens: int) -> None:
        self.rules, self._num_prompt_tokens = rules, num_prompt_tokens
        self._turn, self._read = BEGUN, -1  # after the first `_read` tokens; -1: none were read

    def fork(self) -> "TokenRules":
        """Return a copy for another sample with the same past."""
        other = TokenRules(self.rules, self._num_prompt_tokens)
        other._turn, other._read = self._turn, self._read
        return other

    def mask(
        self,
        token_ids: Sequence[int],
        drafts: Sequence[int] = (),
        words: np.ndarray | None = None,
        end: int | None = None,
    ) -> np.ndarray | None:
        """Return the mask of the token after `token_ids[:end]` and the drafts, int32 [W]. Shared:
        do not write to it. It is empty if no token is left. None: the rules forbid nothing there.

        Args:
            token_ids: Known tokens. Tokens that an earlier call has read must be the same, unless
                `end` is smaller than in that call.
            drafts: Guesses of the tokens that follow.
            words: Mask of the grammar. The closing marker waits until it is allowed there. None:
                all ids that the request allows.
            end: Number of tokens to read. None: all.
        """
        end = len(token_ids) if end is None else end
        forced = self._forced(token_ids, drafts, end)
        if forced and (words is None or may_draw(words, forced[0])):
            return self.rules.closing[forced[0]]
        bad = self.rules.bad_words
        if bad is None:
            return words
        start = max(self._num_prompt_tokens, end - bad.longest)
        banned = bad.banned([*token_ids[start:end], *drafts])
        if words is None:
            if banned is bad.always:
                return self.rules.others
            words = self.rules.free
        return without(words, banned) if banned else words

    def forced(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids that must follow the known tokens."""
        return self._forced(token_ids, (), len(token_ids))

    def num_allowed(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """Return how many drafts the rules allow."""
        for index, token_id in enumerate(drafts):
            words = self.mask(token_ids, drafts[:index])
            if words is not None and not may_draw(words, token_id):
                return index
        return len(drafts)

    def _forced(self, token_ids: Sequence[int], drafts: Sequence[int], end: int) -> tuple[int, ...]:
        budget = self.rules.thought
        if budget is None:
            return NO_IDS
        if not 0 <= self._read <= end:
            self._turn, self._read = BEGUN, budget.first_of_turn(token_ids[:end])
        turn, unread = self._turn, end - self._read
        if unread < MOST_UNREAD and turn.spent + unread + len(drafts) < budget.most:
            return NO_IDS  # whatever these tokens are
        for token_id in token_ids[self._read : end]:
            turn = budget.after(turn, token_id)
        self._turn, self._read = turn, end
        for token_id in drafts:
            turn = budget.after(turn, token_id)
        return budget.forced(turn)
