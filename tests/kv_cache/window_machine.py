"""Caches whose blocks are backed by units, against a model of the contents of each unit.

Every sequence reads all of its tokens in units of full layers, and its window in units of sliding
layers. A match must return all available tokens and nothing else. The order of eviction is checked
when units are taken.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nano_inference.kv_cache.block_hash import NO_PREFIX, Namespace, PrefixKeys
from nano_inference.kv_cache.manager import KVCacheManager
from nano_inference.kv_cache.sliding_window import NO_UNIT, BlockLayout
from tests.kv_cache.machine import PICK, SALTS, SELDOM, TOKENS, Table, Written

LAYOUTS = st.builds(
    BlockLayout,
    st.sampled_from([0, 1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3, 5, 9]),
)


class WindowCacheFactory(Protocol):
    def __call__(
        self, num_blocks: int, block_size: int, *, layout: BlockLayout, num_units: int | None
    ) -> KVCacheManager: ...


class WindowMachine(RuleBasedStateMachine):
    """Tables as in the loop: between two steps all tokens are computed and the windows have moved."""

    factory: ClassVar[WindowCacheFactory]

    @initialize(layout=LAYOUTS, block_size=st.integers(1, 4), spare=st.integers(0, 25))
    def build(self, layout: BlockLayout, block_size: int, spare: int) -> None:
        num_units = 4 * layout.num_units + spare
        num_blocks = num_units // layout.num_full if layout.num_full else 25
        self.cache = type(self).factory(num_blocks, block_size, layout=layout, num_units=num_units)
        assert self.cache.units is not None
        self.units, self.layout, self.size = self.cache.units, layout, block_size
        self.tables: list[Table] = []
        self.version = 0
        # (unit, offset) -> content and layer kind
        self.written: dict[tuple[int, int], tuple[Written, int]] = {}
        self.names: dict[int, Written] = {}

    # -- rules -------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, salt=SALTS, chunk=st.integers(1, 14))
    def admit(self, tokens: list[int], salt: str | None, chunk: int) -> None:
        prefix = self._prefix(tokens, salt)
        matched = self._match(tokens, prefix, len(tokens) - 1)
        start = len(matched) * self.size
        end = min(len(tokens), start + chunk)
        self.cache.adopt(matched, self._slid(start))
        table = Table(
            tokens[:start],
            self._prefix(tokens[:start], salt),
            list(matched),
            num_published=len(matched),
        )
        if self._room() < self._blocks(end) - len(matched):
            self.cache.deallocate(matched, self._slid(start))
            return
        self.tables.append(table)
        self._step([(table, tokens[start:end])])

    @rule(tokens=TOKENS, salt=SALTS, limit=PICK)
    def match(self, tokens: list[int], salt: str | None, limit: int) -> None:
        with self._nothing_taken():
            self._match(tokens, self._prefix(tokens, salt), limit % (len(tokens) + 3))

    @precondition(lambda self: self.tables)
    @rule(picks=st.lists(PICK, min_size=1, max_size=3), tokens=TOKENS)
    def extend(self, picks: list[int], tokens: list[int]) -> None:
        """Run one step of several tables. Windows move only after every table has its units."""
        chosen: list[tuple[Table, list[int]]] = []
        room = self._room()
        for index in dict.fromkeys(pick % len(self.tables) for pick in picks):
            table = self.tables[index]
            fresh = (
                self._blocks(len(table.tokens) + len(tokens))
                - len(table.block_ids)
                + self._is_shared(table)
            )
            if fresh <= room:
                room -= fresh
                chosen.append((table, tokens))
        self._step(chosen)

    @precondition(lambda self: self.tables)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        parent = self.tables[pick % len(self.tables)]
        self.cache.adopt(parent.block_ids, self._slid(len(parent.tokens)))
        block_ids, prefix = list(parent.block_ids), parent.prefix.copy()
        self.tables.append(
            Table(list(parent.tokens), prefix, block_ids, parent.num_published, parent.publishable)
        )

    @precondition(lambda self: self.tables)
    @rule(pick=PICK)
    def deallocate(self, pick: int) -> None:
        table = self.tables.pop(pick % len(self.tables))
        with self._nothing_taken():
            self.cache.deallocate(table.block_ids, self._slid(len(table.tokens)))

    @rule(really=SELDOM, flush=st.booleans())
    def forget(self, really: bool, flush: bool) -> None:
        if not really:
            return
        if flush:
            self.cache.flush()
        else:
            self.cache.drop_version("policy", self.version)
            self.version += 1
            for table in self.tables:
                table.publishable = False
        assert all(block.hash == NO_PREFIX for block in self.cache.blocks)
        self.names.clear()

    # -- invariants
    # ------------------------------------------------------------------------------------

    @invariant()
    def the_cache_is_sound_and_counts_right(self) -> None:
        self.cache.check(
            (table.block_ids for table in self.tables),
            [self._slid(len(t.tokens)) for t in self.tables],
        )
        held = {b for table in self.tables for b in table.block_ids}
        within = {
            b for table in self.tables for b in table.block_ids[self._slid(len(table.tokens)) :]
        }
        needed = self.layout.num_full * len(held) + self.layout.num_sliding * len(within)
        assert self.cache.num_free_units() == self.cache.num_units - needed

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for table in self.tables:
            self._check_contents(table.block_ids, table.tokens, table.namespace, len(table.tokens))

    @precondition(lambda self: self.names)
    @rule(pick=PICK)
    def match_a_name(self, pick: int) -> None:
        namespace, tokens = list(self.names.values())[pick % len(self.names)]
        prefix = PrefixKeys(namespace)
        prefix.extend(tokens, self.size)
        self._match(list(tokens), prefix, len(tokens))

    # -- the model ---------------------------------------------------------------------------------

    def _step(self, chosen: list[tuple[Table, list[int]]]) -> None:
        copies: list[tuple[int, int]] = []
        starts = [len(table.tokens) for table, _ in chosen]
        fresh = 0
        stripped, names = self._stripped(), set(self.names)
        nameless = sum(
            block.ref_count == 0 and block.hash == NO_PREFIX for block in self.cache.blocks
        )
        free = min(nameless, len(self.units.free) // self.layout.num_units)
        for table, tokens in chosen:
            start, before = len(table.tokens), len(table.block_ids)
            made = self.cache.extend(table.block_ids, start, start + len(tokens))
            fresh += len(made) + len(table.block_ids) - before
            copies += made
            table.tokens += tokens
            table.prefix.extend(table.tokens, self.size)
        self._sync_names()
        if fresh <= free:
            assert set(self.names) == names, "a prefix was lost without need"
            assert self._stripped() & names <= stripped, "a block was stripped without need"
        self._copy(copies)
        for (table, _), start in zip(chosen, starts, strict=True):
            self._write(table, start)
            self._publish(table)
        for (table, _), start in zip(chosen, starts, strict=True):
            # Its rows read before any window moves.
            self._check_contents(table.block_ids, table.tokens, table.namespace, start)
        with self._nothing_taken():
            for (table, _), start in zip(chosen, starts, strict=True):
                self.cache.slide(table.block_ids, start, len(table.tokens))

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        pairs = [
            ((self._unit(source, kind), offset), (self._unit(target, kind), offset))
            for source, target in copies
            for kind in range(self.layout.num_units)
            for offset in range(self.size)
        ]
        for target, held in [(target, self.written.get(source)) for source, target in pairs]:
            if held is not None:
                self.written[target] = held

    def _write(self, table: Table, start: int) -> None:
        for position in range(start, len(table.tokens)):
            block_id = table.block_ids[position // self.size]
            assert block_id not in self.names, "a block that others may match was written to"
            assert self.cache.ref_count(block_id) == 1, "a shared block was written to"
            for kind in range(self.layout.num_units):
                what = table.namespace, tuple(table.tokens[: position + 1])
                self.written[self._unit(block_id, kind), position % self.size] = what, kind

    def _publish(self, table: Table) -> None:
        full = len(table.tokens) // self.size
        if table.publishable:
            self.cache.publish(
                table.block_ids, table.tokens, table.prefix, range(table.num_published, full)
            )
            for index in range(table.num_published, full):
                block = self.cache.blocks[table.block_ids[index]]
                if block.hash != NO_PREFIX:
                    self.names[block.block_id] = (
                        table.namespace,
                        tuple(table.tokens[: (index + 1) * self.size]),
                    )
            table.num_published = full
        self._sync_names()

    def _match(self, tokens: list[int], prefix: PrefixKeys, limit: int) -> tuple[int, ...]:
        got = self.cache.match(tokens, prefix, limit)
        assert got.cached_length == len(got.block_ids) * self.size <= limit
        self._check_contents(got.block_ids, tokens, prefix.namespace, got.cached_length)
        assert list(got.block_ids) == self._expected(tokens, prefix.namespace, limit)
        return got.block_ids

    def _expected(self, tokens: list[int], namespace: Namespace, limit: int) -> list[int]:
        by_name = {name: block_id for block_id, name in self.names.items()}
        block_ids: list[int] = []
        for end in range(self.size, min(limit, len(tokens)) + 1, self.size):
            block_id = by_name.get((namespace, tuple(tokens[:end])))
            if block_id is None:
                break
            block_ids.append(block_id)
        stripped = self._stripped()
        whole = [
            n
            for n in range(len(block_ids) + 1)
            if not stripped & set(block_ids[self._slid(n * self.size) : n])
        ]
        return block_ids[: max(whole)]

    def _check_contents(
        self,
        block_ids: list[int] | tuple[int, ...],
        tokens: list[int],
        namespace: Namespace,
        row: int,
    ) -> None:
        """Check the units read by a row at this position: all earlier positions, within the window
        for sliding layers.
        """
        for kind in range(self.layout.num_units):
            sliding = kind >= self.layout.num_full
            for position in range(max(0, row - self.layout.window + 1) if sliding else 0, row):
                slot = self._unit(block_ids[position // self.size], kind), position % self.size
                expected = (namespace, tuple(tokens[: position + 1])), kind
                assert self.written.get(slot) == expected, "a row reads units of another sequence"

    def _sync_names(self) -> None:
        self.names = {
            b: name for b, name in self.names.items() if self.cache.blocks[b].hash != NO_PREFIX
        }
        assert len(set(self.names.values())) == len(self.names), "two blocks have one name"

    @contextmanager
    def _nothing_taken(self) -> Iterator[None]:
        names, units = dict(self.names), {b: list(self._units(b)) for b in self.names}
        yield
        self._sync_names()
        assert self.names == names
        assert {b: list(self._units(b)) for b in self.names} == units, (
            "units of a matchable block were taken"
        )

    def _stripped(self) -> set[int]:
        rows, count = self.units.unit_of, self.cache.num_blocks
        kinds = range(self.layout.num_full, self.layout.num_units)
        return {
            at
            for kind in kinds
            for at, unit in enumerate(rows[kind * count : (kind + 1) * count])
            if unit < 0
        }

    def _units(self, block_id: int) -> Iterator[int]:
        return (
            self.units.unit_of[kind * self.cache.num_blocks + block_id]
            for kind in range(self.layout.num_units)
        )

    def _unit(self, block_id: int, kind: int) -> int:
        unit = self.units.unit_of[kind * self.cache.num_blocks + block_id]
        assert unit != NO_UNIT, "a block is used whose units are gone"
        return unit

    def _is_shared(self, table: Table) -> bool:
        inside = len(table.tokens) % self.size > 0
        return inside and self.cache.ref_count(table.block_ids[len(table.tokens) // self.size]) > 1

    def _prefix(self, tokens: list[int], salt: str | None) -> PrefixKeys:
        prefix = PrefixKeys(Namespace("policy", self.version, salt))
        prefix.extend(tokens, self.size)
        return prefix

    def _room(self) -> int:
        return min(
            self.cache.num_free_blocks(), self.cache.num_free_units() // self.layout.num_units
        )

    def _slid(self, start: int) -> int:
        """By definition: blocks without a position visible to a row at or after `start`."""
        seen = start - self.layout.window + 1
        return sum((block + 1) * self.size <= seen for block in range(self._blocks(start)))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)
