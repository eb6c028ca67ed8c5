"""The step: decide, apply, launch, retire. One loop for the synchronous and the overlapped engine."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from nano_inference.batch import ForwardBatch, build_batches, build_sampling
from nano_inference.config import SchedulerConfig
from nano_inference.kv_cache.manager import KVCacheManager
from nano_inference.sampling.sample import SamplingBatch
from nano_inference.scheduling.commit import (
    Applied,
    SampledTokens,
    apply,
    change_version,
    commit,
    retire,
    training_samples,
)
from nano_inference.scheduling.schedule import schedule
from nano_inference.scheduling.sequence import Sequence, Sequences, SequenceStatus
from nano_inference.scheduling.stopping import Finish
from nano_inference.types import TrainingSample


class Pending(Protocol):
    """Samples that a step in flight is drawing."""

    def wait(self) -> SampledTokens:
        """Wait for them."""
        ...


class Runner(Protocol):
    """What the loop needs of a device."""

    def forward(
        self, batches: tuple[ForwardBatch, ...], block_copies: tuple[tuple[int, int], ...], previous: Any
    ) -> Any:
        """Launch a forward; returns logits."""
        ...

    def sample(self, logits: Any, batch: SamplingBatch) -> Pending:
        """Launch the draw."""
        ...


@dataclass(frozen=True, slots=True)
class Add:
    """A new sequence."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests (None: all) with what they have."""

    request_ids: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class ChangeWeights:
    """Call `write` when nothing is in flight; it returns the new version of `weight_set`, or None if it failed."""

    weight_set: str
    write: Callable[[], int | None]
    recompute: bool


Message = Add | Abort | ChangeWeights


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and not retired."""

    sampled: tuple[tuple[Sequence, int], ...]  # (sequence, position of its token), in the order of the samples
    tokens: Pending


class EngineLoop:
    """Sequences, their cache and the steps in flight. Not thread-safe, except that anyone may append to `inbox`."""

    def __init__(
        self, cache: KVCacheManager, runner: Runner, config: SchedulerConfig, lookahead: int, numerics: str
    ) -> None:
        self.cache = cache
        self.runner = runner
        self.config = config
        self.lookahead = lookahead
        self.numerics = numerics
        self.sequences = Sequences()
        self.in_flight: deque[Flight] = deque()
        self.inbox: deque[Message] = deque()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0

    def has_pending(self) -> bool:
        """Whether anything waits, runs or is in flight."""
        return bool(self.inbox or self.sequences.by_id or self.in_flight)

    def step(self) -> list[TrainingSample]:
        """Plan a step, launch it, and retire older steps while the device works. Returns what finished."""
        finished = self.handle()
        live, pending = self.sequences, self._pending()
        decision = schedule(live.waiting, live.running, self.cache, self.config, pending)
        self.num_preemptions += len(decision.preempted_seqs)
        applied = apply(decision, live, self.cache, self.num_steps)  # also a decision that only preempts
        if not decision.seq_ids:
            return finished + self._retire(keep=0)
        self.num_steps += 1
        self.num_cached_tokens += sum(admission.cached.cached_length for admission in decision.admitted)
        batches = build_batches(decision, live, self.config.block_size, self._sampling_now())
        logits = self.runner.forward(batches, applied.block_copies, self._newest_tokens())
        finished += self._retire(keep=self.lookahead - 1)  # the last step's tokens are known before this one is drawn
        self.in_flight.append(self._draw(logits, applied, build_sampling(decision, list(applied.sampled), batches)))
        return finished + self._retire(keep=self.lookahead)

    def handle(self) -> list[TrainingSample]:
        """Take in the messages. Part of every step; callable between steps."""
        finished: list[TrainingSample] = []
        while self.inbox:
            match self.inbox.popleft():
                case Add(sequence):
                    sequence.prefix.namespace = self.sequences.namespace_of(sequence)
                    sequence.prefix.extend(sequence.token_ids, self.config.block_size)
                    self.sequences.insert(sequence)
                case Abort(request_ids):
                    finished += self._abort(request_ids)
                case ChangeWeights(weight_set, write, recompute):
                    finished += self._retire(keep=0)  # weights change only with nothing in flight
                    version = write()
                    if version is not None:
                        change_version(self.sequences, self.cache, weight_set, version, recompute)
        return finished

    def check(self) -> None:
        """Assert the invariants of cache and sequences. For tests and debugging."""
        self.cache.check(self.sequences.block_tables())
        for seq in self.sequences.waiting:
            assert not seq.block_ids, "a waiting sequence holds blocks"
            assert not seq.num_computed_tokens, "a waiting sequence has computed tokens"

    def _draw(self, logits: Any, applied: Applied, sampling: SamplingBatch) -> Flight:
        return Flight(applied.sampled, self.runner.sample(logits, sampling))

    def _retire(self, keep: int) -> list[TrainingSample]:
        """Wait for the oldest steps until at most `keep` are in flight, and take in their tokens."""
        samples: list[TrainingSample] = []
        while len(self.in_flight) > max(keep, 0):
            flight = self.in_flight.popleft()
            tokens = flight.tokens.wait()
            self.num_completion_tokens += sum(seq.status is not SequenceStatus.FINISHED for seq, _ in flight.sampled)
            for seq, finish in commit([seq for seq, _ in flight.sampled], tokens, self.sequences, self.cache):
                samples += self._samples(seq, finish)
        return samples

    def _abort(self, request_ids: frozenset[int] | None) -> list[TrainingSample]:
        samples: list[TrainingSample] = []
        for seq in self.sequences.of_requests(request_ids):
            retire(seq, self.sequences, self.cache)
            samples += self._samples(seq, Finish("abort"))
        return samples

    def _samples(self, seq: Sequence, finish: Finish) -> list[TrainingSample]:
        return training_samples(seq, finish, self.sequences.versions[seq.weight_set], self.numerics)

    def _pending(self) -> Counter[int]:
        """Tokens being sampled that are not known here yet: derived from the flights, so it cannot drift."""
        return Counter(seq.seq_id for flight in self.in_flight for seq, _ in flight.sampled)

    def _sampling_now(self) -> dict[int, int]:
        """Sequence id -> its place in the samples of the newest step in flight."""
        if not self.in_flight:
            return {}
        return {seq.seq_id: row for row, (seq, _) in enumerate(self.in_flight[-1].sampled)}

    def _newest_tokens(self) -> Pending | None:
        return self.in_flight[-1].tokens if self.in_flight else None
