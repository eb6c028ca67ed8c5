"""The step: decide, apply, launch, retire. One loop for the synchronous and the overlapped
engine.
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
from nano_inference.core.interfaces import Drafting, Pending, Returning, Runner
from nano_inference.core.lifecycle import Event, Lifecycle, after
from nano_inference.core.reference_logprobs import ReferenceLogprobs
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
from nano_inference.types import GROUP_COMPLETE, Delta, KvPolicy, TrainingSample

logger = logging.getLogger("nano_inference")

ABORTED = Finish("abort")
NOT_WANTED = Finish("abort", GROUP_COMPLETE)
# of a step, as `StepClock` times them
PHASES = ("handle", "schedule", "apply", "build", "forward", "wait", "commit", "sample")
_LOOKED_UP = 16  # newcomers whose blocks are looked for in files
_FINISHED = SequenceStatus.FINISHED  # finding a member of an enum takes 0.1 µs


@dataclass(frozen=True, slots=True)
class Add:
    """A new sequence."""

    sequence: Sequence
    posted: float = field(default_factory=perf_counter, compare=False)


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests (None: all) with what they have."""

    request_ids: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class UpdateQueued:
    """An update of the policy's weights was queued: requests that are posted later come after
    it.
    """

    update: Update


@dataclass(frozen=True, slots=True)
class UpdatesGivenUp:
    """Updates left the queue without being written."""


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a held sequence is compiled, or has failed."""

    sequence: Sequence


Message = Add | Abort | UpdateQueued | UpdatesGivenUp | GrammarReady


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and not retired."""

    sampled: tuple[Sequence, ...]  # whose the samples are, in their order
    behind: Drafts  # of samples drawn behind drafts: their place, and these drafts
    scored: tuple[Scored, ...]  # in the order of the scores
    tokens: Pending


OnFinish = Callable[[Sequence, list[TrainingSample]], list[TrainingSample]]
Watch = Callable[[Chunks, Listed[ForwardBatch[Any]], Any], None]


def _no_grammars(seq: Sequence) -> None:
    raise RuntimeError("this loop compiles no grammars.")


@dataclass(frozen=True, slots=True)
class LoopHooks:
    """The parts of an engine that its loop calls.

    Attributes:
        gate: what other engines decide.
        weights: the policy's weights, and the updates that wait.
        start_grammar: gets a new sequence its matcher, or posts `GrammarReady` when that is there.
        drafter: guesses what steps will draw; None: nothing does.
        kept_files: blocks that were evicted although they are kept; None: they are lost.
        watches: called with every step that was launched, before its draw.
        on_finish: called in this order with each sequence that finishes, not with one that is
            aborted, before the loop's own hooks.
    """

    gate: Gate = field(default_factory=Gate)
    weights: Weights = field(default_factory=FixedWeights)
    start_grammar: Callable[[Sequence], None] = _no_grammars
    drafter: Drafting | None = None
    kept_files: Returning | None = None
    watches: tuple[Watch, ...] = ()
    on_finish: tuple[OnFinish, ...] = ()


