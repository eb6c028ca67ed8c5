"""Drafts from earlier samples of the same prompt: last epoch's rollouts, an evaluation's last run.

A sample drawn with the same seed was drawn by the same noise at every position, so where the
weights have changed little it is mostly the same sample (coupling by common random numbers, as in
Daliri, Musco, Suresh 2024, arXiv 2408.07978).
"""

from collections import OrderedDict
from collections.abc import Sequence as Listed
from typing import Any, NamedTuple

from nano_inference.core.sequence import POLICY, Sequence, SequenceStatus
from nano_inference.drafts.source import NO_GUESS, Guess
from nano_inference.drafts.suffix import ALIGNED, SuffixIndex

MOST_AGREEMENT = 8  # tokens in a row that were the earlier sample's, as far as kinds tell


class Past(NamedTuple):
    """An earlier sample."""

    token_ids: tuple[int, ...]  # prompt and completion
    version: int  # that drew its last token


class _Pasts:
    """The samples of one prompt that have ended, by (seed, sample index), oldest first."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.samples: OrderedDict[tuple[int, int], Past] = OrderedDict()
        self.index = SuffixIndex()
        self._num_prompt_tokens = num_prompt_tokens
        self._num_gone = 0  # samples that the index still has

    @property
    def num_tokens(self) -> int:
        """Tokens of all."""
        return sum(len(past.token_ids) for past in self.samples.values())

    def keep(self, key: tuple[int, int], past: Past, most: int) -> None:
        """One more, in the place of the one that was drawn by the same noise; the newest stay."""
        self._num_gone += self.samples.pop(key, None) is not None
        self.samples[key] = past
        while len(self.samples) > most:
            self.samples.popitem(last=False)
            self._num_gone += 1
        if self._num_gone > len(self.samples):
            self._num_gone, self.index = 0, SuffixIndex()
            for each in self.samples.values():
                self.index.add(each.token_ids, self._num_prompt_tokens)
        else:
            self.index.add(past.token_ids, self._num_prompt_tokens)


class HistoryDrafts:
    """See `DraftSource`. It keeps samples that have ended, by their prompts, for later requests. A
    `cache_salt` keeps samples apart as it does prefixes, and so does an adapter.

    Args:
        most_tokens: of all samples that are kept, with about 600 bytes each; the prompt that was
            used longest ago goes first.
        most_samples: of one prompt: the newest.
    """

    name = "history"

    def __init__(self, most_tokens: int = 500_000, most_samples: int = 64) -> None:
        self._most_tokens, self._most_samples = most_tokens, most_samples
        self._prompts: OrderedDict[tuple[Any, ...], _Pasts] = OrderedDict()
        self._places: dict[int, _Place] = {}  # by sequence
        self.num_tokens = 0

    def keep(self, seq: Sequence, version: int) -> None:
        """A sample has ended: it may be guessed from now on."""
        self._places.pop(seq.seq_id, None)
        num_prompt = seq.request.num_prompt_tokens
        if seq.weight_set != POLICY or len(seq.token_ids) == num_prompt:
            return
        key = _key(seq)
        pasts = self._prompts.setdefault(key, _Pasts(num_prompt))
        self._prompts.move_to_end(key)
        self.num_tokens -= pasts.num_tokens
        past = Past(tuple(seq.token_ids), version)
        pasts.keep((seq.request.seed, seq.sample_index), past, self._most_samples)
        self.num_tokens += pasts.num_tokens
        while self.num_tokens > self._most_tokens:
            _, oldest = self._prompts.popitem(last=False)
            self.num_tokens -= oldest.num_tokens

    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        """See `DraftSource`."""
        if len(self._places) > 2 * len(seqs) + 64:
            live = self._places.items()
            self._places = {key: place for key, place in live if not place.is_over}
        return [self._guess(seq, most) for seq in seqs]

    def _guess(self, seq: Sequence, most: int) -> Guess:
        place = self._places.get(seq.seq_id)
        if place is None:
            place = self._places[seq.seq_id] = _Place(seq, self._prompts.get(_key(seq)))
        return place.guess(most)


def _key(seq: Sequence) -> tuple[Any, ...]:
    """What samples have in common that may be guessed from each other."""
    params = seq.request.params
    prompt = seq.token_ids[: seq.request.num_prompt_tokens]
    return params.cache_salt, params.adapter, *prompt


class _Place:
    """A sequence, and what is known of earlier samples of its prompt.

    Args:
        seq: the sequence.
        pasts: these samples; None: there are none.
    """

    def __init__(self, seq: Sequence, pasts: _Pasts | None) -> None:
        self._seq, self._pasts = seq, pasts
        # drawn by the same noise
        twin = pasts.samples.get((seq.request.seed, seq.sample_index)) if pasts else None
        self._twin = () if twin is None else twin.token_ids
        self._compared = seq.request.num_prompt_tokens  # tokens compared with the twin's
        self._agreement = 0  # how many of the last of these were equal

    @property
    def is_over(self) -> bool:
        """Whether the sequence has ended."""
        return self._seq.status is SequenceStatus.FINISHED

    def guess(self, most: int) -> Guess:
        """What may follow."""
        known, twin = self._seq.token_ids, self._twin
        for place in range(self._compared, min(len(known), len(twin))):
            self._agreement = self._agreement + 1 if known[place] == twin[place] else 0
        self._compared = len(known)
        ahead = twin[len(known) : len(known) + most]
        if ahead and (self._agreement or len(known) == self._seq.request.num_prompt_tokens):
            first = 4 * ALIGNED + self._agreement
            last = 4 * ALIGNED + MOST_AGREEMENT
            return Guess(ahead, [min(first + i, last) for i in range(len(ahead))])
        return NO_GUESS if self._pasts is None else self._pasts.index.guess(known, most)
