"""The pure decision: which sequences compute how many tokens in the next step.

There is no prefill and no decode here. A sequence has known tokens (those on the host, plus the one that a step in
flight is sampling) and computed tokens; a step closes the gap, within three limits: sequences, tokens, blocks.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Listed

from nano_inference.config import SchedulerConfig
from nano_inference.kv_cache.manager import CacheAllocation, CacheView
from nano_inference.scheduling.decision import Admission, Chunk, SchedulerOutput
from nano_inference.scheduling.sequence import Sequence

NOTHING: Mapping[int, int] = {}
NO_MATCH = CacheAllocation((), 0)


def schedule(
    waiting: Listed[Sequence],
    running: Listed[Sequence],
    cache: CacheView,
    config: SchedulerConfig,
    pending: Mapping[int, int] = NOTHING,
) -> SchedulerOutput:
    """Decide one step. Reads its arguments and writes nothing.

    Args:
        waiting: sequences without blocks, in scheduling order (`Sequence.order`): priority, arrival, sample.
        running: sequences with blocks, in the same order.
        cache: what may be asked of the KV cache.
        config: the limits of a step.
        pending: sequence id -> tokens of it being sampled by steps in flight, not known on the host yet.

    Running sequences come first, those that need one token before those that need more; where the step is too small
    for all they take turns. Blocks are given in scheduling order, and where they run out the last in that order is
    preempted. Then waiting sequences enter, in order, while they fit.
    """
    plan = _Plan(running, cache, config, pending)
    grants = _share_budget(running, config, plan)
    for seq in running:
        if seq.seq_id in grants:
            plan.grow(seq, grants[seq.seq_id])
    if not plan.preempted:
        for seq in waiting:
            if not plan.admit(seq):
                break
    return plan.freeze()


def _share_budget(running: Listed[Sequence], config: SchedulerConfig, plan: "_Plan") -> dict[int, int]:
    """Tokens for each running sequence that can use some: by priority, single tokens first, longest idle first."""
    wants = [(seq, want) for seq in running if (want := plan.wanted(seq)) > 0]
    budget = config.max_tokens_per_batch
    if len(wants) > config.max_batch_size or sum(want for _, want in wants) > budget:
        wants.sort(key=lambda item: (item[0].params.priority, item[1] > 1, item[0].last_step))
    grants: dict[int, int] = {}
    for seq, want in wants[: config.max_batch_size]:
        length = plan.chunk_length(want, budget)
        if length:
            grants[seq.seq_id] = length
            budget -= length
    return grants


class _Plan:
    """A decision in the making: local counts of what the step has left. Writes only to itself."""

    def __init__(
        self, running: Listed[Sequence], cache: CacheView, config: SchedulerConfig, pending: Mapping[int, int]
    ) -> None:
        self.cache, self.config, self.pending = cache, config, pending
        self.alive = list(running)
        self.num_seqs = sum(seq.width for seq in running)
        self.budget = config.max_tokens_per_batch
        self.free = cache.num_free_blocks()
        self.refs: dict[int, int] = {}  # reference counts that this plan changes
        self.chunks: dict[int, Chunk] = {}
        self.growth: dict[int, int] = {}  # blocks that each chunk takes from the free list
        self.admitted: list[Admission] = []
        self.preempted: list[int] = []
        self.copied: dict[int, int] = {}  # sequence id -> shared block that its chunk copies first
        self.promised: int | None = None  # blocks that running sequences lack for known tokens; None until asked for
        self.owed = 0  # the same of newcomers
        self.computing: set[int] = set()  # names of the blocks that this plan's chunks fill

    def wanted(self, seq: Sequence) -> int:
        """Known tokens that are not computed, or 0 where the token in flight is certainly the last."""
        in_flight = self.pending.get(seq.seq_id, 0)
        if seq.num_samples and seq.num_completion_tokens + in_flight >= seq.max_tokens:
            return 0
        return seq.num_to_compute + in_flight - seq.num_computed_tokens

    def chunk_length(self, want: int, budget: int) -> int:
        """How many of `want` tokens one step can take: 0 for none."""
        if not self.config.enable_chunked_prefill:
            return want if want <= budget else 0
        return min(want, budget, self.config.max_chunk_tokens or want)

    def grow(self, seq: Sequence, length: int) -> None:
        """Give a running sequence its chunk, preempting from the end of the order until its blocks are there."""
        if seq.seq_id in self.preempted:
            return
        while (need := self._fresh_blocks(seq, seq.num_computed_tokens, length)) > self.free:
            victim = self.alive[-1]
            self._preempt(victim)
            if victim is seq:
                return
        self._own_written_block(seq, seq.num_computed_tokens)
        self._add_chunk(seq, seq.num_computed_tokens, length, need)

    def admit(self, seq: Sequence) -> bool:
        """Let a waiting sequence in if it fits. False: stop here, nobody may overtake it."""
        if self.budget == 0 or self.pending.get(seq.seq_id, 0):
            return False
        match = NO_MATCH
        if self.config.enable_prefix_caching:
            match = self.cache.match(seq.token_ids, seq.prefix, seq.num_matchable)
            if self._is_computing_next_block(seq, match):
                return True  # a twin computes its next block in this step: it waits for that, others go on
        length = self.chunk_length(seq.num_to_compute - match.cached_length, self.budget)
        if not length or not self._make_room(seq, match):
            return False
        need, pinned = self._need(seq, match)
        fresh = self._blocks(match.cached_length + length) - len(match.block_ids)
        self.owed += need - pinned - fresh
        self.free -= pinned
        self.refs.update((block_id, self._refs(block_id) + 1) for block_id in match.block_ids)
        self.num_seqs += seq.width
        self.admitted.append(Admission(seq.seq_id, match))
        self._add_chunk(seq, match.cached_length, length, fresh)
        return True

    def freeze(self) -> SchedulerOutput:
        """The decision."""
        columns = tuple(zip(*self.chunks.values(), strict=True)) or ((),) * len(Chunk._fields)
        return SchedulerOutput(*columns, admitted=tuple(self.admitted), preempted_seqs=tuple(self.preempted))

    def _add_chunk(self, seq: Sequence, start: int, length: int, fresh: int) -> None:
        known = len(seq.token_ids) + self.pending.get(seq.seq_id, 0)
        samples = seq.num_samples if start + length == known else 0
        self.chunks[seq.seq_id] = Chunk(seq.seq_id, start, length, samples, seq.weight_set)
        self.growth[seq.seq_id] = fresh
        self.free -= fresh
        self.budget -= length
        if seq.publishable:
            size = self.cache.block_size
            self.computing.update(seq.prefix.hashes[start // size : (start + length - 1) // size + 1])

    def _need(self, seq: Sequence, match: CacheAllocation) -> tuple[int, int]:
        """Blocks that a newcomer takes from the free ones for its known tokens and the next, and how many of them it
        matches: those hold a prefix, and are free no more once it is used.
        """
        pinned = sum(self._refs(block_id) == 0 for block_id in match.block_ids)
        return self._blocks(seq.num_to_compute + (seq.num_samples > 0)) - len(match.block_ids) + pinned, pinned

    def _make_room(self, seq: Sequence, match: CacheAllocation) -> bool:
        """Whether a newcomer fits; sequences of strictly lower priority make way for it."""
        while not self._fits(seq, match):
            victim = self.alive[-1] if self.alive else None
            if victim is None or victim.params.priority <= seq.params.priority:
                return False
            self._preempt(victim)
        return True

    def _fits(self, seq: Sequence, match: CacheAllocation) -> bool:
        need, _ = self._need(seq, match)
        if not self.alive and not self.admitted:
            return need <= self.free  # alone; that it fits was checked when it was added
        # The other samples of a group will each want a block of their own as soon as they are forked.
        spare = need + seq.width - 1
        return self.num_seqs + seq.width <= self.config.max_batch_size and spare <= self._room()

    def _room(self) -> int:
        """Free blocks, less what admitted sequences still need for tokens that they already know."""
        if self.promised is None:
            self.promised = 0
            for seq in self.alive:
                held = len(seq.block_ids) + self.growth.get(seq.seq_id, 0)
                known = seq.num_to_compute + self.pending.get(seq.seq_id, 0)
                self.promised += max(0, self._blocks(known) - held)
        return self.free - self.promised - self.owed

    def _preempt(self, victim: Sequence) -> None:
        self.alive.remove(victim)
        self.preempted.append(victim.seq_id)
        self.num_seqs -= victim.width
        self.promised = None
        chunk = self.chunks.pop(victim.seq_id, None)
        if chunk is not None:  # undo it: only a newcomer of higher priority comes this late
            self.budget += chunk.length
            self.free += self.growth.pop(victim.seq_id)
            if victim.seq_id in self.copied:
                self.refs[self.copied.pop(victim.seq_id)] += 1
        for block_id in victim.block_ids:
            self.refs[block_id] = self._refs(block_id) - 1
            self.free += self.refs[block_id] == 0

    def _is_computing_next_block(self, seq: Sequence, match: CacheAllocation) -> bool:
        index = len(match.block_ids)
        usable = (index + 1) * self.cache.block_size <= seq.num_matchable
        return usable and index < len(seq.prefix.hashes) and seq.prefix.hashes[index] in self.computing

    def _fresh_blocks(self, seq: Sequence, start: int, length: int) -> int:
        copied = self._written_block_is_shared(seq, start)
        return self._blocks(start + length) - len(seq.block_ids) + copied

    def _written_block_is_shared(self, seq: Sequence, start: int) -> bool:
        index = start // self.cache.block_size
        return index < len(seq.block_ids) and self._refs(seq.block_ids[index]) > 1

    def _own_written_block(self, seq: Sequence, start: int) -> None:
        if self._written_block_is_shared(seq, start):
            shared = seq.block_ids[start // self.cache.block_size]
            self.refs[shared] = self._refs(shared) - 1
            self.copied[seq.seq_id] = shared

    def _refs(self, block_id: int) -> int:
        return self.refs.get(block_id, self.cache.ref_count(block_id))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.block_size)
