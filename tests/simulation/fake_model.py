"""A model without tensors for the real loop: it checks every key it reads and answers at once.

A slot of its "KV cache" holds the hash of the whole prefix that ends there, and the weight set and version that wrote
it. A forward asserts that the context of every row is exactly that sequence's prefix, so a wrong block, a stale match,
a missed copy or an early reuse is caught where it happens.
"""

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nano_inference.batch import ForwardBatch
from nano_inference.sampling.noise import noise_keys
from nano_inference.sampling.sampling_batch import SamplingBatch
from nano_inference.scheduling.commit import SampledTokens
from nano_inference.scheduling.sequence import POLICY

VOCAB = 11
EOS = 0


def extend(prefix: int, token: int) -> int:
    """Hash of a prefix and one more token (FNV-like; the same in every process)."""
    return ((prefix ^ (token + 1)) * 0x100000001B3) % 2**61


def choose(prefix: int, key: tuple[int, int]) -> int:
    """The token that the fake model draws after a prefix, for a noise key."""
    return (prefix * 31 + key[0] * 17 + key[1]) % 2**31 % VOCAB


def oracle(prompt: list[int], seed: int, sample_index: int, max_tokens: int) -> list[int]:
    """What a sample must be, whatever the schedule: the prompt continued alone."""
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
    """The logprob that a weight set of the fake model gives a token after a prefix: unlike at every place."""
    return -float((extend(prefix, token) * (3 if weight_set == POLICY else 7)) % 10007)


def oracle_scores(tokens: list[int], first_row: int, weight_set: str) -> list[float]:
    """What rows from `first_row` on must score for the tokens after them."""
    prefix, scores = 0, []
    for row, token in enumerate(tokens[:-1]):
        prefix = extend(prefix, token)
        if row >= first_row:
            scores.append(score(prefix, tokens[row + 1], weight_set))
    return scores


class FakeResult(NamedTuple):
    """What a forward gives: prefix hashes for logits, and scores."""

    logits: list[int]
    scores: list[float]


@dataclass
class FakeSampled:
    """Tokens of a step in flight; `wait` hands them over."""

    tokens: list[int]
    scores: list[float] = field(default_factory=list[float])

    def wait(self) -> SampledTokens:
        zeros = [0.0] * len(self.tokens)
        return SampledTokens(self.tokens, [-1.0] * len(self.tokens), zeros, zeros, scores=self.scores)


class FakeRunner:
    """Implements the loop's `Runner`. Logits are prefix hashes."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.kv: list[tuple[int, str, int] | None] = [None] * num_slots
        self.block_size = block_size
        self.version = 0
        self.one_version_only = True  # a context may not mix weight versions (no update kept old keys and values)
        self.tokens_computed = 0
        self.prompt_tokens_computed = 0
        self.largest_step = self.most_chunks = self.longest_chunk = 0

    def forward(
        self,
        batches: tuple[ForwardBatch, ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: FakeSampled | None,
    ) -> FakeResult:
        size = self.block_size
        read = {source: self.kv[source * size : (source + 1) * size] for source, _ in block_copies}
        for source, target in block_copies:
            self.kv[target * size : (target + 1) * size] = read[source]
        results = [self._forward_one(batch, previous) for batch in batches]
        return FakeResult([x for r in results for x in r.logits], [x for r in results for x in r.scores])

    def sample(self, result: FakeResult, batch: SamplingBatch) -> FakeSampled:
        rows, keys = batch.rows.tolist(), batch.noise_keys.tolist()
        drawn = [choose(result.logits[row], (low, high)) for row, (low, high) in zip(rows, keys, strict=True)]
        return FakeSampled(drawn, result.scores)

    def _forward_one(self, batch: ForwardBatch, previous: FakeSampled | None) -> FakeResult:
        ids = batch.input_ids.tolist()
        for row, source in zip(batch.relay_rows.tolist(), batch.relay_sources.tolist(), strict=True):
            assert previous is not None
            ids[row] = previous.tokens[source]
        bounds, tables = batch.cu_seqlens_q.tolist(), batch.block_tables.numpy()
        ends: dict[int, int] = {}
        for chunk, (first, last) in enumerate(itertools.pairwise(bounds)):
            start = int(batch.positions[first])
            assert int(batch.seq_lens[chunk]) == start + last - first
            prefix = self._read_context(tables[chunk], start, batch.weight_set)
            for row in range(first, last):
                prefix = extend(prefix, ids[row])
                position = start + row - first
                slot = int(tables[chunk][position // self.block_size]) * self.block_size + position % self.block_size
                assert slot == int(batch.slot_mapping[row])
                self.kv[slot] = (prefix, batch.weight_set, self._version(batch.weight_set))
                ends[row] = prefix
        self._count(batch, bounds)
        targets = zip(batch.score_rows.tolist(), batch.score_targets.tolist(), strict=True)
        return FakeResult(
            [ends[row] for row in batch.logits_indices.tolist()],
            [score(ends[row], token, batch.weight_set) for row, token in targets],
        )

    def _version(self, weight_set: str) -> int:
        return self.version if weight_set == POLICY else 0

    def _read_context(self, table: np.ndarray, length: int, weight_set: str) -> int:
        """Walk the keys of positions [0, length): each must extend the one before it by one token."""
        prefix, versions = 0, []
        for position in range(length):
            held = self.kv[int(table[position // self.block_size]) * self.block_size + position % self.block_size]
            assert held is not None, "a key was read that nobody wrote"
            assert any(extend(prefix, token) == held[0] for token in range(VOCAB)), "keys of another sequence"
            assert held[1] == weight_set, "keys of another weight set"
            prefix = held[0]
            versions.append(held[2])
        if self.one_version_only:
            assert set(versions) <= {self._version(weight_set)}, "keys of old weights"
        assert versions == sorted(versions), "old keys after new ones"
        return prefix

    def _count(self, batch: ForwardBatch, bounds: list[int]) -> None:
        self.tokens_computed += len(batch.input_ids)
        self.prompt_tokens_computed += batch.num_prompt_tokens if batch.weight_set == POLICY else 0
        self.largest_step = max(self.largest_step, len(batch.input_ids))
        self.most_chunks = max(self.most_chunks, len(bounds) - 1)
        self.longest_chunk = max(self.longest_chunk, *(b - a for a, b in itertools.pairwise(bounds)))
