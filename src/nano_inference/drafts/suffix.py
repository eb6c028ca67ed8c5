"""Drafts from texts seen before: a sample's own, its siblings', an earlier epoch's.

The index finds the longest suffix of a sample in its texts, and guesses the tokens that followed.
Prompt lookup (Saxena 2023) and SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) do the same.
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence as Listed
from itertools import islice

from nano_inference.core.sequence import Sequence, SequenceStatus
from nano_inference.drafts.source import NO_GUESS, Guess

MOST_PLACES = 8  # remembered occurrences of a pair of tokens: the newest
LONGEST_MATCH = 8  # maximum length of a compared suffix
MOST_READ = 4096  # maximum number of tokens to index per step (a few milliseconds)
ALIGNED = 16  # first kind of guesses from a text with the same noise

Place = tuple[Listed[int], int]  # a text, and the index after an occurrence


class SuffixIndex:
    """Occurrences of each token and each pair of tokens in some texts."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], list[Place]] = {}
        self._tokens: dict[int, Place] = {}
        self._read: dict[int, int] = {}  # id of a text -> number of its tokens that are indexed

    @property
    def num_entries(self) -> int:
        """Number of entries, which determines the memory."""
        return len(self._pairs) + len(self._tokens)

    def add(self, text: Listed[int], start: int = 0, most: int = sys.maxsize) -> int:
        """Index at most `most` new tokens of a text, and return how many.

        The last token is skipped until another follows it. Tokens before `start` are known from
        another text. Lookups read the text again, so it must only grow.
        """
        begin = self._read.get(id(text), start)
        end = min(len(text) - 1, begin + most)
        if begin >= end:
            return 0
        self._read[id(text)] = end
        before = text[begin - 1] if begin else -1
        for stop, token_id in enumerate(islice(text, begin, end), begin + 1):
            at = (text, stop)
            self._tokens[token_id] = at
            places = self._pairs.setdefault((before, token_id), [])
            places.append(at)
            if len(places) > MOST_PLACES:
                del places[0]
            before = token_id
        return end - begin

    def find(self, text: Listed[int]) -> tuple[int, list[Place]]:
        """Find the longest suffix of a text that occurs elsewhere.

        Return its length and the indices after its occurrences, newest first.
        """
        end = len(text)
        last = text[-1]
        places = self._pairs.get((text[-2], last), ()) if end > 1 else ()
        matches: list[Place] = []
        longest = 0
        for candidate in reversed(places):
            other, at = candidate
            length, most = 2, min(LONGEST_MATCH, at, end)
            while length < most and other[at - 1 - length] == text[end - 1 - length]:
                length += 1
            if length > longest:
                longest, matches = length, [candidate]
            elif length == longest:
                matches.append(candidate)
        if not matches and last in self._tokens:
            return 1, [self._tokens[last]]
        return longest, matches

    def guess(self, text: Listed[int], most: int) -> Guess:
        """Return at most `most` tokens that may follow a text."""
        length, places = self.find(text)
        return _most_frequent(places, length, most) if places else NO_GUESS


def _most_frequent(places: Listed[Place], length: int, most: int) -> Guess:
    """Return the most frequent continuation of these places, token by token.

    The kind of a draft combines the length of its match and the agreement of the places.
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
    """A `DraftSource` of repeated n-grams in a sample's own text, and in its siblings'.

    Args:
        siblings: True to search the group's other samples too.
        most_entries: Maximum number of entries of all indexes, at about 300 bytes each. The least
            recently used index is dropped first.
    """

    def __init__(self, siblings: bool = True, most_entries: int = 500_000) -> None:
        self.name = "suffix" if siblings else "ngram"
        self._siblings, self._most_entries = siblings, most_entries
        self._groups: OrderedDict[int, _Group] = OrderedDict()

    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        groups = [self._group(seq) for seq in seqs]
        left = MOST_READ  # later steps index the rest
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
        """Forget groups whose samples have ended, and the oldest ones beyond the limit."""
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
        """True if all samples of the group have ended."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self._seqs.values())

    def follow(self, seq: Sequence, most: int) -> int:
        """Index at most `most` new tokens of a sample, and return how many.

        The prompt is indexed once per group.
        """
        self._seqs.setdefault(seq.seq_id, seq)
        is_first = next(iter(self._seqs)) == seq.seq_id
        start = 0 if is_first else seq.request.num_prompt_tokens
        return self.index.add(seq.token_ids, start, most)
