"""The step: decide, apply, launch, retire.

The synchronous and the overlapped engine share this loop.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Container
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple

from nano_inference.config import SchedulerConfig
from nano_inference.core.apply import (
    Applied,
    SampledTokens,
    apply,
    commit,
    commit_scores,
    enter,
    preempt,
    retire,
    training_samples,
)
from nano_inference.core.batch import BatchBuilder, Chunks, ForwardBatch, Scored
from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.deltas import next_delta
from nano_inference.core.failures import is_device_failure
from nano_inference.core.gate import Gate
from nano_inference.core.interfaces import Drafting, Pending, Receipts, Returning, Runner
from nano_inference.core.lifecycle import Event, Lifecycle, after
from nano_inference.core.logits_processors import LogitsProcessors
from nano_inference.core.reference_logprobs import ReferenceLogprobs
from nano_inference.core.request_statuses import request_statuses
from nano_inference.core.schedule import schedule
from nano_inference.core.sequence import (
    POLICY,
    PREVIOUS,
    Sequence,
    Sequences,
    SequenceStatus,
    ServedAdapter,
)
from nano_inference.core.stopping import Finish, failure, grammar_failure, take_text
from nano_inference.core.updates import FixedWeights, Update, Weights, policy_of
from nano_inference.core.versions import (
    begun,
    change_adapter,
    change_version,
    free_previous,
    is_held,
    of_adapter,
    outdated,
    release_held,
    settle_adapter,
)
from nano_inference.kv_cache.manager import KVCacheManager
from nano_inference.sampling.drafted import NO_DRAFTS, Drafts
from nano_inference.types import (
    GROUP_COMPLETE,
    Delta,
    KvPolicy,
    RequestStatus,
    TrainingSample,
)

logger = logging.getLogger("nano_inference")

ABORTED = Finish("abort")
NOT_WANTED = Finish("abort", GROUP_COMPLETE)
# phases of a step, as timed by `StepClock`
PHASES = ("handle", "schedule", "apply", "build", "forward", "wait", "commit", "sample")
_LOOKED_UP = 16  # waiting sequences whose blocks are looked up in files
_FINISHED = SequenceStatus.FINISHED  # an enum lookup takes 0.1 µs


@dataclass(frozen=True, slots=True)
class Add:
    """Add a new sequence."""

    sequence: Sequence
    posted: float = field(default_factory=perf_counter, compare=False)


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests (None: all), keeping the tokens so far."""

    request_ids: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class UpdateQueued:
    """An update of the policy's weights was queued.

    With `kv_policy="wait"`, requests posted after this message wait for the update.
    """

    update: Update


@dataclass(frozen=True, slots=True)
class UpdatesGivenUp:
    """Some updates left the queue without being written."""


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a held sequence is compiled or has failed."""

    sequence: Sequence


Message = Add | Abort | UpdateQueued | UpdatesGivenUp | GrammarReady


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and not retired."""

    sampled: tuple[Sequence, ...]  # sequence of each sample
    behind: Drafts  # sample index -> drafts that the sample follows
    scored: tuple[Scored, ...]  # in the order of the scores
    tokens: Pending


OnFinish = Callable[[Sequence, list[TrainingSample]], list[TrainingSample]]
Watch = Callable[[Chunks, Listed[ForwardBatch[Any]], Any], None]


def _no_grammars(seq: Sequence) -> None:
    raise RuntimeError("this loop does not support grammars; pass LoopHooks.start_grammar.")


@dataclass(frozen=True, slots=True)
class LoopHooks:
    """The parts of an engine that its loop calls.

    Attributes:
        gate: Decides with other engines when an update may be written.
        weights: The policy's weights and its queue of updates.
        start_grammar: Function that attaches a matcher to a new sequence, or posts `GrammarReady`
            once there is one.
        processors: Logits processors that requests may name.
        drafter: Source of draft tokens. None disables drafts.
        kept_files: Files of kept blocks that were evicted. None: evicted blocks are lost.
        receipts: Maker of receipts. None: no sample gets one.
        watches: Functions called with every launched step before its draw.
        on_finish: Functions called in order with each sequence that finishes without being aborted,
            before the loop's own hooks.
    """

    gate: Gate = field(default_factory=Gate)
    weights: Weights = field(default_factory=FixedWeights)
    start_grammar: Callable[[Sequence], None] = _no_grammars
    processors: LogitsProcessors = field(default_factory=LogitsProcessors)
    drafter: Drafting | None = None
    kept_files: Returning | None = None
    receipts: Receipts | None = None
    watches: tuple[Watch, ...] = ()
    on_finish: tuple[OnFinish, ...] = ()


