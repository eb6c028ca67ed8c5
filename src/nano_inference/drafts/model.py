"""Drafts by a model: a smaller one, or the policy itself with fewer layers or quantized weights.

The model draws with the noise of the sample's own positions and with the sample's own parameters.
If its distribution is close to the policy's, it mostly draws the policy's token, even at
temperature 1. This is coupling by common random numbers (Daliri, Musco, Suresh 2024, arXiv
2408.07978). Greedy drafts agree less often.

Its keys and values use the slots of the sample's own blocks, so prefixes, forks and preemption need
no work here. A separate model has its own KV tensors. The policy as its own draft model writes to
the policy's KV tensors, after the computed tokens. The next step overwrites these slots before it
reads them. Stale values can only make drafts wrong.
"""

import math
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from nano_inference.arrays import Device, on_device, without_gradients
from nano_inference.core.sequence import DRAFT, Sequence
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.drafts.source import NO_GUESS, Guess
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch
from nano_inference.structured.mask_bits import bans_under
from nano_inference.types import SamplingParams

MOST_BEHIND = 512  # limit of rows per call that only update the model's own cache
SURE = 8  # number of kinds, by the model's own probability of a draft
SLOWLY = 0.8  # weight of the old mean when a new time is measured


@dataclass(slots=True)
class _Computed:
    """Tokens and drafts of a sequence whose keys and values are in the model's own cache."""

    num_tokens: int
    drafts: list[int]
    block_ids: list[int]


def draw_request(
    params: SamplingParams,
    stop_ids: frozenset[int],
    num_prompt_tokens: int,
    token_ids: Listed[int],
    row: int,
    key: tuple[int, int, int],
    mask: np.ndarray | None,
) -> DrawRequest:
    """Return the draw of one token, exactly as a step of the engine would draw it.

    Args:
        params, stop_ids, num_prompt_tokens: Values of the request.
        token_ids: Tokens of the sequence, at least up to the one to draw.
        row: Row of the logits.
        key: Key of the noise: the sample's seed and index, and the token's position.
        mask: Mask, int32 [W], or None.
    """
    first, position = num_prompt_tokens, key[2]
    banned: Collection[int] = ()
    if position < first + params.min_tokens:
        banned = stop_ids if mask is None else bans_under(mask, stop_ids)
    counted = token_ids if params.penalizes else ()
    prompt, completion = counted[:first], counted[first:position]
    return DrawRequest(
        params, row, key, prompt=prompt, completion=completion, banned=banned, mask=mask
    )


class Drafting:
    """A sequence in the process of getting drafts.

    Args:
        seq: The sequence.
        start: First position to compute for the next draft.
        table: Blocks of the sequence, then scratch blocks.
        most: Maximum number of drafts.
    """

    def __init__(self, seq: Sequence, start: int, table: list[int], most: int) -> None:
        self.seq, self.start, self.table, self.most = seq, start, table, most
        self.token_ids = list(seq.token_ids)
        self.kinds: list[int] = []
        # a copy, because drafts may be rejected
        self.grammar = None if seq.grammar is None else seq.grammar.fork()
        self.rules = None if seq.rules is None else seq.rules.fork()
        self.words = self._mask()

    @property
    def drafts(self) -> list[int]:
        return self.token_ids[len(self.seq.token_ids) :]

    @property
    def is_open(self) -> bool:
        """True if the sequence can have another draft."""
        return len(self.kinds) < self.most and (
            self.grammar is None or not (self.grammar.is_ended or self.grammar.problem)
        )

    def rows(self) -> Rows:
        return Rows(self.token_ids[self.start :], self.start, self.table)

    def request(self, row: int) -> DrawRequest:
        """Return the draw of the next token, as a step would draw it."""
        request = self.seq.request
        return draw_request(
            *(request.params, request.stop_ids, request.num_prompt_tokens, self.token_ids, row),
            (request.seed, self.seq.sample_index, len(self.token_ids)),
            self.words,
        )

    def _mask(self) -> np.ndarray | None:
        """Return the mask of the next token."""
        words = None if self.grammar is None else self.grammar.mask_behind(0)
        if self.rules is not None:
            words = self.rules.mask(self.token_ids, (), words)
        if words is not None and not words.any():
            self.most = 0  # no token may follow
        return words

    def take(self, token_id: int, logprob: float) -> None:
        """Add a draft that the model drew."""
        self.start = len(self.token_ids)
        self.token_ids.append(token_id)
        self.kinds.append(_kind(logprob))
        if self.grammar is not None:
            self.grammar.accept(token_id)
            self.grammar.fill()
        self.words = self._mask()
        if token_id in self.seq.request.stop_ids:
            self.most = 0


