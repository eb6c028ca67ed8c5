"""Drafts from texts that have been there before: a sample's own, its siblings', last epoch's.

The longest suffix of a sample is looked for in the texts that its index holds, and what followed
there is guessed, as in prompt lookup (Saxena 2023) and SuffixDecoding (Oliaro et al. 2024,
arXiv 2411.04975).
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence as Listed
from itertools import islice

from nano_inference.core.sequence import Sequence, SequenceStatus
from nano_inference.drafts.source import NO_GUESS, Guess

MOST_PLACES = 8  # of a pair of tokens that are remembered: the newest
LONGEST_MATCH = 8  # tokens of a suffix that are compared
MOST_READ = 4096  # tokens that are indexed in a step: a few milliseconds
ALIGNED = 16  # kinds of guesses from a text that was drawn by the same noise begin here

Place = tuple[Listed[int], int]  # a text, and where in it something ends


class SuffixIndex:
    """Where each token, and each pair of tokens, stands in some texts."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], list[Place]] = {}
        self._tokens: dict[int, Place] = {}
        self._read: dict[int, int] = {}  # text's id -> tokens of it that are indexed

    @property
    def num_entries(self) -> int:
        """What its memory goes by."""
        return len(self._pairs) + len(self._tokens)

    def add(self, text: Listed[int], start: int = 0, most: int = sys.maxsize) -> int:
        """Take in what a text has grown by, but for its last token, which nothing follows yet, and
        `most` tokens of it now; returns how many. It is read again at every look-up, so it must
        only grow; tokens before `start` are known from another text.
        """
        begin = self._read.get(id(text), start)
        end = min(len(text) - 1, begin + most)
        if begin >= end:
            return 0
        self._read[id(text)] = end
        before = text[begin - 1] if begin else -1
        for place, token_id in enumerate(islice(text, begin, end), begin + 1):
            at = (text, place)
            self._tokens[token_id] = at
            places = self._pairs.setdefault((before, token_id), [])
            places.append(at)
            if len(places) > MOST_PLACES:
                del places[0]
            before = token_id
        return end - begin

    def find(self, text: Listed[int]) -> tuple[int, list[Place]]:
        """The places behind the longest suffix of a text that stands elsewhere too, newest first,
        and how many tokens it has.
        """
        end = len(text)
        last = text[-1]
        places = self._pairs.get((text[-2], last), ()) if end > 1 else ()
        found: list[Place] = []
        longest = 0
        for place in reversed(places):
            other, at = place
            length, most = 2, min(LONGEST_MATCH, at, end)
            while length < most and other[at - 1 - length] == text[end - 1 - length]:
                length += 1
            if length > longest:
                longest, found = length, [place]
            elif length == longest:
                found.append(place)
        if not found and last in self._tokens:
            return 1, [self._tokens[last]]
        return longest, found

    def guess(self, text: Listed[int], most: int) -> Guess:
        """At most so many tokens that may follow a text."""
        length, places = self.find(text)
        return _most_frequent(places, length, most) if places else NO_GUESS


def _most_frequent(places: Listed[Place], length: int, most: int) -> Guess:
    """What followed most places, token by token. The kind of a draft is how long its match is, and
    how far the places agree.
    """
    token_ids: list[int] = []
    kinds: list[int] = []
    left = list(places)
    while left and len(token_ids) < most:
        votes = Counter(text[at] for text, at in left)
        token_id, count = votes.most_common(1)[0]
        agreement = 0 if len(left) == 1 else 1 + (2 * count > len(left)) + (count == len(left))
        token_ids.append(token_id)
        kinds.append(4 * min(length + len(token_ids) - 1, LONGEST_MATCH) + agreement)
        left = [(text, at + 1) for text, at in left if text[at] == token_id and at + 1 < len(text)]
    return Guess(token_ids, kinds)


class SuffixDrafts:
    """See `DraftSource`: n-grams of a sample's own text, and of its siblings'.

    Args:
        siblings: look into the group's other samples too.
        most_entries: of all indexes together, about 300 bytes each; the one that was used longest
            ago goes first.
    """

    def __init__(self, siblings: bool = True, most_entries: int = 500_000) -> None:
        self.name = "suffix" if siblings else "ngram"
        self._siblings, self._most_entries = siblings, most_entries
        self._groups: OrderedDict[int, _Group] = OrderedDict()

    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        """See `DraftSource`."""
        groups = [self._group(seq) for seq in seqs]
        left = MOST_READ  # the rest in the next steps
        for seq, group in zip(seqs, groups, strict=True):
            left -= group.follow(seq, left)
        self._forget_some()
        return [
            group.index.guess(seq.token_ids, most) for seq, group in zip(seqs, groups, strict=True)
        ]

    def _group(self, seq: Sequence) -> "_Group":
        key = seq.request_id if self._siblings else -1 - seq.seq_id
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        self._groups.move_to_end(key)
        return group

    def _forget_some(self) -> None:
        """Forget groups whose samples have ended, and the oldest beyond the bound."""
        for key in [key for key, group in islice(self._groups.items(), 4) if group.is_over]:
            del self._groups[key]
        total = sum(group.index.num_entries for group in self._groups.values())
        while total > self._most_entries and self._groups:
            _, oldest = self._groups.popitem(last=False)
            total -= oldest.index.num_entries


class _Group:
    """The texts of samples that share a prompt."""

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self._seqs: dict[int, Sequence] = {}

    @property
    def is_over(self) -> bool:
        """Whether all its samples have ended."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self._seqs.values())

    def follow(self, seq: Sequence, most: int) -> int:
        """Take in what a sample has grown by, at most so many tokens; returns how many. The prompt
        counts once.
        """
        self._seqs.setdefault(seq.seq_id, seq)
        is_first = next(iter(self._seqs)) == seq.seq_id
        start = 0 if is_first else seq.request.num_prompt_tokens
        return self.index.add(seq.token_ids, start, most)
