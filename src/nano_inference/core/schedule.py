"""The decision: which sequences compute how many tokens in the next step. A pure function.

Prefill and decode are not distinguished. A sequence has known tokens (those on the host, plus the
one that a step in flight is sampling) and computed tokens. A step closes the gap within three
limits: sequences, tokens and blocks.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listed
from functools import cached_property
from typing import NamedTuple

from nano_inference.config import SchedulerConfig
from nano_inference.core.decision import Admission, Chunk, SchedulerOutput, Wait
from nano_inference.core.sequence import Sequence
from nano_inference.kv_cache.manager import CacheAllocation, CacheView
from nano_inference.sampling.drafted import NO_DRAFTS, Drafts

NOTHING: Mapping[int, int] = {}
NO_MATCH = CacheAllocation((), 0)


def schedule(
    waiting: Listed[Sequence],
    running: Listed[Sequence],
    cache: CacheView,
    config: SchedulerConfig,
    pending: Mapping[int, int] = NOTHING,
    num_in_flight: int = 0,
    drafts: Drafts = NO_DRAFTS,
) -> SchedulerOutput:
    """Decide one step. Reads its arguments and changes nothing.

    Args:
        waiting: Sequences without blocks, in scheduling order (`Sequence.order`): priority,
            arrival, sample.
        running: Sequences with blocks, in the same order.
        cache: Read-only view of the KV cache.
        config: Limits of a step.
        pending: Sequence id -> number of its tokens in flight, which the host does not know yet.
        num_in_flight: Number of steps in flight. Read only if `config.groups` > 1.
        drafts: Sequence id -> guesses of the tokens after its known ones.

    Running sequences come first. In a step too small for all, the order is priority, then sequences
    that need only one token, then older requests. Samples of a request progress evenly.

    Blocks are allocated in scheduling order. If they run out, the last sequence in that order is
    preempted. If layers have a sliding window, a chunk preempts others only for its first window of
    tokens, and the rest takes free blocks. If none was preempted, waiting sequences enter in
    order while they fit. One of higher priority may preempt running sequences.

    With `config.groups` > 1 or `config.max_drafts` > 0, a sequence whose token is in flight is not
    planned. With groups, a step draws for at most 1/`groups` of the sequences, rounded up, and a
    chunk that draws nothing may be in every step. Drafts follow known tokens, and get the tokens,
    draws and free blocks that remain after all other work is planned.
    """
    in_turns = config.groups > 1 or config.max_drafts > 0
    free = [seq for seq in running if seq.seq_id not in pending] if in_turns else running
    turns = _Turns(config, len(running), len(free), len(waiting), num_in_flight)
    plan = _Plan(running, cache, config, pending, turns)
    for seq, want, length in _share_budget(free, config, plan):
        plan.grow(seq, want, length)
    if not plan.preempted:
        for seq in waiting:
            wait = plan.admit(seq)
            if wait is not None:
                plan.waits.append((seq.seq_id, wait))
                if wait is not Wait.SAME_PREFIX:  # no sequence may overtake this one
                    break
    if drafts:
        plan.add_drafts(free, drafts)
    return plan.freeze()


def _share_budget(
    running: Listed[Sequence], config: SchedulerConfig, plan: "_Plan"
) -> Iterable[tuple[Sequence, int, int]]:
    """Return running sequences with the tokens that they need and get, in scheduling order.

    If there are not enough for all, the order is: priority, single tokens first, arrival of the
    request. Within a request the shortest sample comes first, so that the samples end together.
    """
    seqs, wants = plan.wanted(running)
    budget = config.max_tokens_per_batch
    longest = plan.chunk_length(budget, budget)
    places = config.max_batch_size
    if config.groups > 1:
        places = plan.turns.share(
            without=sum(
                want > longest or not s.num_samples for s, want in zip(seqs, wants, strict=True)
            )
        )
    if len(seqs) <= places and sum(wants) <= budget and max(wants, default=0) <= longest:
        return zip(seqs, wants, wants, strict=True)
    queue = sorted(
        zip(seqs, wants, strict=True),
        key=lambda each: (
            each[0].request.params.priority,
            each[1] > 1,
            each[0].request.arrival,
            each[0].num_computed_tokens,
        ),
    )
    grants: dict[int, int] = {}
    for seq, want in queue[: config.max_batch_size]:
        length = plan.chunk_length(want, budget)
        draws = length == want and seq.num_samples > 0
        if length and (places or not draws):
            grants[seq.seq_id] = length
            budget -= length
            places -= draws
    return [
        (seq, want, grants[seq.seq_id])
        for seq, want in zip(seqs, wants, strict=True)
        if seq.seq_id in grants
    ]


class _Turns(NamedTuple):
    """Counts of the sequences that take turns in the stages of a pipeline."""

    config: SchedulerConfig
    num_running: int
    num_free: int  # running sequences without a token in flight
    num_waiting: int
    num_in_flight: int  # steps in flight

    def share(self, without: int = 0, with_waiting: bool = False) -> int:
        """Return the number of sequences that this step may draw for.

        Each of the following steps can then draw for as many.

        Args:
            without: Running sequences that cannot draw yet, because they need more than one step's
                tokens.
            with_waiting: True to count waiting sequences too.
        """
        more, groups = self.num_waiting if with_waiting else -without, self.config.groups
        live, most = self.num_running + more, self.config.max_batch_size
        free = min(self.num_free + more, most - (self.num_running - self.num_free))
        return max(
            1, min(-(-min(live, most) // groups), -(-free // max(1, groups - self.num_in_flight)))
        )


class _Plan:
    """An unfinished decision, with local counts of the step's remaining capacity.

    Memory is counted in units. A fresh block takes `layout.num_units`.
    """

    def __init__(
        self,
        running: Listed[Sequence],
        cache: CacheView,
        config: SchedulerConfig,
        pending: Mapping[int, int],
        turns: "_Turns",
    ) -> None:
        self.turns = turns
        self.cache, self.config, self.pending = cache, config, pending
        self.alive = list(running)
        self.budget = config.max_tokens_per_batch
        self.room, self.layout, self.block_size = Room(cache), cache.layout, cache.block_size
        # the fields of `Chunk`, by sequence id
        self.chunks: dict[int, tuple[int, int, int, int, str, int, tuple[int, ...]]] = {}
        self.admitted: list[Admission] = []
        self.preempted: list[int] = []
        self.waits: list[tuple[int, Wait]] = []
        self.copied: dict[int, int] = {}  # sequence id -> shared block that its chunk copies first
        # units that running sequences lack for known tokens; None until computed
        self.promised: int | None = None
        self.owed = 0  # the same for admitted sequences

    @cached_property
    def num_seqs(self) -> int:
        """Number of sequences that hold blocks.

        A group that is not forked yet counts as all its samples. Like `computing`, the number is
        computed on first use, because most decode steps need neither.
        """
        return sum(seq.width for seq in self.alive)

    @cached_property
    def places(self) -> int:
        """Number of new sequences that may still draw in this step.

        The limit keeps the steps of a pipeline balanced once all of them run.
        """
        drawing = sum(chunk[3] > 0 for chunk in self.chunks.values())
        return self.turns.share(with_waiting=True) - drawing

    @cached_property
    def computing(self) -> set[int]:
        """Names of the blocks that this plan's chunks fill."""
        names: set[int] = set()
        for seq in self.alive:
            chunk = self.chunks.get(seq.seq_id)
            # rarely true in decode
            if chunk is not None and chunk[1] // self.block_size < len(seq.prefix.hashes):
                names.update(self._names(seq, chunk[1], chunk[2]))
        return names

    def wanted(self, running: Listed[Sequence]) -> tuple[list[Sequence], list[int]]:
        """Return the sequences that have tokens to compute, and the number of these tokens.

        A sequence that reaches `most_tokens` with its token in flight is skipped.
        """
        seqs: list[Sequence] = []
        wants: list[int] = []
        pending = self.pending
        for seq in running:
            known = len(seq.token_ids) + pending.get(seq.seq_id, 0)
            if not seq.num_samples:
                known = seq.num_to_compute
            elif known >= seq.most_tokens:
                continue
            if known > seq.num_computed_tokens:
                seqs.append(seq)
                wants.append(known - seq.num_computed_tokens)
        return seqs, wants

    def chunk_length(self, want: int, budget: int) -> int:
        """Return how many of `want` tokens one step can compute."""
        if not self.config.enable_chunked_prefill:
            return want if want <= budget else 0
        return min(want, budget, self.config.max_chunk_tokens or want)

    def grow(self, seq: Sequence, want: int, length: int) -> None:
        """Plan a running sequence's chunk.

        Sequences at the end of the order are preempted until its blocks are available.
        """
        if self.preempted and seq.seq_id in self.preempted:
            return
        start, fresh = seq.num_computed_tokens, 0
        if start + length > self._own_blocks(seq, start) * self.block_size:
            length = self._make_way(seq, start, length)
            if not length:
                return
            fresh = self._blocks(start + length) - self._own_blocks(seq, start)
            self._own_written_block(seq, start)
        self._add_chunk(seq, start, length, fresh, length == want)

    def _make_way(self, seq: Sequence, start: int, length: int) -> int:
        """Return how many of `length` tokens a running sequence computes, preempting later ones.

        0 if the sequence itself was preempted.
        """
        least = self._least(length)
        while (
            fits := self._fitting(start, length, self._own_blocks(seq, start), self.room.fresh())
        ) < least:
            victim = self.alive[-1]
            if victim is seq and fits and self.layout.num_sliding:
                # the window slides past the computed tokens, so continuing needs no more memory
                # than one token does
                break
            self._preempt(victim)
            if victim is seq:
                return 0
        return fits

    def admit(self, seq: Sequence) -> Wait | None:
        """Admit a waiting sequence if it fits. Otherwise return the reason."""
        if self.budget == 0:
            return Wait.TOKENS
        if self.pending.get(seq.seq_id, 0):
            return Wait.IN_FLIGHT
        match = NO_MATCH
        if self.config.enable_prefix_caching:
            match = self.cache.match(seq.token_ids, seq.prefix, seq.num_matchable)
            if self._is_computing_next_block(seq, match):
                return Wait.SAME_PREFIX
        start = match.cached_length
        length = self.chunk_length(seq.num_to_compute - start, self.budget)
        draws = start + length == seq.num_to_compute and seq.num_samples > 0
        if not length:
            return Wait.TOKENS
        if draws and not self._has_place(seq):
            return Wait.STAGE
        # matched blocks are no longer free once they are used
        self.room.hold(match.block_ids, self._num_slid(start))
        length = self._make_room(seq, match, length)
        if not length:
            return self._obstacle(seq, match, 1) or Wait.MEMORY
        fresh = self._blocks(start + length) - len(match.block_ids)
        self.owed += max(0, self._need(seq, match, length) - fresh * self.layout.num_units)
        self.num_seqs += seq.width
        self.admitted.append(Admission(seq.seq_id, match))
        if self.config.groups > 1:
            self.places -= draws
        self._add_chunk(seq, start, length, fresh, start + length == seq.num_to_compute)
        self.computing.update(self._names(seq, start, length))
        return None

    def add_drafts(self, running: Listed[Sequence], drafts: Drafts) -> None:
        """Append drafts to chunks that draw, as far as capacity is left."""
        draws = self.config.max_draws - sum(chunk[3] for chunk in self.chunks.values())
        for seq in running:
            wanted, chunk = drafts.get(seq.seq_id, ()), self.chunks.get(seq.seq_id)
            if not wanted or chunk is None or chunk[3] != 1:
                continue
            seq_id, start, length, samples, weight_set, fresh, _ = chunk
            most = (self.config.max_chunk_tokens or self.budget + length) - length
            room = min(len(wanted), most, self.budget, draws, seq.most_tokens - start - length - 1)
            held = len(seq.block_ids) - (seq_id in self.copied) + fresh
            if start + length + room > held * self.block_size:
                spare = self.room.fresh(self._reserved(seq))
                room = min(room, (held + spare) * self.block_size - start - length)
            if room <= 0:
                continue
            more = max(0, self._blocks(start + length + room) - held)
            self.room.take(more)
            self.budget, draws = self.budget - room, draws - room
            self.chunks[seq_id] = (
                seq_id,
                start,
                length + room,
                samples,
                weight_set,
                fresh + more,
                tuple(wanted[:room]),
            )

    def freeze(self) -> SchedulerOutput:
        """Return the finished decision."""
        columns = tuple(zip(*self.chunks.values(), strict=True)) or ((),) * len(Chunk._fields)
        return SchedulerOutput(
            *columns,
            admitted=tuple(self.admitted),
            preempted_seqs=tuple(self.preempted),
            waits=tuple(self.waits),
        )

    def _has_place(self, seq: Sequence) -> bool:
        """Return True if a new sequence may draw in this step.

        Balance does not delay a sequence that may preempt others.
        """
        if self.config.groups == 1 or self.places > 0:
            return True
        return (
            bool(self.alive)
            and self.alive[-1].request.params.priority > seq.request.params.priority
        )

    def _add_chunk(
        self, seq: Sequence, start: int, length: int, fresh: int, completes: bool
    ) -> None:
        samples = seq.num_samples if completes else 0
        # a plain tuple: a NamedTuple takes ten times as long to create
        self.chunks[seq.seq_id] = (seq.seq_id, start, length, samples, seq.weight_set, fresh, ())
        if fresh:
            self.room.take(fresh)
        self.budget -= length

    def _names(self, seq: Sequence, start: int, length: int) -> Listed[int]:
        """Return the names of the blocks that a chunk fills, if they will be matchable."""
        size = self.block_size
        return (
            seq.prefix.hashes[start // size : (start + length - 1) // size + 1]
            if seq.publishable
            else ()
        )

    def _need(self, seq: Sequence, match: CacheAllocation, length: int) -> int:
        """Return the units that a new sequence needs for its known tokens and the next one.

        The units of its match are not included.
        """
        most = self.layout.most_units(
            seq.num_to_compute + (seq.num_samples > 0), self._least(length), self.block_size
        )
        return max(0, most - self._units(len(match.block_ids), match.cached_length))

    def _make_room(self, seq: Sequence, match: CacheAllocation, length: int) -> int:
        """Return how many of `length` tokens a new sequence computes now.

        Sequences of strictly lower priority are preempted for it. 0 if it still does not fit.
        """
        held = len(match.block_ids)
        while self._obstacle(seq, match, length) is not None:
            # the only sequence: `add_request` checked that it fits
            if not self.alive and not self.admitted:
                return self._fitting(match.cached_length, length, held, self.room.fresh())
            victim = self.alive[-1] if self.alive else None
            if victim is None or victim.request.params.priority <= seq.request.params.priority:
                return 0
            self._preempt(victim)
        return self._fitting(
            match.cached_length, length, held, self.room.fresh(self._reserved(seq))
        )

    def _obstacle(self, seq: Sequence, match: CacheAllocation, length: int) -> Wait | None:
        """Return the reason why a new sequence does not fit, or None if it does."""
        if self.num_seqs + seq.width > self.config.max_batch_size:
            return Wait.PLACES
        least = self._least(length)
        fresh = self._blocks(match.cached_length + least) - len(match.block_ids)
        fits = self._need(seq, match, length) <= self.room.units - self._reserved(
            seq
        ) and fresh <= self.room.fresh(self._reserved(seq))
        return None if fits else Wait.MEMORY

    def _reserved(self, seq: Sequence) -> int:
        """Return the units that a new sequence must leave free.

        Admitted sequences still need units for tokens that they already know. Each other sample of
        the sequence's group needs a block as soon as it is forked.
        """
        if self.promised is None:
            # A chunk that draws has blocks for all known tokens of its sequence. With a sliding
            # window it may need more units.
            done = {
                chunk[0]
                for chunk in self.chunks.values()
                if chunk[3] and not self.layout.num_sliding
            }
            self.promised = sum(self._promise(seq) for seq in self.alive if seq.seq_id not in done)
        return self.promised + self.owed + (seq.width - 1) * self.layout.num_units

    def _promise(self, seq: Sequence) -> int:
        known = seq.num_to_compute + self.pending.get(seq.seq_id, 0)
        fresh = self.chunks[seq.seq_id][5] if seq.seq_id in self.chunks else 0
        length = self.chunk_length(
            max(1, known - seq.num_computed_tokens), self.config.max_tokens_per_batch
        )
        most = self.layout.most_units(known, self._least(length or 1), self.block_size)
        held = (
            self._units(len(seq.block_ids), seq.num_computed_tokens) + fresh * self.layout.num_units
        )
        return max(0, most - held)

    def _fitting(self, start: int, length: int, held: int, fresh: int) -> int:
        """Return how many of `length` tokens from `start` on fit into a table.

        The table has `held` blocks and can get `fresh` new ones.
        """
        fits = max(0, min(length, (held + fresh) * self.block_size - start))
        return fits if fits == length or self.config.enable_chunked_prefill else 0

    def _least(self, length: int) -> int:
        """Return the length below which a chunk preempts others instead of shrinking.

        Keys before the window of the sliding layers are freed again, so a longer part would take
        blocks that it does not keep.
        """
        divisible = self.layout.num_sliding and self.config.enable_chunked_prefill
        return min(length, self.layout.window) if divisible else length

    def _preempt(self, victim: Sequence) -> None:
        self.num_seqs -= victim.width
        self.alive.remove(victim)
        self.preempted.append(victim.seq_id)
        self.promised = None
        chunk = self.chunks.pop(victim.seq_id, None)
        if chunk is not None:  # undo the chunk: a new sequence of higher priority preempts it
            _, _, length, _, _, fresh, _ = chunk
            self.budget += length
            self.room.take(-fresh)
            if victim.seq_id in self.copied:
                self.room.hold([self.copied.pop(victim.seq_id)], 0)
        self.room.let_go(victim.block_ids, self._num_slid(victim.num_computed_tokens))

    def _is_computing_next_block(self, seq: Sequence, match: CacheAllocation) -> bool:
        index = len(match.block_ids)
        usable = (index + 1) * self.block_size <= seq.num_matchable
        return (
            usable and index < len(seq.prefix.hashes) and seq.prefix.hashes[index] in self.computing
        )

    def _own_blocks(self, seq: Sequence, start: int) -> int:
        """Return the number of a running sequence's blocks that it can continue to use.

        The block that it writes next does not count if others hold it too, because it is copied.
        """
        held, index = len(seq.block_ids), start // self.block_size
        return held - 1 if index < held and self.room.refs(seq.block_ids[index]) > 1 else held

    def _own_written_block(self, seq: Sequence, start: int) -> None:
        if self._own_blocks(seq, start) < len(seq.block_ids):
            shared = seq.block_ids[start // self.block_size]
            self.room.let_go([shared], 0)
            self.copied[seq.seq_id] = shared

    def _units(self, num_blocks: int, computed: int) -> int:
        """Return the units of a table between steps."""
        return self.layout.num_units * num_blocks - self.layout.num_sliding * self._num_slid(
            computed
        )

    def _num_slid(self, computed: int) -> int:
        return self.layout.num_slid(computed, self.block_size)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class Room:
    """Free blocks and units, and the reference counts that a plan changes.

    A fresh block takes `layout.num_units` units. A block that no table holds returns its units of
    full layers. A block in no table's window returns its units of sliding layers.
    """

    def __init__(self, cache: CacheView) -> None:
        self.layout = cache.layout
        self.blocks = cache.num_free_blocks()
        self.units = cache.num_free_units()
        self._cache = cache
        self._refs: dict[int, int] = {}
        self._users: dict[int, int] = {}

    def refs(self, block_id: int) -> int:
        """Return the number of tables that hold a block."""
        return self._refs[block_id] if block_id in self._refs else self._cache.ref_count(block_id)

    def fresh(self, reserved_units: int = 0) -> int:
        """Return the number of blocks that can be taken if `reserved_units` stay free."""
        return max(0, min(self.blocks, (self.units - reserved_units) // self.layout.num_units))

    def take(self, num_blocks: int) -> None:
        """Take fresh blocks. A negative number returns them."""
        self.blocks -= num_blocks
        self.units -= num_blocks * self.layout.num_units

    def hold(self, block_ids: Listed[int], num_slid: int) -> None:
        """Add a table that holds these blocks, all but the first `num_slid` in its window."""
        self._count(block_ids, num_slid, 1)

    def let_go(self, block_ids: Listed[int], num_slid: int) -> None:
        """Remove a table that held these blocks."""
        self._count(block_ids, num_slid, -1)

    def _count(self, block_ids: Listed[int], num_slid: int, change: int) -> None:
        # a block is taken if its count was 0, and returned if it was 1
        lone = change > 0
        for block_id in block_ids:
            refs = self.refs(block_id)
            self._refs[block_id] = refs + change
            if refs == 1 - lone:
                self.blocks -= change
                self.units -= change * self.layout.num_full
        if self.layout.num_sliding:
            for block_id in block_ids[num_slid:]:
                users = self._users.get(block_id, self._cache.num_users(block_id))
                self._users[block_id] = users + change
                if users == 1 - lone:
                    self.units -= change * self.layout.num_sliding
