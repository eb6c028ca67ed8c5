"""Drafts by a model: a smaller one, or the policy itself with fewer layers.

It draws with the noise of the sample's own positions, under the sample's own parameters. So where
its distribution is near to the policy's it mostly draws the policy's token, also at temperature 1
(coupling by common random numbers: Daliri, Musco, Suresh 2024, arXiv 2408.07978); a model that
guesses its most probable token agrees less often.

Its keys and values stand in the slots of the sample's own blocks: in KV tensors of its own, or,
where it is the policy with fewer layers, in the policy's, behind the tokens that are computed. The
step that follows writes over them before it reads them. So prefixes, forks and preemption need
nothing here. What may stand there wrongly makes wrong drafts, and nothing else.
"""

import math
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from nano_inference.core.sequence import DRAFT, Sequence
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.drafts.source import NO_GUESS, Guess
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch, to_device
from nano_inference.structured.mask_bits import bans_under
from nano_inference.types import SamplingParams

MOST_BEHIND = 512  # rows of one call that only bring a model's own cache up to date
SURE = 8  # kinds of drafts: by how probable the model thought them
SLOWLY = 0.8  # of a measured time, what the next one leaves of it


@dataclass(slots=True)
class _Computed:
    """What of a sequence stands in the model's own cache: so many of its tokens, and drafts."""

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
    """Return the draw of one token, as a step of the engine would draw it.

    Args:
        params, stop_ids, num_prompt_tokens: of the request.
        token_ids: the sequence, at least as far as the token.
        row: of the logits.
        key: of the noise: the sample's seed and index, and the token's position.
        mask: of its grammar, int32 [W]; None: it has none.
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
    """A sequence that gets drafts.

    Args:
        seq: the sequence.
        start: the first position whose token is computed for the next draft.
        table: of its blocks, and scratch behind them.
        most: drafts.
    """

    def __init__(self, seq: Sequence, start: int, table: list[int], most: int) -> None:
        self.seq, self.start, self.table, self.most = seq, start, table, most
        self.token_ids = list(seq.token_ids)
        self.kinds: list[int] = []
        # grammars guess where they are looked ahead of
        self.grammar = None if seq.grammar is None else seq.grammar.fork()

    @property
    def drafts(self) -> list[int]:
        return self.token_ids[len(self.seq.token_ids) :]

    @property
    def is_open(self) -> bool:
        """Whether another draft is wanted."""
        return len(self.kinds) < self.most and (
            self.grammar is None or not (self.grammar.is_ended or self.grammar.problem)
        )

    def rows(self) -> Rows:
        return Rows(self.token_ids[self.start :], self.start, self.table)

    def request(self, row: int) -> DrawRequest:
        """The draw of the next token, as the step would draw it."""
        request = self.seq.request
        return draw_request(
            *(request.params, request.stop_ids, request.num_prompt_tokens, self.token_ids, row),
            (request.seed, self.seq.sample_index, len(self.token_ids)),
            None if self.grammar is None else self.grammar.mask_behind(0),
        )

    def take(self, token_id: int, logprob: float) -> None:
        """The model drew this."""
        self.start = len(self.token_ids)
        self.token_ids.append(token_id)
        self.kinds.append(_kind(logprob))
        if self.grammar is not None:
            self.grammar.accept(token_id)
            self.grammar.fill()
        if token_id in self.seq.request.stop_ids:
            self.most = 0


class ModelDrafts:
    """See `DraftSource`: a model that guesses.

    Args:
        name: of the source.
        model: whole, on the engine's device.
        storage: where its keys and values go; the slots of blocks are those of the policy's.
        scratch: blocks of that storage that no sequence has: for drafts behind a sequence's last.
        has_own_cache: the storage is its own, so that it computes prompts too; else the policy has
            computed all tokens but the newest for it.
        follow: brings its weights up to date; it is called before every guess. None: they are.
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
        """See `TimedSource`."""
        return self._times.of(num_seqs)

    @torch.inference_mode()
    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        """See `DraftSource`."""
        if self._follow is not None:
            self._follow()
        live = self._begin(seqs, most)
        found = list(live)
        while live := [each for each in live if each.is_open]:
            self._draw(live)
        self._remember(found)
        return guesses_of(seqs, found)

    def _begin(self, seqs: Listed[Sequence], most: int) -> list[Drafting]:
        """Those of the sequences that can have drafts now."""
        size, scratch, behind = self._storage.block_size, list(self._scratch), MOST_BEHIND
        found: list[Drafting] = []
        for seq in seqs:
            known = len(seq.token_ids)
            start = self._num_computed(seq)
            if known - 1 - start > behind:
                # its cache is brought up to date over several calls
                if behind > 0:
                    self._compute(seq, start, start + behind)
                behind = 0
                continue
            behind -= known - 1 - start
            wanted = min(most, len(self.model.ropes[False][0]) - known)  # positions that it has
            lacking = -(-(known + wanted - 1) // size) - len(seq.block_ids)
            table = seq.block_ids + scratch[: max(lacking, 0)]
            del scratch[: max(lacking, 0)]
            room = len(table) * size - known + 1  # the last draft is not computed
            if min(wanted, room) > 0:
                found.append(Drafting(seq, start, table, min(wanted, room)))
        return found

    def _draw(self, live: Listed[Drafting]) -> None:
        """One more draft of each."""
        began = time.perf_counter()
        rows = [each.rows() for each in live]
        ends = [sum(len(each.token_ids) for each in rows[: at + 1]) - 1 for at in range(len(rows))]
        batch = batch_of_rows(rows, self._storage.block_size, draws=ends, weight_set=DRAFT)
        device = self.model.device
        hidden = self.model.forward(to_device(batch, device), self._storage).hidden
        requests = to_device(draws_of(live), device)
        take_drawn(live, self.model.draw(hidden, requests), self.model.spec.vocab_size)
        if ends[-1] + 1 <= 2 * len(live):
            self._times.note(len(live), time.perf_counter() - began)

    def _compute(self, seq: Sequence, start: int, end: int) -> None:
        rows = Rows(seq.token_ids[start:end], start, seq.block_ids)
        batch = batch_of_rows([rows], self._storage.block_size, weight_set=DRAFT)
        self.model.forward(to_device(batch, self.model.device), self._storage)
        assert self._computed is not None
        self._computed[seq.seq_id] = _Computed(end, [], list(seq.block_ids))

    def _num_computed(self, seq: Sequence) -> int:
        """Tokens whose keys and values are there, but for the newest."""
        known = len(seq.token_ids)
        if self._computed is None:
            return known - 1
        there = self._computed.get(seq.seq_id)
        if there is None:
            return 0
        pairs = zip(there.block_ids, seq.block_ids, strict=False)
        blocks = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # a sequence only grows: by what was guessed, or by something else
        pairs = zip(there.drafts, seq.token_ids[there.num_tokens :], strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return min(there.num_tokens + right, blocks * self._storage.block_size, known - 1)

    def _remember(self, found: Listed[Drafting]) -> None:
        if self._computed is None:
            return
        if len(self._computed) > 4 * len(found) + 256:
            live = {each.seq.seq_id for each in found}
            self._computed = {key: each for key, each in self._computed.items() if key in live}
        for each in filter(lambda each: each.drafts, found):
            # the last draft is not computed; the next call may find other blocks behind its own
            known, blocks = len(each.seq.token_ids), list(each.seq.block_ids)
            self._computed[each.seq.seq_id] = _Computed(known, each.drafts[:-1], blocks)


class DraftTimes:
    """Seconds of one draft of each of some sequences, lately, by how many there are."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}  # by powers of 2 of the sequences
        self._begun: set[int] = set()  # of these the first, which makes what the others use again

    def of(self, num_seqs: int) -> float:
        """Of so many sequences; 0: not known yet."""
        bucket = _bucket(num_seqs)
        near = min(self._times, key=lambda each: abs(math.log2(each / bucket)), default=None)
        return 0.0 if near is None else self._times[near] * max(bucket / near, 1)

    def note(self, num_seqs: int, took: float) -> None:
        """One draft of each of so many sequences took so long."""
        bucket = _bucket(num_seqs)
        if bucket not in self._begun:
            self._begun.add(bucket)
            return
        self._times[bucket] = SLOWLY * self._times.get(bucket, took) + (1 - SLOWLY) * took


def draws_of(live: Listed[Drafting]) -> SamplingBatch:
    """The draws of the next token of each: a row of the logits each."""
    return sampling_batch([each.request(row) for row, each in enumerate(live)])


def take_drawn(live: Listed[Drafting], draw: Draw, vocab_size: int) -> None:
    """One more draft of each, as far as it could be drawn."""
    drawn = zip(live, draw.token_ids.tolist(), draw.logprobs.tolist(), strict=True)
    for each, token_id, logprob in drawn:
        if 0 <= token_id < vocab_size and not math.isnan(logprob):
            each.take(token_id, logprob)
        else:
            each.most = 0


def guesses_of(seqs: Listed[Sequence], found: Listed[Drafting]) -> list[Guess]:
    """A guess of each of the sequences, of those that drafts were drawn of."""
    guesses = {each.seq.seq_id: Guess(each.drafts, each.kinds) for each in found}
    return [guesses.get(seq.seq_id, NO_GUESS) for seq in seqs]


def spread_layers(num_layers: int, wanted: int) -> tuple[int, ...]:
    """So many layers of a model, spread evenly; the first and the last are among them."""
    if wanted == 1:
        return (0,)
    return tuple(round(i * (num_layers - 1) / (wanted - 1)) for i in range(wanted))


def _kind(logprob: float) -> int:
    """How probable the model thought a draft."""
    return min(int(math.exp(min(logprob, 0.0)) * SURE), SURE - 1)


def _bucket(num_seqs: int) -> int:
    return 1 << max(num_seqs - 1, 0).bit_length()
