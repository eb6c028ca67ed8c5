"""Every cache kind against a model that knows what was written to each slot.

The model's slot holds the whole prefix that ends there and the namespace it was computed in, so a stale match, a missed
copy and a block that was freed too early all show as wrong contents.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.manager import KVCacheManager
from nano_inference.kv_cache.paged import PagedKVCache

Written = tuple[Namespace, tuple[int, ...]]  # what a slot holds: the prefix that ends there, and where it belongs

TOKENS = st.lists(st.sampled_from([7, 300]), min_size=1, max_size=14)  # few ids: prefixes meet often
SALTS = st.sampled_from([None, "", "salt"])
WEIGHT_SETS = st.sampled_from(["policy", "reference"])
PICK = st.integers(0, 2**16)


class CacheFactory(Protocol):
    def __call__(self, num_blocks: int, block_size: int) -> KVCacheManager: ...


@dataclass(eq=False)
class Table:
    """One sequence that holds blocks; all its tokens are computed."""

    tokens: list[int]
    prefix: PrefixKeys
    block_ids: list[int]
    num_published: int = 0
    publishable: bool = True
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def namespace(self) -> Namespace:
        return self.prefix.namespace


class CacheMachine(RuleBasedStateMachine):
    factory: ClassVar[CacheFactory]
    # Whether the cache promises which block is reused next, and that what is published first stays the one to match.
    exact: ClassVar[bool] = True

    @initialize(num_blocks=st.integers(2, 12), block_size=st.integers(1, 4))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.cache = type(self).factory(num_blocks, block_size)
        self.size = block_size
        self.tables: list[Table] = []
        self.versions = {"policy": 0, "reference": 0}
        self.slots: dict[int, list[Written | None]] = {b: [None] * block_size for b in range(num_blocks)}
        self.named: dict[Written, int] = {}  # full prefix -> the block that ends it, while it is matchable
        self.freed_at = dict.fromkeys(range(num_blocks), 0)  # free blocks: when they became free
        self.clock = 0

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, salt=SALTS, weight_set=WEIGHT_SETS)
    def allocate(self, tokens: list[int], salt: str | None, weight_set: str) -> None:
        prefix = self._prefix(tokens, weight_set, salt)
        expected = self._expected(tokens, prefix.namespace, len(tokens) - 1)
        before = self._counts()
        fresh = self._blocks(len(tokens)) - len(expected)
        room = self.cache.num_free_blocks() - sum(before[b] == 0 for b in expected)
        if self.exact and fresh > room:
            with pytest.raises(RuntimeError, match="free"):
                self.cache.allocate(tokens, prefix=prefix)
            assert self._counts() == before
            self._touch(expected)
            return
        try:
            got = self.cache.allocate(tokens, prefix=prefix)
        except RuntimeError:
            assert not self.exact
            assert self._counts() == before
            return
        cached = got.cached_length // self.size
        assert len(got.block_ids) == self._blocks(len(tokens))
        assert got.cached_length <= len(tokens) - 1
        self._check_match(tokens, prefix.namespace, got.block_ids[:cached], expected)
        self._take(got.block_ids[cached:], held=got.block_ids[:cached])
        self._open(tokens, prefix, list(got.block_ids), got.cached_length)

    @rule(tokens=TOKENS, salt=SALTS, weight_set=WEIGHT_SETS, limit=PICK, chunk=st.integers(1, 14))
    def admit(self, tokens: list[int], salt: str | None, weight_set: str, limit: int, chunk: int) -> None:
        """As the loop does it: match, adopt, then extend by a first chunk."""
        prefix = self._prefix(tokens, weight_set, salt)
        limit = limit % len(tokens)
        found = self._match(tokens, prefix, limit)
        end = min(len(tokens), len(found) * self.size + chunk)
        counts = self._counts()
        if self._blocks(end) - len(found) > self.cache.num_free_blocks() - sum(counts[b] == 0 for b in found):
            return
        self.cache.adopt(found)
        block_ids = list(found)
        assert self.cache.extend(block_ids, len(found) * self.size, end) == ()
        assert block_ids[: len(found)] == list(found), "a full block was exchanged"
        self._take(block_ids[len(found) :], held=found)
        self._open(tokens[:end], self._prefix(tokens[:end], weight_set, salt), block_ids, len(found) * self.size)

    @rule(tokens=TOKENS, salt=SALTS, weight_set=WEIGHT_SETS, age=st.integers(0, 2), limit=PICK)
    def match(self, tokens: list[int], salt: str | None, weight_set: str, age: int, limit: int) -> None:
        """Ask only, also for versions that are dead."""
        version = max(0, self.versions[weight_set] - age)
        prefix = self._prefix(tokens, weight_set, salt, version)
        before = self._counts()
        self._match(tokens, prefix, limit % (len(tokens) + 3))
        assert self._counts() == before, "asking changed the cache"

    @precondition(lambda self: self.tables)
    @rule(picks=st.lists(PICK, min_size=1, max_size=3), tokens=TOKENS)
    def extend(self, picks: list[int], tokens: list[int]) -> None:
        """One step: several tables grow, then the copies run, then the new tokens are written."""
        chosen = list(dict.fromkeys(pick % len(self.tables) for pick in picks))
        steps: list[tuple[Table, int]] = []
        copies: list[tuple[int, int]] = []
        for place in chosen:
            table = self.tables[place]
            start = len(table.tokens)
            end = start + len(tokens)
            shared = start % self.size > 0 and self._counts()[table.block_ids[start // self.size]] > 1
            need = self._blocks(end) - len(table.block_ids) + shared
            if need > self.cache.num_free_blocks():
                continue
            before = list(table.block_ids)
            made = self.cache.extend(table.block_ids, start, end)
            assert len(made) == shared, "a shared block must be copied, and only that"
            fresh = [target for _, target in made] + table.block_ids[len(before) :]
            for source, target in made:
                assert before[start // self.size] == source
                assert table.block_ids[start // self.size] == target
            self._take(fresh)
            copies += made
            steps.append((table, start))
            table.tokens += tokens
            table.prefix.extend(table.tokens, self.size)
        assert not {s for s, _ in copies} & {t for _, t in copies}, "copies depend on each other"
        for target, held in [(target, list(self.slots[source])) for source, target in copies]:
            self.slots[target] = held
        for table, start in steps:
            self._write(table, start)

    @precondition(lambda self: self.tables)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        parent = self.tables[pick % len(self.tables)]
        self.cache.adopt(parent.block_ids)
        self.tables.append(
            Table(
                list(parent.tokens),
                parent.prefix.copy(),
                list(parent.block_ids),
                parent.num_published,
                parent.publishable,
            )
        )

    @precondition(lambda self: self.tables)
    @rule(pick=PICK)
    def publish(self, pick: int) -> None:
        table = self.tables[pick % len(self.tables)]
        full = len(table.tokens) // self.size
        if not table.publishable:
            return
        fresh = range(table.num_published, full)
        self.cache.publish(table.block_ids, table.tokens, table.prefix, fresh)
        table.num_published = full
        for index in fresh:
            name = table.namespace, tuple(table.tokens[: (index + 1) * self.size])
            if table.block_ids[index] not in self.named.values():
                self.named.setdefault(name, table.block_ids[index])

    @precondition(lambda self: self.tables)
    @rule(pick=PICK)
    def deallocate(self, pick: int) -> None:
        table = self.tables.pop(pick % len(self.tables))
        self.cache.deallocate(table.block_ids)
        self._touch(table.block_ids)

    @rule(weight_set=WEIGHT_SETS)
    def drop_version(self, weight_set: str) -> None:
        version = self.versions[weight_set]
        dead = {n: b for n, b in self.named.items() if (n[0].weight_set, n[0].version) == (weight_set, version)}
        before = self._counts()
        self.cache.drop_version(weight_set, version)
        assert self._counts() == before, "a block in use was given up"
        self.versions[weight_set] += 1
        for name in dead:
            del self.named[name]
        for table in self.tables:
            if (table.namespace.weight_set, table.namespace.version) == (weight_set, version):
                table.publishable = False

    @rule()
    def flush(self) -> None:
        before = self._counts()
        self.cache.flush()
        assert self._counts() == before, "a block in use was given up"
        self.named.clear()

    # -- what must always hold -----------------------------------------------------------------------------------------

    @invariant()
    def invariants_of_the_cache(self) -> None:
        self.cache.check(table.block_ids for table in self.tables)
        held = {block_id for table in self.tables for block_id in table.block_ids}
        assert self.cache.num_free_blocks() == self.cache.num_blocks - len(held)

    @invariant()
    def every_table_reads_its_own_prefix(self) -> None:
        for table in self.tables:
            for position in range(len(table.tokens)):
                block_id = table.block_ids[position // self.size]
                written = self.slots[block_id][position % self.size]
                assert written == (table.namespace, tuple(table.tokens[: position + 1]))

    @invariant()
    def reference_counts_are_the_tables(self) -> None:
        counts = Counter(block_id for table in self.tables for block_id in table.block_ids)
        for block_id in range(self.cache.num_blocks):
            assert self.cache.ref_count(block_id) == counts[block_id]

    @invariant()
    def what_is_free_and_not_reused_still_matches(self) -> None:
        for (namespace, tokens), block_id in self.named.items():
            expected = self._expected(tokens, namespace, len(tokens))
            if len(expected) * self.size == len(tokens):  # every block before it is still there too
                prefix = PrefixKeys(namespace)
                prefix.extend(tokens, self.size)
                found = self._match(tokens, prefix, len(tokens))
                assert not self.exact or found[-1] == block_id

    # -- the model ---------------------------------------------------------------------------------------------------

    def _prefix(self, tokens: list[int], weight_set: str, salt: str | None, version: int | None = None) -> PrefixKeys:
        prefix = PrefixKeys(Namespace(weight_set, self.versions[weight_set] if version is None else version, salt))
        prefix.extend(tokens, self.size)
        return prefix

    def _match(self, tokens: list[int] | tuple[int, ...], prefix: PrefixKeys, limit: int) -> tuple[int, ...]:
        got = self.cache.match(tokens, prefix, limit)
        assert got.cached_length == len(got.block_ids) * self.size
        assert got.cached_length <= limit
        expected = self._expected(tokens, prefix.namespace, limit)
        self._check_match(tokens, prefix.namespace, got.block_ids, expected)
        return got.block_ids

    def _check_match(
        self, tokens: list[int] | tuple[int, ...], namespace: Namespace, found: tuple[int, ...], expected: list[int]
    ) -> None:
        for position in range(len(found) * self.size):
            written = self.slots[found[position // self.size]][position % self.size]
            assert written == (namespace, tuple(tokens[: position + 1])), "a block matched that holds something else"
        if self.exact:
            assert list(found) == expected
        else:
            assert len(found) >= len(expected)

    def _expected(self, tokens: list[int] | tuple[int, ...], namespace: Namespace, limit: int) -> list[int]:
        found: list[int] = []
        for end in range(self.size, min(limit, len(tokens)) + 1, self.size):
            block_id = self.named.get((namespace, tuple(tokens[:end])))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _open(self, tokens: list[int], prefix: PrefixKeys, block_ids: list[int], cached: int) -> None:
        table = Table(list(tokens), prefix, block_ids, num_published=cached // self.size)
        self.tables.append(table)
        self._write(table, cached)

    def _write(self, table: Table, start: int) -> None:
        matchable = set(self.named.values())
        for position in range(start, len(table.tokens)):
            block_id = table.block_ids[position // self.size]
            assert block_id not in matchable, "a block that others may match was written to"
            assert self.cache.ref_count(block_id) == 1, "a shared block was written to"
            self.slots[block_id][position % self.size] = table.namespace, tuple(table.tokens[: position + 1])

    def _take(self, fresh: list[int] | tuple[int, ...], held: tuple[int, ...] = ()) -> None:
        """Blocks that were just taken: unnamed ones first, then the longest unused. They hold nothing any more."""
        for block_id in held:
            self.freed_at.pop(block_id, None)
        for block_id in fresh:
            assert block_id in self.freed_at, "a block in use was handed out"
            matchable = set(self.named.values())
            nameless = self.freed_at.keys() - matchable
            if self.exact and nameless:
                assert block_id in nameless, "a matchable block was reused before an empty one"
            elif self.exact:
                assert self.freed_at[block_id] == min(self.freed_at.values()), "not the longest unused block"
            del self.freed_at[block_id]
            self.named = {name: b for name, b in self.named.items() if b != block_id}
            self.slots[block_id] = [None] * self.size

    def _touch(self, block_ids: list[int]) -> None:
        """Blocks whose holder is gone: free ones are the most recently used now, heads of prefixes last."""
        for block_id in reversed(block_ids):
            if self.cache.ref_count(block_id) == 0:
                self.clock += 1
                self.freed_at[block_id] = self.clock

    def _counts(self) -> dict[int, int]:
        return {block_id: self.cache.ref_count(block_id) for block_id in range(self.cache.num_blocks)}

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)


class PagedMachine(CacheMachine):
    factory = PagedKVCache


@pytest.mark.parametrize("machine", [PagedMachine])
def test_every_history_leaves_the_cache_right(machine: type[CacheMachine]) -> None:
    few = settings(
        max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(machine, settings=few)


@pytest.fixture(params=[PagedKVCache])
def factory(request: pytest.FixtureRequest) -> CacheFactory:
    return request.param


def publish_all(cache: KVCacheManager, tokens: list[int], prefix: PrefixKeys) -> list[int]:
    table = list(cache.allocate(tokens, prefix=prefix).block_ids)
    cache.publish(table, tokens, prefix, range(len(tokens) // cache.block_size))
    return table


def keys(tokens: list[int], block_size: int, namespace: Namespace | None = None) -> PrefixKeys:
    prefix = PrefixKeys(namespace or Namespace())
    prefix.extend(tokens, block_size)
    return prefix


def test_a_match_leaves_one_token_to_compute(factory: CacheFactory) -> None:
    cache = factory(num_blocks=8, block_size=2)
    tokens = [1, 2, 3, 4]
    publish_all(cache, tokens, keys(tokens, 2))
    assert cache.allocate(tokens).cached_length == 2
    assert cache.match(tokens, keys(tokens, 2), 3).cached_length == 2
    assert cache.match(tokens, keys(tokens, 2), 4).cached_length == 4


def test_allocate_names_the_tokens_itself_where_no_prefix_is_given(factory: CacheFactory) -> None:
    cache = factory(num_blocks=8, block_size=2)
    tokens = [1000, 2, 3]
    publish_all(cache, tokens, keys(tokens, 2))
    again = cache.allocate(tokens)
    assert again.cached_length == 2
    assert len(again.block_ids) == 2


def test_a_flush_frees_no_block_in_use(factory: CacheFactory) -> None:
    cache = factory(num_blocks=4, block_size=2)
    tokens = [1, 2, 3, 4]
    table = publish_all(cache, tokens, keys(tokens, 2))
    cache.flush()
    assert cache.num_free_blocks() == 2
    assert all(cache.ref_count(block_id) == 1 for block_id in table)
    assert cache.match(tokens, keys(tokens, 2), 4).block_ids == ()
    assert not set(cache.allocate([5, 6, 7, 8]).block_ids) & set(table)


def test_a_dead_version_is_reused_before_a_live_one(factory: CacheFactory) -> None:
    cache = factory(num_blocks=4, block_size=2)
    dead, live = Namespace(version=0), Namespace(weight_set="reference")
    old = publish_all(cache, [1, 2, 3, 4], keys([1, 2, 3, 4], 2, dead))
    kept = publish_all(cache, [1, 2, 3, 4], keys([1, 2, 3, 4], 2, live))
    cache.deallocate(kept)  # longer unused than the dead ones
    cache.deallocate(old)
    cache.drop_version("policy", 0)
    assert set(cache.allocate([9, 9, 9, 9]).block_ids) == set(old)
    assert cache.match([1, 2, 3, 4], keys([1, 2, 3, 4], 2, live), 4).cached_length == 4


def test_sizes_must_be_positive(factory: CacheFactory) -> None:
    for num_blocks, block_size in [(0, 4), (4, 0), (-1, 4)]:
        with pytest.raises(ValueError, match="positive"):
            factory(num_blocks=num_blocks, block_size=block_size)
