"""Every cache kind against a model of the contents of each slot.

A slot of the model holds the whole prefix that ends there and its namespace, so a stale match, a
missed copy or an early free shows up as wrong contents.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.manager import KVCacheManager

# content of a slot: the prefix that ends there, and its namespace
Written = tuple[Namespace, tuple[int, ...]]


def _stem_and_tail(length: int, tail: list[int]) -> list[int]:
    return [7] * length + tail or [300]


# Prefixes collide often: few ids, one stem, and most requests in one namespace.
TOKENS = st.builds(
    _stem_and_tail, st.integers(0, 12), st.lists(st.sampled_from([7, 300]), max_size=6)
)
SALTS = st.sampled_from([None, None, None, None, "", "salt"])
WEIGHT_SETS = st.sampled_from(["policy", "policy", "policy", "reference"])
PICK = st.integers(0, 2**16)
SELDOM = st.sampled_from([False, False, False, True])
OFTEN = st.sampled_from([True, True, True, False])


class CacheFactory(Protocol):
    def __call__(self, num_blocks: int, block_size: int) -> KVCacheManager: ...


@dataclass(eq=False)
class Table:
    """One sequence that holds blocks. All its tokens are computed."""

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
    """Each cache's rules for naming and reuse are `_publish`, `_next`, `_forget` and `_release` of
    the model.
    """

    factory: ClassVar[CacheFactory]

    @initialize(num_blocks=st.integers(2, 20), block_size=st.integers(1, 4))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.cache = type(self).factory(num_blocks, block_size)
        self.size = block_size
        self.tables: list[Table] = []
        self.versions = {"policy": 0, "reference": 0}
        self.slots: dict[int, list[Written | None]] = {
            b: [None] * block_size for b in range(num_blocks)
        }
        # full prefix -> its last block, while matchable
        self.named: dict[Written, int] = {}
        self.freed_at = dict.fromkeys(range(num_blocks), 0)  # free blocks: time of their release
        self.clock = 0

    # -- rules -------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, salt=SALTS, weight_set=WEIGHT_SETS, publish=OFTEN)
    def allocate(self, tokens: list[int], salt: str | None, weight_set: str, publish: bool) -> None:
        prefix = self._prefix(tokens, weight_set, salt)
        expected = self._expected(tokens, prefix.namespace, len(tokens) - 1)
        before = self._counts()
        fresh = self._blocks(len(tokens)) - len(expected)
        room = self.cache.num_free_blocks() - sum(before[b] == 0 for b in expected)
        if fresh > room:
            with pytest.raises(RuntimeError, match="free"):
                self.cache.allocate(tokens, prefix=prefix)
            assert self._counts() == before
            self._release(expected)
            return
        got = self.cache.allocate(tokens, prefix=prefix)
        cached = got.cached_length // self.size
        assert len(got.block_ids) == self._blocks(len(tokens))
        assert got.cached_length <= len(tokens) - 1
        self._check_match(tokens, prefix.namespace, got.block_ids[:cached], expected)
        self._take(got.block_ids[cached:], held=got.block_ids[:cached])
        self._open(tokens, prefix, list(got.block_ids), got.cached_length, publish)

    @rule(
        tokens=TOKENS,
        salt=SALTS,
        weight_set=WEIGHT_SETS,
        limit=PICK,
        chunk=st.integers(1, 14),
        publish=OFTEN,
    )
    def admit(
        self,
        tokens: list[int],
        salt: str | None,
        weight_set: str,
        limit: int,
        chunk: int,
        publish: bool,
    ) -> None:
        """Admit a request like the loop: match, adopt, then extend by a first chunk."""
        prefix = self._prefix(tokens, weight_set, salt)
        limit = limit % len(tokens)
        matched = self._match(tokens, prefix, limit)
        end = min(len(tokens), len(matched) * self.size + chunk)
        counts = self._counts()
        if self._blocks(end) - len(matched) > self.cache.num_free_blocks() - sum(
            counts[b] == 0 for b in matched
        ):
            return
        self.cache.adopt(matched)
        block_ids = list(matched)
        assert self.cache.extend(block_ids, len(matched) * self.size, end) == ()
        assert block_ids[: len(matched)] == list(matched), "a full block was exchanged"
        self._take(block_ids[len(matched) :], held=matched)
        prefix = self._prefix(tokens[:end], weight_set, salt)
        self._open(tokens[:end], prefix, block_ids, len(matched) * self.size, publish)

    @rule(tokens=TOKENS, salt=SALTS, weight_set=WEIGHT_SETS, age=st.integers(0, 2), limit=PICK)
    def match(
        self, tokens: list[int], salt: str | None, weight_set: str, age: int, limit: int
    ) -> None:
        """Match without taking blocks, also for dead versions."""
        version = max(0, self.versions[weight_set] - age)
        prefix = self._prefix(tokens, weight_set, salt, version)
        before = self._counts()
        self._match(tokens, prefix, limit % (len(tokens) + 3))
        assert self._counts() == before, "match changed the cache"

    @precondition(lambda self: self.tables)
    @rule(picks=st.lists(PICK, min_size=1, max_size=3), tokens=TOKENS, publish=OFTEN)
    def extend(self, picks: list[int], tokens: list[int], publish: bool) -> None:
        """Run one step: several tables grow, then copies run, then new tokens are written."""
        chosen = list(dict.fromkeys(pick % len(self.tables) for pick in picks))
        steps: list[tuple[Table, int]] = []
        copies: list[tuple[int, int]] = []
        for index in chosen:
            table = self.tables[index]
            start = len(table.tokens)
            end = start + len(tokens)
            shared = (
                start % self.size > 0 and self._counts()[table.block_ids[start // self.size]] > 1
            )
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
            if publish:
                self._publish_table(table)

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
        self._publish_table(self.tables[pick % len(self.tables)])

    def _publish_table(self, table: Table) -> None:
        full = len(table.tokens) // self.size
        if not table.publishable:
            return
        fresh = range(table.num_published, full)
        self.cache.publish(table.block_ids, table.tokens, table.prefix, fresh)
        table.num_published = full
        for index in fresh:
            if table.block_ids[index] not in self.named.values():
                self._publish(
                    (table.namespace, tuple(table.tokens[: (index + 1) * self.size])),
                    table.block_ids[index],
                )

    @precondition(lambda self: self.tables)
    @rule(picks=st.lists(PICK, min_size=1, max_size=3))
    def deallocate(self, picks: list[int]) -> None:
        for pick in picks[: len(self.tables)]:
            table = self.tables.pop(pick % len(self.tables))
            self.cache.deallocate(table.block_ids)
            self._release(table.block_ids)

    @rule(weight_set=WEIGHT_SETS, really=SELDOM)
    def drop_version(self, weight_set: str, really: bool) -> None:
        if not really:
            return
        version = self.versions[weight_set]
        dead = {
            n: b
            for n, b in self.named.items()
            if (n[0].weight_set, n[0].version) == (weight_set, version)
        }
        before = self._counts()
        self.cache.drop_version(weight_set, version)
        assert self._counts() == before, "a block in use was evicted"
        self.versions[weight_set] += 1
        for name in dead:
            del self.named[name]
        for table in self.tables:
            if (table.namespace.weight_set, table.namespace.version) == (weight_set, version):
                table.publishable = False

    @rule(really=SELDOM)
    def flush(self, really: bool) -> None:
        if not really:
            return
        before = self._counts()
        self.cache.flush()
        assert self._counts() == before, "a block in use was evicted"
        self.named.clear()

    # -- invariants --------------------------------------------------------------------------------

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
            if len(expected) * self.size == len(tokens):  # every earlier block is still there
                prefix = PrefixKeys(namespace)
                prefix.extend(tokens, self.size)
                matched = self._match(tokens, prefix, len(tokens))
                assert matched[-1] == block_id

    # -- the model ---------------------------------------------------------------------------------

    def _prefix(
        self, tokens: list[int], weight_set: str, salt: str | None, version: int | None = None
    ) -> PrefixKeys:
        prefix = PrefixKeys(
            Namespace(weight_set, self.versions[weight_set] if version is None else version, salt)
        )
        prefix.extend(tokens, self.size)
        return prefix

    def _match(
        self, tokens: list[int] | tuple[int, ...], prefix: PrefixKeys, limit: int
    ) -> tuple[int, ...]:
        got = self.cache.match(tokens, prefix, limit)
        assert got.cached_length == len(got.block_ids) * self.size
        assert got.cached_length <= limit
        expected = self._expected(tokens, prefix.namespace, limit)
        self._check_match(tokens, prefix.namespace, got.block_ids, expected)
        return got.block_ids

    def _check_match(
        self,
        tokens: list[int] | tuple[int, ...],
        namespace: Namespace,
        matched: tuple[int, ...],
        expected: list[int],
    ) -> None:
        for position in range(len(matched) * self.size):
            written = self.slots[matched[position // self.size]][position % self.size]
            assert written == (namespace, tuple(tokens[: position + 1])), (
                "a block matched that holds something else"
            )
        assert list(matched) == expected

    def _expected(
        self, tokens: list[int] | tuple[int, ...], namespace: Namespace, limit: int
    ) -> list[int]:
        block_ids: list[int] = []
        for end in range(self.size, min(limit, len(tokens)) + 1, self.size):
            block_id = self.named.get((namespace, tuple(tokens[:end])))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def _open(
        self,
        tokens: list[int],
        prefix: PrefixKeys,
        block_ids: list[int],
        cached: int,
        publish: bool,
    ) -> None:
        table = Table(list(tokens), prefix, block_ids, num_published=cached // self.size)
        self.tables.append(table)
        self._write(table, cached)
        if publish:
            self._publish_table(table)

    def _write(self, table: Table, start: int) -> None:
        matchable = set(self.named.values())
        for position in range(start, len(table.tokens)):
            block_id = table.block_ids[position // self.size]
            assert block_id not in matchable, "a block that others may match was written to"
            assert self.cache.ref_count(block_id) == 1, "a shared block was written to"
            self.slots[block_id][position % self.size] = (
                table.namespace,
                tuple(table.tokens[: position + 1]),
            )

    def _take(self, fresh: list[int] | tuple[int, ...], held: tuple[int, ...] = ()) -> None:
        """Take new blocks, unnamed blocks first. Their contents are gone."""
        for block_id in held:
            self.freed_at.pop(block_id, None)
        for block_id in fresh:
            assert block_id in self.freed_at, "a block in use was handed out"
            nameless = self.freed_at.keys() - set(self.named.values())
            if nameless:
                assert block_id in nameless, "a matchable block was reused before an empty one"
            else:
                assert block_id in self._next(), "not the next block in eviction order"
            del self.freed_at[block_id]
            self._forget(block_id)
            self.slots[block_id] = [None] * self.size

    def _publish(self, name: Written, block_id: int) -> None:
        self.named.setdefault(name, block_id)

    def _next(self) -> set[int]:
        """Return the free matchable blocks that may be reused next: the least recently used."""
        return {min(self.freed_at, key=self.freed_at.__getitem__)}

    def _forget(self, block_id: int) -> None:
        self.named = {name: b for name, b in self.named.items() if b != block_id}

    def _release(self, block_ids: list[int]) -> None:
        """Release blocks. Free blocks become the most recently used, heads of prefixes last."""
        for block_id in reversed(block_ids):
            if self.cache.ref_count(block_id) == 0:
                self._used(block_id)

    def _used(self, block_id: int) -> None:
        self.clock += 1
        self.freed_at[block_id] = self.clock

    def _counts(self) -> dict[int, int]:
        return {
            block_id: self.cache.ref_count(block_id) for block_id in range(self.cache.num_blocks)
        }

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)