class SampleGroups:
    """Counts the finished samples of requests of which only some are wanted."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._complete: set[int] = set()

    def __call__(self, seq: Sequence, samples: list[TrainingSample]) -> list[TrainingSample]:
        """An `OnFinish` hook."""
        group = seq.request.group
        if group is not None:
            group.num_left -= 1
            if group.num_left <= 0:
                self._complete.add(seq.request_id)
        return samples

    def not_wanted(self) -> list[Sequence]:
        """Sequences of groups that are complete; not those that score finished samples."""
        if not self._complete:
            return []
        complete, self._complete = frozenset(self._complete), set()
        rest = self._sequences.of_requests(complete)
        return [seq for seq in rest if seq.request.scored_sample is None]


class EngineLoop:
    """Sequences, their cache and the steps in flight. Not thread-safe, except that anyone may
    append to `inbox`.

    Args:
        cache: the KV cache.
        runner: the device.
        config: limits of a step.
        lookahead: steps that may be in flight while another is launched.
        numerics: fingerprint that samples carry.
        hooks: the parts of an engine that it calls; None: there are none.
        sequences: an empty list of sequences that others know too; None: a new one.
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
        self.start_grammar = hooks.start_grammar
        self._compiling: set[int] = set()  # sequences of which no `GrammarReady` has come yet
        self.drafter, self.kept_files = hooks.drafter, hooks.kept_files
        self.watches = hooks.watches
        self.groups = SampleGroups(self.sequences)
        # The drafter's hook comes first: `ReferenceLogprobs` keeps back samples that it scores.
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
        self.num_leaked_blocks = 0  # when it was last without a sequence
        self.clock = StepClock()
        # samples that ended and were not taken yet; those of a step that failed stay here
        self.finished: list[TrainingSample] = []
        self.streamed: list[Delta] = []  # tokens of streaming sequences that were not taken yet
        # (request id, seconds) of those that left the queue: the same
        self.queue_times: list[tuple[int, float]] = []

    def has_pending(self) -> bool:
        """Whether a step would do anything: not for sequences that are held or, while it is paused,
        any.
        """
        if self.inbox or self.in_flight or self._due_update() is not None:
            return True
        return self.gate.is_due() or (self.life.launching and self.is_busy())

    def is_compiling(self) -> bool:
        """Whether a sequence waits for its grammar."""
        return not self._compiling.isdisjoint(self.sequences.by_id)

    def is_busy(self) -> bool:
        """Whether anything runs or waits to run."""
        return bool(self.sequences.running or self.sequences.waiting or self.in_flight)

    def step(self) -> list[TrainingSample]:
        """Plan a step, launch it, and retire older steps while the device works. Returns what
        finished.
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
            self._accompany()  # until the oldest is back, whose sequences can go on
            self._retire(keep=len(self.in_flight) - 1)
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
        # the last step's tokens are known before this one is drawn
        self._retire(keep=self.lookahead - 1)
        tokens, chunks = self._draw_or_end(result, chunks)
        lap("sample")
        scored = tuple(scored for batch in batches for scored in batch.scored)
        self.in_flight.append(Flight(tuple(chunks.sampled), chunks.behind, scored, tokens))
        self._retire(keep=self.lookahead)
        return self.take()

    def _decide(self) -> tuple[SchedulerOutput, Applied]:
        """Decide who computes what, and apply it to sequences and cache."""
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
        self._count_admitted(decision)  # before a group is forked
        applied = apply(decision, live, self.cache)  # also a decision that only preempts
        lap("apply")
        return decision, applied

    def _draw_or_end(self, result: Any, chunks: Chunks) -> tuple[Pending, Chunks]:
        """Draw a step's samples. End those that fail, and return the chunks of the others."""
        try:
            return self._draw(result, chunks), chunks
        except Exception as problem:  # one sample's, maybe
            if is_device_failure(problem):
                raise
            chunks, tokens, failed = draw_without_the_failing(
                lambda some: self._draw(result, some), chunks
            )
            for seq, finish in failed:
                if seq.status is not _FINISHED:  # its last token may have come meanwhile
                    self._end([seq], finish)
            return tokens, chunks

    def take(self) -> list[TrainingSample]:
        """Return the samples that ended and were not taken yet."""
        taken, self.finished = self.finished, []
        return taken

    def _bring_back(self, files: Returning) -> None:
        """Restore blocks from files for the sequences that this step will admit. Blocks of later
        sequences would be evicted again before their turn.
        """
        if self._first_in_files(files, ()) is None:
            return
        self._retire(keep=0)  # what is in flight may still read what is free
        tried: set[int] = set()
        tables: list[list[int]] = []
        while (found := self._first_in_files(files, tried)) is not None:
            seq, places = found
            tried.add(seq.seq_id)
            # held until all are there: one's blocks must not be evicted for another's
            tables.append(files.bring_back(seq.token_ids, seq.prefix, places))
        for table in tables:
            self.cache.deallocate(table)

    def _first_in_files(
        self, files: Returning, tried: Container[int]
    ) -> tuple[Sequence, range] | None:
        """The first newcomer that would be admitted now and begins with blocks in files, and
        their places; not one of `tried`.
        """
        newcomers = self.sequences.waiting[:_LOOKED_UP]
        found: dict[int, tuple[Sequence, range]] = {}
        for seq in newcomers:
            most = seq.num_matchable // self.config.block_size
            places = files.missing(seq.prefix.hashes[:most])
            if places and seq.seq_id not in tried:
                found[seq.seq_id] = seq, places
        if not found:
            return None
        # a newcomer needs as much memory for blocks that come back as for those it computes
        running, pending = self.sequences.running, self._pending()
        plan = schedule(newcomers, running, self.cache, self.config, pending, len(self.in_flight))
        admitted = (each.seq_id for each in plan.admitted)
        return next((found[seq_id] for seq_id in admitted if seq_id in found), None)

    def _accompany(self) -> None:
        """Compute nothing, where other engines may be computing."""
        if self.gate.is_due():
            self.runner.idle()

    def _draw(self, result: Any, chunks: Chunks) -> Pending:
        masks = self.batches.masks(chunks)
        sampling = self.batches.sampling_batch(chunks, masks)
        self.clock.lap("build")
        self.runner.announce_draw(chunks, masks)
        pending = self.runner.sample(result, sampling)
        # at once: what it raises may be one sample's too
        return pending if self.lookahead else Known(pending.wait())

    def handle(self) -> list[TrainingSample]:
        """Take in the messages. Part of every step; callable between steps."""
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
        """Call `write` with nothing in flight, past all updates that wait. It returns a new
        version, or None.
        """
        self._retire(keep=0)
        version = write()
        if version is not None:
            change_version(self.sequences, self.cache, weight_set, version)
        return self.take()

    def change_adapter(self, adapter: ServedAdapter, kv_policy: KvPolicy) -> list[TrainingSample]:
        """From now on an adapter, or a new version of it, computes the requests of its name."""
        self._retire(keep=0)
        if kv_policy == "abort":  # what only scores is scored again
            begun_with = of_adapter(self.sequences, adapter.name)
            self._end([seq for seq in begun_with if seq.num_samples])
        change_adapter(self.sequences, self.cache, adapter, kv_policy)
        return self.take()

    def watch(self, watch: Watch) -> None:
        """Call `watch` with every step from now on, as `LoopHooks.watches`. Between two steps."""
        self.watches = (*self.watches, watch)

    def unwatch(self, watch: Watch) -> None:
        """Call it no more. Between two steps."""
        self.watches = tuple(each for each in self.watches if each is not watch)

    def become(self, event: Event) -> None:
        """Change the lifecycle. Requests that were held enter once it admits them again."""
        before, self.life = self.life, after(self.life, event)
        if self.life.admitting and not before.admitting:
            release_held(self.sequences)

    def vacate(self) -> None:
        """Take all blocks away from sequences, which will compute their context again, and forget
        all prefixes.

        Nothing may be in flight.
        """
        for seq in list(self.sequences.running):
            preempt(seq, self.sequences, self.cache)
        self.cache.flush()

    def leaked_blocks(self) -> int:
        """Blocks in use that no live sequence holds: 0, or a bug. Free of cost while there is no
        sequence.
        """
        in_use = self.cache.num_blocks - self.cache.num_free_blocks()
        return in_use - len(
            {block_id for table in self.sequences.block_tables() for block_id in table}
        )

    def audit(self) -> None:
        """Look for leaked blocks, where there is no sequence."""
        if not self.sequences.by_id:
            leaked = self.leaked_blocks()
            if leaked > self.num_leaked_blocks:
                logger.error(
                    "%d KV blocks have no holder: a bug of the engine. They are lost to it.",
                    leaked,
                )
            self.num_leaked_blocks = leaked

    def check(self) -> None:
        """Assert the invariants of cache and sequences. For tests and debugging."""
        live, layout = self.sequences.by_id.values(), self.cache.layout
        slid = [layout.num_slid(seq.num_computed_tokens, self.cache.block_size) for seq in live]
        self.cache.check(self.sequences.block_tables(), slid)
        for seq in live:
            assert seq.num_computed_tokens <= len(seq.token_ids), "a draft counts as computed"
        for seq in [*self.sequences.waiting, *self.sequences.held]:
            assert not seq.block_ids, "a waiting sequence holds blocks"
            assert not seq.num_computed_tokens, "a waiting sequence has computed tokens"

    def _retire(self, keep: int) -> None:
        """Wait for the oldest steps until at most `keep` are in flight, and take in their
        tokens.
        """
        while len(self.in_flight) > max(keep, 0):
            flight = self.in_flight.popleft()
            tokens = flight.tokens.wait()
            self.clock.lap("wait")
            self.finished += commit_scores(flight.scored, tokens, self.sequences, self.cache)
            live = [seq for seq in flight.sampled if seq.status is not _FINISHED]
            if flight.behind:
                live = list(dict.fromkeys(live))
            self.num_completion_tokens += len(live)
            # Length before: a sample whose logits were not finite ends without another token.
            streaming = [(seq, len(seq.token_ids)) for seq in live if seq.request.streaming]
            ends = commit(flight.sampled, tokens, self.sequences, self.cache, flight.behind)
            if self.drafter is not None:
                pairs = flight.behind.items()  # of a sequence the last has all
                drafts = {flight.sampled[place].seq_id: each for place, each in pairs}
                self.num_completion_tokens += self.drafter.learn(live, drafts)
            for seq, before in streaming:
                ends += self._stream(seq, before)
            for seq, finish in dict(ends).items():  # of two the later one
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
        # else the update would wait for ever
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
        """A sequence's grammar is ready: let it go on, or end where it has failed."""
        self._compiling.discard(seq.seq_id)
        if seq.status is _FINISHED:
            return
        if seq.grammar is not None and seq.grammar.problem is not None:
            self._end([seq], grammar_failure(seq.grammar.problem))
        elif self.life.admitting:
            release_held(self.sequences)

    def would_wait(self, kv_policy: KvPolicy) -> bool:
        """Whether an update with this `kv_policy` would have to wait, for requests or for an
        earlier update that waits.
        """
        queued = map(policy_of, self.weights.pending.arrived())
        return not all(map(self._is_ready, [*queued, kv_policy]))

    def ready_update(self) -> Update | None:
        """Return the oldest update, if nothing here keeps it waiting."""
        arrived = self.weights.pending.arrived()
        return arrived[0] if arrived and self._is_ready(policy_of(arrived[0])) else None

    def _due_update(self) -> Update | None:
        """Return the oldest update, if neither this engine nor another keeps it waiting."""
        update = self.ready_update()
        return update if update is not None and self.gate.allows(update.version) else None

    def _is_ready(self, kv_policy: KvPolicy) -> bool:
        """Whether nothing here keeps an update of this policy waiting."""
        if not self.life.has_weights:
            return False
        if kv_policy == "wait":
            live = self.sequences.of_weight_set(POLICY)
            return all(seq.status is SequenceStatus.HELD for seq in live)
        return kv_policy != "finish_old" or not self.sequences.of_weight_set(PREVIOUS)

    def _change_weights(self) -> None:
        """Apply the updates that need not wait any more, in order."""
        while (update := self._due_update()) is not None:
            kv_policy = policy_of(update)
            self._retire(keep=0)  # weights change only with nothing in flight
            if kv_policy == "abort":  # what only scores is scored again
                self._end(
                    [seq for seq in begun(self.sequences, POLICY, PREVIOUS) if seq.num_samples]
                )
            version = self.weights.apply(update, keep_old=self._keeps_old(kv_policy))
            if version is not None:
                change_version(self.sequences, self.cache, POLICY, version, kv_policy)
                self._end_outdated()
            self._release_behind()

    def _release_behind(self) -> None:
        """Release the requests that were held for an update which has left the queue."""
        coming = {update.version for update in self.weights.pending.arrived()}
        for seq in self.sequences.held:
            if seq.behind not in coming:
                seq.behind = None
        if self.life.admitting:
            release_held(self.sequences)

    def _keeps_old(self, kv_policy: KvPolicy) -> bool:
        """Whether a sequence will finish on weights that an update overwrites."""
        if kv_policy == "finish_old" and begun(self.sequences, POLICY):
            return True
        return PREVIOUS in self.sequences.versions

    def _end(self, sequences: list[Sequence], finish: Finish = ABORTED) -> None:
        """End sequences with what they have."""
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
        """Hand on a streaming sequence's tokens from place `before` on, and its text. Returns it if
        that ends it.
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
            if of_policy:
                self.num_prompt_tokens += seq.request.num_prompt_tokens if is_new else 0
                self.num_queried_tokens += (
                    len(seq.token_ids) if self.config.enable_prefix_caching else 0
                )
                self.num_cached_tokens += admission.cached.cached_length

    def _leave_queue(self, seq: Sequence) -> None:
        if seq.posted is not None:  # not one that comes back after a preemption
            seq.queued, seq.posted = perf_counter() - seq.posted, None
            self.queue_times.append((seq.request_id, seq.queued))

    def _samples(self, seq: Sequence, finish: Finish) -> list[TrainingSample]:
        return training_samples(seq, finish, self.sequences.versions[seq.weight_set], self.numerics)

    def _pending(self) -> Counter[int]:
        """Tokens being sampled that are not known here yet: derived from the flights, so it cannot
        drift.
        """
        return Counter([seq.seq_id for flight in self.in_flight for seq in flight.sampled])

    def _sampling_now(self) -> dict[int, int]:
        """Sequence id -> its place in the samples of the newest step in flight."""
        if not self.in_flight:
            return {}
        return {seq.seq_id: row for row, seq in enumerate(self.in_flight[-1].sampled)}

    def _newest_tokens(self) -> Pending | None:
        return self.in_flight[-1].tokens if self.in_flight else None


class StepClock:
    """Sums the time between laps, by the phase that ended there. A lap costs about 0.2 µs."""

    def __init__(self) -> None:
        self.nanoseconds: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._last = 0

    def start(self) -> None:
        """A step begins, or what is done between two of them."""
        self._last = perf_counter_ns()

    def lap(self, phase: str) -> None:
        """What ran since the last lap was this phase."""
        now = perf_counter_ns()
        self.nanoseconds[phase] += now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """Time in steps."""
        return sum(self.nanoseconds.values()) / 1e9

    def microseconds(self, num_steps: int) -> dict[str, float]:
        """Mean over steps, by phase."""
        return {phase: spent / 1e3 / max(num_steps, 1) for phase, spent in self.nanoseconds.items()}


class Known(NamedTuple):
    """Samples that are on the host already, where others would be on their way."""

    tokens: SampledTokens

    def wait(self) -> SampledTokens:
        """They."""
        return self.tokens


class Isolated(NamedTuple):
    """A draw without those who made it fail."""

    chunks: Chunks  # of the step, with the samples that are left
    tokens: Any  # theirs
    failed: list[tuple[Sequence, Finish]]  # the others, and how they end


def draw_without_the_failing(draw: Callable[[Chunks], Any], chunks: Chunks) -> Isolated:
    """Draw a step's samples after `draw` of all of them has raised.

    A draw does not depend on its neighbours, so the samples that are left have the bits that they
    would have had. Raises what `draw` raises of these, and what is the device's: that is no one
    sample's.
    """
    failed: dict[Sequence, Finish] = {}
    for seq, places in groupby(range(len(chunks.sampled)), chunks.sampled.__getitem__):
        try:
            draw(chunks.drawing(list(places))).wait()
        except Exception as problem:
            if is_device_failure(problem):
                raise
            failed[seq] = failure(seq, "the draw", problem)
    left = chunks.drawing([i for i, seq in enumerate(chunks.sampled) if seq not in failed])
    return Isolated(left, draw(left), list(failed.items()))
