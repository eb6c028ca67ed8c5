"""Drafts from earlier samples of the same prompt: an epoch's rollouts, an earlier evaluation.

A sample with the same seed was drawn with the same noise at every position. If the weights have
changed little, it is mostly the same sample (coupling by common random numbers, as in Daliri,
Musco, Suresh 2024, arXiv 2408.07978).
"""

from collections import OrderedDict
from collections.abc import Sequence as Listed
from typing import Any, NamedTuple

from nano_inference.core.sequence import POLICY, Sequence, SequenceStatus
from nano_inference.drafts.source import NO_GUESS, Guess
from nano_inference.drafts.suffix import ALIGNED, SuffixIndex

MOST_AGREEMENT = 8  # longest run of equal tokens that kinds distinguish


class Past(NamedTuple):
    """An earlier sample of a prompt."""

    token_ids: tuple[int, ...]  # prompt and completion
    version: int  # weight version that drew its last token


class _Pasts:
    """Finished samples of one prompt, by (seed, sample index), oldest first."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.samples: OrderedDict[tuple[int, int], Past] = OrderedDict()
        self.index = SuffixIndex()
        self._num_prompt_tokens = num_prompt_tokens
        self._num_gone = 0  # removed samples that the index still has

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(len(past.token_ids) for past in self.samples.values())

    def keep(self, key: tuple[int, int], past: Past, most: int) -> None:
        """Add a sample, replacing any sample with the same key. Keep the `most` newest samples.

        The index is rebuilt once more than half of its samples are gone.
        """
        self._num_gone += self.samples.pop(key, None) is not None
        self.samples[key] = past
        while len(self.samples) > most:
            self.samples.popitem(last=False)
            self._num_gone += 1
        if self._num_gone > len(self.samples):
            self._num_gone, self.index = 0, SuffixIndex()
            for sample in self.samples.values():
                self.index.add(sample.token_ids, self._num_prompt_tokens)
        else:
            self.index.add(past.token_ids, self._num_prompt_tokens)


class HistoryDrafts:
    """A `DraftSource` that keeps finished samples, by prompt, for later requests.

    Like prefixes, samples with different `cache_salt` or adapter are kept apart.

    Args:
        most_tokens: Maximum number of tokens of all kept samples, at about 600 bytes each. The
            least recently used prompt is dropped first.
        most_samples: Maximum number of samples of one prompt. The newest are kept.
    """

    name = "history"

    def __init__(self, most_tokens: int = 500_000, most_samples: int = 64) -> None:
        self._most_tokens, self._most_samples = most_tokens, most_samples
        self._prompts: OrderedDict[tuple[Any, ...], _Pasts] = OrderedDict()
        self._places: dict[int, _Place] = {}  # by sequence id
        self.num_tokens = 0

    def keep(self, seq: Sequence, version: int) -> None:
        """Keep a finished sample as a source of guesses."""
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
        if len(self._places) > 2 * len(seqs) + 64:
            live = self._places.items()
            self._places = {key: state for key, state in live if not state.is_over}
        return [self._guess(seq, most) for seq in seqs]

    def _guess(self, seq: Sequence, most: int) -> Guess:
        state = self._places.get(seq.seq_id)
        if state is None:
            state = self._places[seq.seq_id] = _Place(seq, self._prompts.get(_key(seq)))
        return state.guess(most)


def _key(seq: Sequence) -> tuple[Any, ...]:
    """Return the values that two samples must share to be guessed from each other."""
    params = seq.request.params
    prompt = seq.token_ids[: seq.request.num_prompt_tokens]
    return params.cache_salt, params.adapter, *prompt


class _Place:
    """A sequence, compared with earlier samples of its prompt.

    Args:
        seq: The sequence.
        pasts: Earlier samples of its prompt, or None.
    """

    def __init__(self, seq: Sequence, pasts: _Pasts | None) -> None:
        self._seq, self._pasts = seq, pasts
        # the earlier sample with the same noise
        twin = pasts.samples.get((seq.request.seed, seq.sample_index)) if pasts else None
        self._twin = () if twin is None else twin.token_ids
        self._compared = seq.request.num_prompt_tokens  # number of tokens compared with the twin
        self._agreement = 0  # length of the current run of equal tokens

    @property
    def is_over(self) -> bool:
        """True if the sequence has ended."""
        return self._seq.status is SequenceStatus.FINISHED

    def guess(self, most: int) -> Guess:
        """Return a guess from the twin while it agrees, otherwise from the prompt's index."""
        known, twin = self._seq.token_ids, self._twin
        for index in range(self._compared, min(len(known), len(twin))):
            self._agreement = self._agreement + 1 if known[index] == twin[index] else 0
        self._compared = len(known)
        ahead = twin[len(known) : len(known) + most]
        if ahead and (self._agreement or len(known) == self._seq.request.num_prompt_tokens):
            first = 4 * ALIGNED + self._agreement
            last = 4 * ALIGNED + MOST_AGREEMENT
            return Guess(ahead, [min(first + i, last) for i in range(len(ahead))])
        return NO_GUESS if self._pasts is None else self._pasts.index.guess(known, most)