class SampleGroups:
    """Counts the finished samples of requests that need only some of their samples."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._complete: set[int] = set()

    def __call__(self, seq: Sequence, samples: list[TrainingSample]) -> list[TrainingSample]:
        """Count a finished sequence and return its samples unchanged. Signature: `OnFinish`."""
        group = seq.request.group
        if group is not None:
            group.num_left -= 1
            if group.num_left <= 0:
                self._complete.add(seq.request_id)
        return samples

    def not_wanted(self) -> list[Sequence]:
        """Return the remaining sequences of complete groups.

        Sequences that score finished samples are not included.
        """
        if not self._complete:
            return []
        complete, self._complete = frozenset(self._complete), set()
        rest = self._sequences.of_requests(complete)
        return [seq for seq in rest if seq.request.scored_sample is None]


class EngineLoop:
    """Sequences, their cache and the steps in flight.

    Not thread-safe, except that any thread may append to `inbox`.

    Args:
        cache: KV cache.
        runner: Runner that computes the steps.
        config: Limits of a step.
        lookahead: Number of steps that may be in flight while another is launched.
        numerics: Numerics fingerprint that samples carry.
        hooks: Parts of the engine that the loop calls. None for no hooks.
        sequences: Empty `Sequences` to share with other objects. None for a new one.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        runner: Runner,
        config: SchedulerConfig,
        lookahead: int,
        numerics: str,
        hooks: LoopHooks | None = None,
        sequences: Sequences | None = None,
    ) -> None:
        hooks = hooks or LoopHooks()
        self.cache = cache
        self.runner = runner
        self.config = config
        self.lookahead = lookahead
        self.numerics = numerics
        self.sequences = Sequences() if sequences is None else sequences
        self.batches = BatchBuilder(config.block_size, runner.arrays)
        self.in_flight: deque[Flight] = deque()
        self.inbox: deque[Message] = deque()
        self.gate, self.weights = hooks.gate, hooks.weights
        self.start_grammar, self.processors = hooks.start_grammar, hooks.processors
        self._compiling: set[int] = set()  # ids of sequences without a `GrammarReady` so far
        self.drafter, self.kept_files = hooks.drafter, hooks.kept_files
        self.watches, self.receipts = hooks.watches, hooks.receipts
        self.groups = SampleGroups(self.sequences)
        # Keep this order: `ReferenceLogprobs` withholds samples from later hooks.
        self.on_finish: list[OnFinish] = [
            *hooks.on_finish,
            self.groups,
            ReferenceLogprobs(self.sequences, config.block_size),
        ]
        self.life = Lifecycle()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_completion_tokens = 0
        self.num_prompt_tokens = 0
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0
        self.num_leaked_blocks = 0  # at the last audit
        self.clock = StepClock()
        # finished samples that were not taken yet; a failed step leaves its samples here
        self.finished: list[TrainingSample] = []
        self.streamed: list[Delta] = []  # tokens of streaming sequences, not taken yet
        # (request id, seconds in the queue) of sequences that left it, not taken yet
        self.queue_times: list[tuple[int, float]] = []

    def has_pending(self) -> bool:
        """Return True if a step would do anything.

        Held sequences do not count. While the engine is paused, no sequence counts.
        """
        if self.inbox or self.in_flight or self._due_update() is not None:
            return True
        return self.gate.is_due() or (self.life.launching and self.is_busy())

    def is_compiling(self) -> bool:
        """Return True if a sequence waits for its grammar."""
        return not self._compiling.isdisjoint(self.sequences.by_id)

    def is_busy(self) -> bool:
        """Return True if anything runs or waits to run."""
        return bool(self.sequences.running or self.sequences.waiting or self.in_flight)

    def step(self) -> list[TrainingSample]:
        """Plan a step, launch it, and retire older steps while the device works.

        Return the samples that finished.
        """
        lap = self.clock.lap
        self._handle()
        lap("handle")
        if not self.life.launching:
            self._accompany()
            self._retire(keep=0)
            return self.take()
        decision, applied = self._decide()
        if not decision.seq_ids:
            self._accompany()
            self._retire(keep=len(self.in_flight) - 1)  # its sequences can run next
            return self.take()
        self.num_steps += 1
        self.runner.announce(decision, applied, self.sequences)
        chunks = self.batches.chunks(decision, applied.sampled, self.sequences)
        batches = self.batches.forward_batches(chunks, self._sampling_now())
        lap("build")
        result = self.runner.forward(batches, applied.block_copies, self._newest_tokens())
        for watch in self.watches:
            watch(chunks, batches, result)
        lap("forward")
        # the previous step's tokens must be known before this draw
        self._retire(keep=self.lookahead - 1)
        tokens, chunks = self._draw_or_end(result, chunks)
        lap("sample")
        scored = tuple(scored for batch in batches for scored in batch.scored)
        self.in_flight.append(Flight(tuple(chunks.sampled), chunks.behind, scored, tokens))
        self._retire(keep=self.lookahead)
        return self.take()

    def _decide(self) -> tuple[SchedulerOutput, Applied]:
        """Decide one step, and apply it to sequences and cache."""
        lap = self.clock.lap
        if self.kept_files is not None and len(self.kept_files):
            self._bring_back(self.kept_files)
        live, pending = self.sequences, self._pending()
        drafts = self.drafter.propose(live, pending, self.config) if self.drafter else NO_DRAFTS
        decision = schedule(
            live.waiting,
            live.running,
            self.cache,
            self.config,
            pending,
            len(self.in_flight),
            drafts,
        )
        lap("schedule")
        self.num_preemptions += len(decision.preempted_seqs)
        self._count_admitted(decision)  # must precede the forks of `apply`
        applied = apply(decision, live, self.cache)  # also if the decision only preempts
        lap("apply")
        return decision, applied

    def _draw_or_end(self, result: Any, chunks: Chunks) -> tuple[Pending, Chunks]:
        """Draw a step's samples. End sequences that fail, and return the chunks of the others."""
        try:
            return self._draw(result, chunks), chunks
        except Exception as problem:  # possibly the fault of one sample
            if is_device_failure(problem):
                raise
            chunks, tokens, failed = draw_without_the_failing(
                lambda some: self._draw(result, some), chunks
            )
            for seq, finish in failed:
                if seq.status is not _FINISHED:  # an earlier flight may have ended it
                    self._end([seq], finish)
            return tokens, chunks

    def take(self) -> list[TrainingSample]:
        """Return the finished samples that were not taken yet."""
        taken, self.finished = self.finished, []
        return taken if self.receipts is None else [*map(self.receipts.add, taken)]

    def _note_receipts(self) -> None:
        if self.receipts is not None:
            for seq in self.sequences.by_id.values():
                self.receipts.note(seq)

    def _bring_back(self, files: Returning) -> None:
        """Restore blocks from files for the sequences that this step will admit.

        Blocks of later sequences would be evicted again before their turn.
        """
        if self._first_in_files(files, ()) is None:
            return
        self._retire(keep=0)  # steps in flight may still read free blocks
        tried: set[int] = set()
        tables: list[list[int]] = []
        while (candidate := self._first_in_files(files, tried)) is not None:
            seq, places = candidate
            tried.add(seq.seq_id)
            # hold all tables: restoring one must not evict another's blocks
            tables.append(files.bring_back(seq.token_ids, seq.prefix, places))
        for table in tables:
            self.cache.deallocate(table)

    def _first_in_files(
        self, files: Returning, tried: Container[int]
    ) -> tuple[Sequence, range] | None:
        """Return the first waiting sequence that would be admitted and has blocks in files.

        Sequences in `tried` are skipped. The second value holds the indices of these blocks.
        """
        newcomers = self.sequences.waiting[:_LOOKED_UP]
        candidates: dict[int, tuple[Sequence, range]] = {}
        for seq in newcomers:
            most = seq.num_matchable // self.config.block_size
            places = files.missing(seq.prefix.hashes[:most])
            if places and seq.seq_id not in tried:
                candidates[seq.seq_id] = seq, places
        if not candidates:
            return None
        # restored blocks need as much memory as computed ones, so plan without them
        running, pending = self.sequences.running, self._pending()
        plan = schedule(newcomers, running, self.cache, self.config, pending, len(self.in_flight))
        admitted = (each.seq_id for each in plan.admitted)
        return next((candidates[seq_id] for seq_id in admitted if seq_id in candidates), None)

    def prefetch(self, seq: Sequence) -> int:
        """Restore blocks of a prompt from files. Return the number of its cached tokens.

        `seq` is a new sequence of the prompt that has not entered. Nothing may be in flight.
        """
        self._name_blocks(seq)
        names = seq.prefix.hashes
        if self.kept_files is not None and (places := self.kept_files.missing(names)):
            self.cache.deallocate(self.kept_files.bring_back(seq.token_ids, seq.prefix, places))
        return self.cache.match(seq.token_ids, seq.prefix, len(seq.token_ids)).cached_length

    def let_go(self, seq: Sequence, start: int) -> int:
        """Stop keeping blocks of a prompt from position `start` on (`KVCacheManager.let_go`)."""
        self._name_blocks(seq)
        return self.cache.let_go(seq.prefix, start)

    def _name_blocks(self, seq: Sequence) -> None:
        settle_adapter(seq, self.sequences)
        seq.prefix.namespace = self.sequences.namespace_of(seq)
        seq.prefix.extend(seq.token_ids, self.config.block_size)

    def _accompany(self) -> None:
        """Take part in a round of engines in lockstep without computing anything."""
        if self.gate.is_due():
            self.runner.idle()

    def _draw(self, result: Any, chunks: Chunks) -> Pending:
        masks = self.batches.masks(chunks)
        biases, masks = self.processors.changes(self.runner, result, chunks, masks)
        sampling = self.batches.sampling_batch(chunks, masks, biases)
        self.clock.lap("build")
        self.runner.announce_draw(chunks, masks)
        pending = self.runner.sample(result, sampling)
        # wait now: one sample may make it raise
        return pending if self.lookahead else Known(pending.wait())

    def handle(self) -> list[TrainingSample]:
        """Handle the messages in `inbox`. Part of every step, and callable between steps."""
        self._handle()
        return self.take()

    def _handle(self) -> None:
        self.clock.start()
        self.cache.expire_kept()
        while self.inbox:
            match self.inbox.popleft():
                case Add(sequence, posted):
                    sequence.posted = posted
                    self._enter(sequence)
                case Abort(request_ids):
                    self._end(self.sequences.of_requests(request_ids))
                case GrammarReady(sequence):
                    self._release(sequence)
                case UpdateQueued(update):
                    self.weights.pending.arrive(update)
                    self._change_weights()
                case UpdatesGivenUp():
                    self._release_behind()
        self._change_weights()

    def change_now(self, weight_set: str, write: Callable[[], int | None]) -> list[TrainingSample]:
        """Call `write` with nothing in flight, ahead of all queued updates.

        `write` returns a new version, or None.
        """
        self._retire(keep=0)
        version = write()
        if version is not None:
            change_version(self.sequences, self.cache, weight_set, version)
            self._note_receipts()
        return self.take()

    def change_adapter(self, adapter: ServedAdapter, kv_policy: KvPolicy) -> list[TrainingSample]:
        """Serve an adapter, or a new version of it, from now on."""
        self._retire(keep=0)
        if kv_policy == "abort":  # sequences that only score are recomputed instead
            begun_with = of_adapter(self.sequences, adapter.name)
            self._end([seq for seq in begun_with if seq.num_samples])
        change_adapter(self.sequences, self.cache, adapter, kv_policy)
        self._note_receipts()
        return self.take()

    def watch(self, watch: Watch) -> None:
        """Call `watch` with every later step, like `LoopHooks.watches`. Only between steps."""
        self.watches = (*self.watches, watch)

    def unwatch(self, watch: Watch) -> None:
        """Stop calling `watch`. Only between steps."""
        self.watches = tuple(each for each in self.watches if each is not watch)

    def become(self, event: Event) -> None:
        """Change the lifecycle. Held requests enter once it admits them again."""
        before, self.life = self.life, after(self.life, event)
        if self.life.admitting and not before.admitting:
            release_held(self.sequences)

    def vacate(self) -> None:
        """Take all blocks away from the sequences and forget all prefixes.

        The sequences will recompute their context. Nothing may be in flight.
        """
        for seq in list(self.sequences.running):
            preempt(seq, self.sequences, self.cache)
        self.cache.flush()

    def request_statuses(self) -> list[RequestStatus]:
        """Return the status of every open request, with the reasons of the next step's decision.

        Changes nothing.
        """
        live = self.sequences
        decision = schedule(
            live.waiting,
            live.running,
            self.cache,
            self.config,
            self._pending(),
            len(self.in_flight),
        )
        return request_statuses(live, self.life, decision)

    def leaked_blocks(self) -> int:
        """Return the number of blocks in use that no live sequence holds.

        A number above 0 is a bug. The count is cheap if there are no sequences.
        """
        in_use = self.cache.num_blocks - self.cache.num_free_blocks()
        return in_use - len(
            {block_id for table in self.sequences.block_tables() for block_id in table}
        )

    def audit(self) -> None:
        """Log leaked blocks if there are no sequences."""
        if not self.sequences.by_id:
            leaked = self.leaked_blocks()
            if leaked > self.num_leaked_blocks:
                logger.error(
                    "leaked %d KV blocks (a bug in the engine)",
                    leaked,
                )
            self.num_leaked_blocks = leaked

    def check(self) -> None:
        """Assert the invariants of cache and sequences. For tests and debugging."""
        live, layout = self.sequences.by_id.values(), self.cache.layout
        slid = [layout.num_slid(seq.num_computed_tokens, self.cache.block_size) for seq in live]
        self.cache.check(self.sequences.block_tables(), slid)
        for seq in live:
            assert seq.num_computed_tokens <= len(seq.token_ids), "unknown tokens count as computed"
        for seq in [*self.sequences.waiting, *self.sequences.held]:
            assert not seq.block_ids, "a waiting sequence holds blocks"
            assert not seq.num_computed_tokens, "a waiting sequence has computed tokens"

    def _retire(self, keep: int) -> None:
        """Wait for the oldest steps until at most `keep` are in flight, and commit their tokens."""
        while len(self.in_flight) > max(keep, 0):
            flight = self.in_flight.popleft()
            tokens = flight.tokens.wait()
            self.clock.lap("wait")
            self.finished += commit_scores(flight.scored, tokens, self.sequences, self.cache)
            live = [seq for seq in flight.sampled if seq.status is not _FINISHED]
            if flight.behind:
                live = list(dict.fromkeys(live))
            self.num_completion_tokens += len(live)
            # `commit` may append nothing, so remember where new tokens begin.
            streaming = [(seq, len(seq.token_ids)) for seq in live if seq.request.streaming]
            ends = commit(flight.sampled, tokens, self.sequences, self.cache, flight.behind)
            if self.drafter is not None:
                pairs = flight.behind.items()  # a sequence's last row has all its drafts
                drafts = {flight.sampled[place].seq_id: each for place, each in pairs}
                self.num_completion_tokens += self.drafter.learn(live, drafts)
            for seq, before in streaming:
                ends += self._stream(seq, before)
            for seq, finish in dict(ends).items():  # a sequence's later finish wins
                ended = self._samples(seq, finish)
                if ended[0].finish_reason != "abort":
                    for hook in self.on_finish:
                        ended = hook(seq, ended)
                self.finished += ended
            self._end(self.groups.not_wanted(), NOT_WANTED)
            self.clock.lap("commit")

    def _enter(self, seq: Sequence) -> None:
        waits = [
            each.version for each in self.weights.pending.arrived() if policy_of(each) == "wait"
        ]
        # otherwise new requests could keep the update waiting forever
        if waits and seq.weight_set == POLICY:
            seq.behind = waits[-1]
        refused = settle_adapter(seq, self.sequences)
        if seq.grammar is not None:
            self.start_grammar(seq)
            if not seq.grammar.is_ready:
                self._compiling.add(seq.seq_id)
        if not self.life.admitting or is_held(seq, self.sequences):
            seq.status = SequenceStatus.HELD
        enter(seq, self.sequences, self.config.block_size)
        if refused is not None:
            self._end([seq], refused)
        elif seq.grammar is not None and seq.grammar.problem is not None:
            self._release(seq)
        elif seq.request.exact_version is not None:
            self._end_outdated()

    def _release(self, seq: Sequence) -> None:
        """Queue a sequence whose grammar is ready, or end it if the grammar failed."""
        self._compiling.discard(seq.seq_id)
        if seq.status is _FINISHED:
            return
        if seq.grammar is not None and seq.grammar.problem is not None:
            self._end([seq], grammar_failure(seq.grammar.problem))
        elif self.life.admitting:
            release_held(self.sequences)

    def would_wait(self, kv_policy: KvPolicy) -> bool:
        """Return True if an update with this policy would wait for requests or earlier updates."""
        queued = map(policy_of, self.weights.pending.arrived())
        return not all(map(self._is_ready, [*queued, kv_policy]))

    def ready_update(self) -> Update | None:
        """Return the oldest update, if nothing in this engine keeps it waiting."""
        arrived = self.weights.pending.arrived()
        return arrived[0] if arrived and self._is_ready(policy_of(arrived[0])) else None

    def _due_update(self) -> Update | None:
        """Return the oldest update, if neither this engine nor another keeps it waiting."""
        update = self.ready_update()
        return update if update is not None and self.gate.allows(update.version) else None

    def _is_ready(self, kv_policy: KvPolicy) -> bool:
        """Return True if nothing in this engine keeps an update with this policy waiting."""
        if not self.life.has_weights:
            return False
        if kv_policy == "wait":
            live = self.sequences.of_weight_set(POLICY)
            return all(seq.status is SequenceStatus.HELD for seq in live)
        return kv_policy != "finish_old" or not self.sequences.of_weight_set(PREVIOUS)

    def _change_weights(self) -> None:
        """Apply, in order, the updates that no longer need to wait."""
        while (update := self._due_update()) is not None:
            kv_policy = policy_of(update)
            self._retire(keep=0)  # weights may change only with nothing in flight
            if kv_policy == "abort":  # sequences that only score are recomputed instead
                self._end(
                    [seq for seq in begun(self.sequences, POLICY, PREVIOUS) if seq.num_samples]
                )
            version = self.weights.apply(update, keep_old=self._keeps_old(kv_policy))
            if version is not None:
                change_version(self.sequences, self.cache, POLICY, version, kv_policy)
                self._note_receipts()
                self._end_outdated()
            self._release_behind()

    def _release_behind(self) -> None:
        """Release the requests that were held for an update that has left the queue."""
        coming = {update.version for update in self.weights.pending.arrived()}
        for seq in self.sequences.held:
            if seq.behind not in coming:
                seq.behind = None
        if self.life.admitting:
            release_held(self.sequences)

    def _keeps_old(self, kv_policy: KvPolicy) -> bool:
        """Return True if a sequence will finish on weights that an update overwrites."""
        if kv_policy == "finish_old" and begun(self.sequences, POLICY):
            return True
        return PREVIOUS in self.sequences.versions

    def _end(self, sequences: list[Sequence], finish: Finish = ABORTED) -> None:
        """End sequences, keeping the tokens so far."""
        for seq in sequences:
            retire(seq, self.sequences, self.cache)
            self._leave_queue(seq)
            if seq.request.streaming and seq.request.scored_sample is None:
                self._stream(seq, len(seq.token_ids))
            self.finished += self._samples(seq, finish)
        self._free_previous()

    def _end_outdated(self) -> None:
        for seq, finish in outdated(self.sequences):
            self._end([seq], finish)

    def _free_previous(self) -> None:
        if PREVIOUS in self.sequences.versions and free_previous(self.sequences, self.cache):
            self.runner.drop(PREVIOUS)

    def _stream(self, seq: Sequence, before: int) -> list[tuple[Sequence, Finish]]:
        """Emit a streaming sequence's tokens from index `before` on, and its text.

        Return the sequence with its finish if that ends it.
        """
        text, failed = take_text(seq, ended=seq.status is _FINISHED)
        self.streamed.append(next_delta(seq, before, text))
        if failed is None:
            return []
        if seq.status is not _FINISHED:
            retire(seq, self.sequences, self.cache)
        return [(seq, failed)]

    def _count_admitted(self, decision: SchedulerOutput) -> None:
        for admission in decision.admitted:
            seq = self.sequences.by_id[admission.seq_id]
            is_new, of_policy = seq.posted is not None, seq.weight_set in (POLICY, PREVIOUS)
            self._leave_queue(seq)
            if self.receipts is not None:
                self.receipts.note(seq)
            if of_policy:
                self.num_prompt_tokens += seq.request.num_prompt_tokens if is_new else 0
                self.num_queried_tokens += (
                    len(seq.token_ids) if self.config.enable_prefix_caching else 0
                )
                self.num_cached_tokens += admission.cached.cached_length

    def _leave_queue(self, seq: Sequence) -> None:
        if seq.posted is not None:  # None after a preemption
            seq.queued, seq.posted = perf_counter() - seq.posted, None
            self.queue_times.append((seq.request_id, seq.queued))

    def _samples(self, seq: Sequence, finish: Finish) -> list[TrainingSample]:
        return training_samples(seq, finish, self.sequences.versions[seq.weight_set], self.numerics)

    def _pending(self) -> Counter[int]:
        """Count the tokens in flight by sequence id.

        Derived from the flights, so the count cannot drift.
        """
        return Counter([seq.seq_id for flight in self.in_flight for seq in flight.sampled])

    def _sampling_now(self) -> dict[int, int]:
        """Return each sequence's index in the samples of the newest step in flight."""
        if not self.in_flight:
            return {}
        return {seq.seq_id: row for row, seq in enumerate(self.in_flight[-1].sampled)}

    def _newest_tokens(self) -> Pending | None:
        return self.in_flight[-1].tokens if self.in_flight else None


