"""Drafts from earlier samples of the same prompt: last epoch's rollouts, an evaluation's last run.

A sample drawn with the same seed was drawn by the same noise at every position, so where the
weights have changed little it is mostly the same sample (coupling by common random numbers, as in
Daliri, Musco, Suresh 2024, arXiv 2408.07978).
"""

from collections import OrderedDict
from collections.abc import Sequence as Listed
from typing import NamedTuple

from nano_inference.scheduling.sequence import POLICY, Sequence, SequenceStatus
from nano_inference.speculation.source import NO_GUESS, Guess
from nano_inference.speculation.suffix import ALIGNED, SuffixIndex, most_frequent

MOST_AGREEMENT = 8  # tokens in a row that were the earlier sample's, as far as kinds tell


class Past(NamedTuple):
    """An earlier sample."""

    token_ids: tuple[int, ...]  # prompt and completion
    version: int  # that drew its last token


class HistoryDrafts:
    """See `DraftSource`. It keeps samples that have ended, by their prompts, for later requests.

    Args:
        most_tokens: of all samples that are kept; the prompt that was used longest ago goes first.
        most_samples: of one prompt: the newest.
    """

    name = "history"

    def __init__(self, most_tokens: int = 2_000_000, most_samples: int = 64) -> None:
        self._most_tokens, self._most_samples = most_tokens, most_samples
        # by prompt: samples by (seed, sample index), oldest first
        self._prompts: OrderedDict[tuple[int, ...], OrderedDict[tuple[int, int], Past]]
        self._prompts = OrderedDict()
        self._places: dict[int, _Place] = {}  # by sequence
        self.num_tokens = 0

    def keep(self, seq: Sequence, version: int) -> None:
        """A sample has ended: it may be guessed from now on."""
        self._places.pop(seq.seq_id, None)
        num_prompt = seq.request.num_prompt_tokens
        if seq.weight_set != POLICY or len(seq.token_ids) == num_prompt:
            return
        prompt = tuple(seq.token_ids[:num_prompt])
        kept = self._prompts.setdefault(prompt, OrderedDict())
        self._prompts.move_to_end(prompt)
        key = (seq.request.seed, seq.sample_index)
        old = kept.pop(key, None)
        kept[key] = Past(tuple(seq.token_ids), version)
        self.num_tokens += len(seq.token_ids) - (len(old.token_ids) if old else 0)
        while len(kept) > self._most_samples:
            _, old = kept.popitem(last=False)
            self.num_tokens -= len(old.token_ids)
        while self.num_tokens > self._most_tokens:
            _, oldest = self._prompts.popitem(last=False)
            self.num_tokens -= sum(len(past.token_ids) for past in oldest.values())

    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        """See `DraftSource`."""
        if len(self._places) > 2 * len(seqs) + 64:
            live = self._places.items()
            self._places = {key: place for key, place in live if not place.is_over}
        return [self._guess(seq, most) for seq in seqs]

    def _guess(self, seq: Sequence, most: int) -> Guess:
        place = self._places.get(seq.seq_id)
        if place is None:
            prompt = tuple(seq.token_ids[: seq.request.num_prompt_tokens])
            place = self._places[seq.seq_id] = _Place.of(seq, self._prompts.get(prompt))
        return place.guess(most)


class _Place:
    """A sequence, and what is known of earlier samples of its prompt.

    Args:
        seq: the sequence.
        twin: the one that was drawn by the same noise.
        index: of all of them.
    """

    def __init__(self, seq: Sequence, twin: Past | None, index: SuffixIndex | None) -> None:
        self._seq, self._twin, self._index = seq, twin, index
        self._compared = seq.request.num_prompt_tokens  # tokens compared with the twin's
        self._agreement = 0  # how many of the last of these were equal

    @classmethod
    def of(cls, seq: Sequence, kept: "OrderedDict[tuple[int, int], Past] | None") -> "_Place":
        """That of a sequence, when it is first asked for."""
        if not kept:
            return cls(seq, None, None)
        index = SuffixIndex()
        for past in kept.values():
            index.add(past.token_ids, seq.request.num_prompt_tokens)
        return cls(seq, kept.get((seq.request.seed, seq.sample_index)), index)

    @property
    def is_over(self) -> bool:
        """Whether the sequence has ended."""
        return self._seq.status is SequenceStatus.FINISHED

    def guess(self, most: int) -> Guess:
        """What may follow."""
        known = self._seq.token_ids
        if self._twin is not None:
            twin = self._twin.token_ids
            for place in range(self._compared, min(len(known), len(twin))):
                self._agreement = self._agreement + 1 if known[place] == twin[place] else 0
            self._compared = len(known)
            ahead = twin[len(known) : len(known) + most]
            if ahead and (self._agreement or len(known) == self._seq.request.num_prompt_tokens):
                first = 4 * ALIGNED + self._agreement
                last = 4 * ALIGNED + MOST_AGREEMENT
                return Guess(ahead, [min(first + i, last) for i in range(len(ahead))])
        if self._index is None or len(known) < 2:
            return NO_GUESS
        length, places = self._index.find(known)
        return most_frequent(places, length, most) if places else NO_GUESS