class ModelDrafts:
    """A `TimedSource` that runs a draft model.

    Args:
        name: Name of the source.
        model: Whole model, on the engine's device.
        storage: KV storage of the model. Its slots correspond to the slots of the policy's blocks.
        scratch: Blocks of that storage that no sequence uses, for drafts after a sequence's last
            block.
        has_own_cache: True if the storage is the model's own, so that it computes prompts too.
            Otherwise the policy has computed all tokens except the newest.
        follow: Function that updates the model's weights, called before every guess. None if they
            never change.
    """

    def __init__(
        self,
        name: str,
        model: Decoder,
        storage: KVStorage,
        scratch: Listed[int],
        *,
        has_own_cache: bool,
        follow: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.model, self._follow = name, model, follow
        self._storage, self._scratch = storage, scratch
        self._computed: dict[int, _Computed] | None = {} if has_own_cache else None
        self._times = DraftTimes()

    def seconds(self, num_seqs: int) -> float:
        return self._times.of(num_seqs)

    @without_gradients
    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        if self._follow is not None:
            self._follow()
        with on_device(self.model.device):
            live = self._begin(seqs, most)
            drafting = list(live)
            while live := [each for each in live if each.is_open]:
                self._draw(live)
        self._remember(drafting)
        return guesses_of(seqs, drafting)

    def _begin(self, seqs: Listed[Sequence], most: int) -> list[Drafting]:
        """Return the sequences that can have drafts now."""
        size, scratch, behind = self._storage.block_size, list(self._scratch), MOST_BEHIND
        drafting: list[Drafting] = []
        for seq in seqs:
            known = len(seq.token_ids)
            start = self._num_computed(seq)
            if known - 1 - start > behind:
                # update the model's cache over several calls
                if behind > 0:
                    self._compute(seq, start, start + behind)
                behind = 0
                continue
            behind -= known - 1 - start
            wanted = min(most, len(self.model.ropes[False][0]) - known)  # limited by its positions
            lacking = -(-(known + wanted - 1) // size) - len(seq.block_ids)
            table = seq.block_ids + scratch[: max(lacking, 0)]
            del scratch[: max(lacking, 0)]
            room = len(table) * size - known + 1  # the last draft needs no slot
            if min(wanted, room) > 0:
                drafting.append(Drafting(seq, start, table, min(wanted, room)))
        return drafting

    def _draw(self, live: Listed[Drafting]) -> None:
        """Draw one more draft of each sequence."""
        began = time.perf_counter()
        rows = [each.rows() for each in live]
        ends = [sum(len(each.token_ids) for each in rows[: at + 1]) - 1 for at in range(len(rows))]
        batch = self._batch_of(rows, ends)
        hidden = self.model.forward(batch, self._storage).hidden
        draw = self.model.draw(hidden, draws_of(live, self.model.device))
        take_drawn(live, draw, self.model.spec.vocab_size)
        if ends[-1] + 1 <= 2 * len(live):
            self._times.note(len(live), time.perf_counter() - began)

    def _compute(self, seq: Sequence, start: int, end: int) -> None:
        rows = Rows(seq.token_ids[start:end], start, seq.block_ids)
        self.model.forward(self._batch_of([rows]), self._storage)
        assert self._computed is not None
        self._computed[seq.seq_id] = _Computed(end, [], list(seq.block_ids))

    def _batch_of(self, rows: Listed[Rows], draws: Listed[int] = ()) -> ForwardBatch:
        return batch_of_rows(
            *(rows, self._storage.block_size),
            draws=draws,
            weight_set=DRAFT,
            device=self.model.device,
        )

    def _num_computed(self, seq: Sequence) -> int:
        """Return the number of tokens before the newest that have keys and values."""
        known = len(seq.token_ids)
        if self._computed is None:
            return known - 1
        there = self._computed.get(seq.seq_id)
        if there is None:
            return 0
        pairs = zip(there.block_ids, seq.block_ids, strict=False)
        blocks = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # drafts that were drawn are computed too
        pairs = zip(there.drafts, seq.token_ids[there.num_tokens :], strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return min(there.num_tokens + right, blocks * self._storage.block_size, known - 1)

    def _remember(self, drafting: Listed[Drafting]) -> None:
        if self._computed is None:
            return
        if len(self._computed) > 4 * len(drafting) + 256:
            live = {each.seq.seq_id for each in drafting}
            self._computed = {key: each for key, each in self._computed.items() if key in live}
        for draft in filter(lambda each: each.drafts, drafting):
            # the last draft is not computed, and scratch blocks are not kept
            known, blocks = len(draft.seq.token_ids), list(draft.seq.block_ids)
            self._computed[draft.seq.seq_id] = _Computed(known, draft.drafts[:-1], blocks)


class DraftTimes:
    """Recent mean seconds of one draft for each of a number of sequences."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}  # by number of sequences, rounded up to a power of 2
        self._begun: set[int] = set()  # sizes that have run once; the first run has extra work

    def of(self, num_seqs: int) -> float:
        """Return the seconds for `num_seqs` sequences, or 0 if unknown."""
        bucket = _bucket(num_seqs)
        near = min(self._times, key=lambda each: abs(math.log2(each / bucket)), default=None)
        return 0.0 if near is None else self._times[near] * max(bucket / near, 1)

    def note(self, num_seqs: int, took: float) -> None:
        """Record the seconds of one draft for each of `num_seqs` sequences."""
        bucket = _bucket(num_seqs)
        if bucket not in self._begun:
            self._begun.add(bucket)
            return
        self._times[bucket] = SLOWLY * self._times.get(bucket, took) + (1 - SLOWLY) * took


def draws_of(live: Listed[Drafting], device: Device) -> SamplingBatch:
    """Return the draws of each sequence's next token, one row of the logits for each."""
    return sampling_batch([each.request(row) for row, each in enumerate(live)], device)


def take_drawn(live: Listed[Drafting], draw: Draw, vocab_size: int) -> None:
    """Add the drawn drafts. A sequence whose draw failed gets no more drafts."""
    drawn = zip(live, draw.token_ids.tolist(), draw.logprobs.tolist(), strict=True)
    for drafting, token_id, logprob in drawn:
        if 0 <= token_id < vocab_size and not math.isnan(logprob):
            drafting.take(token_id, logprob)
        else:
            drafting.most = 0


def guesses_of(seqs: Listed[Sequence], drafting: Listed[Drafting]) -> list[Guess]:
    """Return a guess for each sequence, empty if nothing was drawn for it."""
    guesses = {each.seq.seq_id: Guess(each.drafts, each.kinds) for each in drafting}
    return [guesses.get(seq.seq_id, NO_GUESS) for seq in seqs]


def spread_layers(num_layers: int, wanted: int) -> tuple[int, ...]:
    """Return `wanted` layers, spread evenly. Include the first and, if above 1, the last."""
    if wanted == 1:
        return (0,)
    return tuple(round(i * (num_layers - 1) / (wanted - 1)) for i in range(wanted))


def _kind(logprob: float) -> int:
    """Return the kind of a draft by the model's own probability."""
    return min(int(math.exp(min(logprob, 0.0)) * SURE), SURE - 1)


def _bucket(num_seqs: int) -> int:
    return 1 << max(num_seqs - 1, 0).bit_length()