class StepClock:
    """Time spent in each phase of a step. A lap costs about 0.2 µs."""

    def __init__(self) -> None:
        self.nanoseconds: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._last = 0

    def start(self) -> None:
        """Start timing a step, or work between two steps."""
        self._last = perf_counter_ns()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = perf_counter_ns()
        self.nanoseconds[phase] += now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """Total time in all phases."""
        return sum(self.nanoseconds.values()) / 1e9

    def microseconds(self, num_steps: int) -> dict[str, float]:
        """Return the mean time per step, by phase."""
        return {phase: spent / 1e3 / max(num_steps, 1) for phase, spent in self.nanoseconds.items()}


class Known(NamedTuple):
    """Samples that are already on the host. Implements `Pending`."""

    tokens: SampledTokens

    def wait(self) -> SampledTokens:
        return self.tokens


class Isolated(NamedTuple):
    """Result of a draw without the sequences that made it fail."""

    chunks: Chunks  # chunks with the remaining samples
    tokens: Any  # tokens of the remaining samples
    failed: list[tuple[Sequence, Finish]]  # failed sequences with their finish


def draw_without_the_failing(draw: Callable[[Chunks], Any], chunks: Chunks) -> Isolated:
    """Draw a step's samples without those that make `draw` raise.

    Call this after `draw` of all samples has raised. A draw does not depend on its neighbors, so
    the remaining samples keep their exact bits. A draw behind a draft that raises is left out: the
    draft may be wrong, and if it is right, the next step draws there again.

    Raise the error of `draw` if it fails for all remaining samples together, or if the device
    failed.
    """
    failed: dict[Sequence, Finish] = {}
    drawn: list[int] = []
    for seq, group in groupby(range(len(chunks.sampled)), chunks.sampled.__getitem__):
        places = list(group)
        while places:
            try:
                draw(chunks.drawing(places)).wait()
                break
            except Exception as problem:
                if is_device_failure(problem):
                    raise
                if places[-1] in chunks.behind:
                    places.pop()
                else:
                    places, failed[seq] = [], failure(seq, "the draw", problem)
        drawn += places
    left = chunks.drawing(drawn)
    return Isolated(left, draw(left), list(failed.items()))
