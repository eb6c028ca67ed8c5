"""A model without tensors for the real loop: it checks every key it reads and answers immediately.

A slot of its "KV cache" holds the hash of the whole prefix that ends there, and the weight set and
version that wrote it. A forward asserts that the context of every row is exactly that sequence's
prefix. A wrong block, a stale match, a missed copy or an early reuse fails immediately. If layers
have a window, each write goes to every unit of a block and names its layers. Full layers must find
the whole context, sliding layers their window.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nano_inference.core.apply import SampledTokens
from nano_inference.core.batch import ForwardBatch
from nano_inference.core.loop import EngineLoop, UpdateQueued
from nano_inference.core.sequence import POLICY, PREVIOUS, REFERENCE
from nano_inference.core.updates import UpdateQueue
from nano_inference.kv_cache.sliding_window import NO_UNIT, UNIFORM, UnitPool
from nano_inference.sampling.columns import Arrays
from nano_inference.sampling.noise import noise_keys
from nano_inference.sampling.sampling_batch import SamplingBatch
from nano_inference.types import KvPolicy, TopLogprobs

VOCAB = 11
EOS = 0


def extend(prefix: int, token: int) -> int:
    """Return the hash of a prefix and one more token (FNV-like, the same in every process)."""
    return ((prefix ^ (token + 1)) * 0x100000001B3) % 2**61


def choose(prefix: int, key: tuple[int, int]) -> int:
    """Return the token that the fake model samples after a prefix, for a noise key."""
    return (prefix * 31 + key[0] * 17 + key[1]) % 2**31 % VOCAB


def oracle(prompt: list[int], seed: int, sample_index: int, max_tokens: int) -> list[int]:
    """Return the right tokens of a sample under any schedule: the prompt continued by itself."""
    prefix, tokens = 0, list(prompt)
    for token in prompt:
        prefix = extend(prefix, token)
    while len(tokens) - len(prompt) < max_tokens:
        low, high = noise_keys([(seed, sample_index, len(tokens))])[0]
        tokens.append(choose(prefix, (int(low), int(high))))
        prefix = extend(prefix, tokens[-1])
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def score(prefix: int, token: int, weight_set: str) -> float:
    """Return a weight set's logprob of a token after a prefix. Values differ at every position."""
    return -float((extend(prefix, token) * (7 if weight_set == REFERENCE else 3)) % 10007)


def oracle_scores(tokens: list[int], first_row: int, weight_set: str) -> list[float]:
    """Return the right scores of rows from `first_row` on for their next tokens."""
    prefix, scores = 0, []
    for row, token in enumerate(tokens[:-1]):
        prefix = extend(prefix, token)
        if row >= first_row:
            scores.append(score(prefix, tokens[row + 1], weight_set))
    return scores


def best(prefix: int, num_best: int) -> tuple[list[int], list[float]]:
    """Return the most probable tokens after a prefix and their logprobs. Values differ at every
    position, and a longer list begins with the shorter one.
    """
    return [(prefix + i) % VOCAB for i in range(num_best)], [
        -float(prefix % 10007 + i) for i in range(num_best)
    ]


def oracle_best(tokens: list[int], num_best: int) -> list[TopLogprobs]:
    """Return the right best tokens of these tokens' rows, except the last."""
    prefix, top = 0, list[TopLogprobs]()
    for token in tokens[:-1]:
        prefix = extend(prefix, token)
        top.append(TopLogprobs(*map(tuple, best(prefix, num_best))))  # pyright: ignore[reportArgumentType]
    return top


class FakeResult(NamedTuple):
    """Result of a forward pass: prefix hashes as logits, and scores."""

    logits: list[int]
    scores: list[float]
    contexts: list[list[int]]  # per logits row: version of each position up to the row
    best: list[tuple[list[int], list[float]]]


@dataclass
class FakeSampled:
    """Tokens of a step in flight, returned by `wait`."""

    tokens: list[int]
    scores: list[float] = field(default_factory=list[float])
    best: list[tuple[list[int], list[float]]] = field(
        default_factory=list[tuple[list[int], list[float]]]
    )

    def wait(self) -> SampledTokens:
        zeros = [0.0] * len(self.tokens)
        logprobs = [-1.0] * len(self.tokens)
        return SampledTokens(
            self.tokens, logprobs, zeros, zeros, scores=self.scores, score_best=self.best
        )


def _lineage(weight_set: str) -> str:
    """Map old weights to the policy: only the version distinguishes them."""
    return POLICY if weight_set == PREVIOUS else weight_set


Key = tuple[int, str, int, int]  # prefix hash, weight set, version, unit of the block


class FakeRunner:
    """Implement the loop's `Runner` on NumPy arrays. Logits are prefix hashes."""

    arrays: Arrays[Any] = Arrays[np.ndarray](lambda made: made)

    def __init__(
        self, num_slots: int, block_size: int, units: UnitPool | None = None, relays: bool = True
    ) -> None:
        self.kv: list[Key | None] = [None] * num_slots
        self.relays = relays  # False: no token is passed between pipeline stages
        self.block_size = block_size
        self.units, self.layout = units, units.layout if units is not None else UNIFORM
        self.versions = {POLICY: 0, REFERENCE: 0}
        # noise key of a sampled token -> versions in its context
        self.contexts: dict[tuple[int, int], list[int]] = {}
        # a context must not mix weight versions (no update kept old keys and values)
        self.one_version_only = True
        self.tokens_computed = self.num_dropped = 0
        self.prompt_tokens_computed = 0
        self.largest_step = self.most_chunks = self.longest_chunk = 0

    def announce(self, *_: Any) -> None:
        """Do nothing: this is the only rank."""

    announce_draw = announce

    def forward(
        self,
        batches: tuple[ForwardBatch[Any], ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: FakeSampled | None,
    ) -> FakeResult:
        size = self.block_size
        kinds = range(self.layout.num_units)
        pairs = [
            (self._unit(source, k), self._unit(target, k))
            for source, target in block_copies
            for k in kinds
        ]
        read = {source: self.kv[source * size : (source + 1) * size] for source, _ in pairs}
        for source, target in pairs:
            self.kv[target * size : (target + 1) * size] = read[source]
        results = [self._forward_one(batch, previous) for batch in batches]
        return FakeResult(
            [x for r in results for x in r.logits],
            [x for r in results for x in r.scores],
            [x for r in results for x in r.contexts],
            [x for r in results for x in r.best],
        )

    def change_policy(self) -> int:
        """Install new weights. Return their version."""
        self.versions[POLICY] += 1
        return self.versions[POLICY]

    def set_aside(self) -> None:
        self.versions.setdefault(PREVIOUS, self.versions[POLICY])

    def drop(self, weight_set: str) -> None:
        del self.versions[weight_set]
        self.num_dropped += 1

    def logits(self, result: FakeResult, rows: Any) -> Any:
        raise NotImplementedError("this model has no logits processors")

    def sample(self, result: FakeResult, batch: SamplingBatch[Any]) -> FakeSampled:
        rows, keys = batch.rows.tolist(), batch.noise_keys.tolist()
        self.contexts |= {
            (low, high): result.contexts[row] for row, (low, high) in zip(rows, keys, strict=True)
        }
        drawn = [
            choose(result.logits[row], (low, high))
            for row, (low, high) in zip(rows, keys, strict=True)
        ]
        return FakeSampled(drawn, result.scores, result.best)

    def _forward_one(self, batch: ForwardBatch[Any], previous: FakeSampled | None) -> FakeResult:
        ids = batch.input_ids.tolist()
        for row, source in zip(
            batch.relay_rows.tolist(), batch.relay_sources.tolist(), strict=True
        ):
            assert previous is not None
            assert self.relays, "a row waits for a token that is on its way"
            ids[row] = previous.tokens[source]
        bounds, tables = batch.cu_seqlens_q.tolist(), batch.block_tables
        drawn = set(batch.logits_indices.tolist())
        ends: dict[int, int] = {}
        contexts: dict[int, list[int]] = {}
        for chunk, (first, last) in enumerate(itertools.pairwise(bounds)):
            start = int(batch.positions[first])
            assert int(batch.seq_lens[chunk]) == start + last - first
            prefix, versions = self._read_context(tables[chunk], start, batch.weight_set)
            for row in range(first, last):
                prefix = extend(prefix, ids[row])
                position = start + row - first
                block = int(tables[chunk][position // self.block_size])
                assert block * self.block_size + position % self.block_size == int(
                    batch.slot_mapping[row]
                )
                for kind in range(self.layout.num_units):
                    slot = self._unit(block, kind) * self.block_size + position % self.block_size
                    self.kv[slot] = (
                        prefix,
                        _lineage(batch.weight_set),
                        self.versions[batch.weight_set],
                        kind,
                    )
                ends[row] = prefix
                if row in drawn:
                    row_versions = [self.versions[batch.weight_set]] * (row + 1 - first)
                    contexts[row] = [*versions, *row_versions]
        self._count(batch, bounds)
        targets = zip(batch.score_rows.tolist(), batch.score_targets.tolist(), strict=True)
        return FakeResult(
            [ends[row] for row in batch.logits_indices.tolist()],
            [score(ends[row], token, batch.weight_set) for row, token in targets],
            [contexts[row] for row in batch.logits_indices.tolist()],
            [best(ends[row], batch.num_best) for row in batch.best_rows.tolist()],
        )

    def _read_context(
        self, table: np.ndarray, length: int, weight_set: str
    ) -> tuple[int, list[int]]:
        """Walk the keys of positions [0, length), for window layers only those visible to row
        `length`.

        Return the hash of the prefix, and the versions that wrote it as seen by the last
        kind of layer.
        """
        prefixes, versions = {0}, list[int]()
        for kind in range(self.layout.num_units):
            sliding = kind >= self.layout.num_full
            first = max(0, length - self.layout.window + 1) if sliding else 0
            if first < length:
                prefix, versions = self._walk(table, range(first, length), weight_set, kind)
                prefixes.add(prefix)
        assert len(prefixes - {0}) <= 1, "units of one block hold different sequences"
        return max(prefixes), versions

    def _walk(
        self, table: np.ndarray, positions: range, weight_set: str, kind: int
    ) -> tuple[int, list[int]]:
        """Check that each key extends the previous key by one token, and that the first begins a
        sequence.
        """
        prefix, versions = 0, []
        for position in positions:
            block = int(table[position // self.block_size])
            held = self.kv[self._unit(block, kind) * self.block_size + position % self.block_size]
            assert held is not None, "a key was read that was never written"
            begins = position == positions.start > 0
            assert begins or any(extend(prefix, token) == held[0] for token in range(VOCAB)), (
                "keys of another sequence"
            )
            assert held[1] == _lineage(weight_set), "keys of another weight set"
            assert held[3] == kind, "keys of other layers"
            prefix = held[0]
            versions.append(held[2])
        if self.one_version_only:
            assert set(versions) <= {self.versions[weight_set]}, "keys of old weights"
        assert versions == sorted(versions), "old keys after new ones"
        return prefix, versions

    def _unit(self, block: int, kind: int) -> int:
        if self.units is None:
            return block
        unit = self.units.unit_of[kind * self.units.num_blocks + block]
        assert unit != NO_UNIT, "a block was used whose memory is gone"
        return unit

    def _count(self, batch: ForwardBatch[Any], bounds: list[int]) -> None:
        self.tokens_computed += len(batch.input_ids)
        self.prompt_tokens_computed += batch.num_prompt_tokens if batch.weight_set == POLICY else 0
        self.largest_step = max(self.largest_step, len(batch.input_ids))
        self.most_chunks = max(self.most_chunks, len(bounds) - 1)
        self.longest_chunk = max(
            self.longest_chunk, *(b - a for a, b in itertools.pairwise(bounds))
        )


@dataclass(eq=False)
class FakeUpdate:
    """New weights of the fake model."""

    version: int
    kv_policy: KvPolicy | None


class FakeWeights:
    """Implement the loop's `Weights`."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.pending: UpdateQueue[FakeUpdate] = UpdateQueue()

    def apply(self, update: FakeUpdate, *, keep_old: bool) -> int:
        self.pending.remove(update)
        if keep_old:
            self.runner.set_aside()
        version = self.runner.change_policy()
        assert version == update.version, "updates are applied in order"
        return version


def queue_update(loop: EngineLoop, version: int, kv_policy: KvPolicy | None) -> FakeUpdate:
    """Queue an update like a weight manager."""
    update = FakeUpdate(version, kv_policy)
    loop.weights.pending.append(update)
    loop.inbox.append(UpdateQueued(update))
    return update
