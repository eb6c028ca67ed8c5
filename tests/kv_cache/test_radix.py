"""Guarantees of the radix cache: the shape of its tree and its eviction order."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import RadixKVCache
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.radix import Node
from tests.depth import at_depth

SIZE = 2
Shape = dict[tuple[int, ...], Any]


def keys(tokens: list[int], namespace: Namespace | None = None) -> PrefixKeys:
    prefix = PrefixKeys(namespace or Namespace())
    prefix.extend(tokens, SIZE)
    return prefix


def put(cache: RadixKVCache, tokens: list[int], namespace: Namespace | None = None) -> list[int]:
    """Create a table of these tokens and publish its full blocks."""
    table = list(cache.allocate(tokens, prefix=keys(tokens, namespace)).block_ids)
    cache.publish(table, tokens, keys(tokens, namespace), range(len(tokens) // SIZE))
    return table


def cached(cache: RadixKVCache, tokens: list[int]) -> int:
    return cache.match(tokens, keys(tokens), len(tokens)).cached_length


def shape(node: Node) -> Shape:
    return {tuple(child.token_ids): shape(child) for child in node.children.values()}


def tree(cache: RadixKVCache) -> Shape:
    roots = cache.roots
    return shape(roots[Namespace()]) if roots else {}


# -- shape -----------------------------------------------------------------------------------------


def test_growing_sequence_stays_one_run() -> None:
    cache = RadixKVCache(8, SIZE)
    tokens = [1, 2, 3, 4]
    table = put(cache, tokens)
    tokens += [5, 6, 7]
    cache.extend(table, 4, 7)
    cache.publish(table, tokens, keys(tokens), range(2, 3))
    assert tree(cache) == {(1, 2, 3, 4, 5, 6): {}}


def test_run_splits_at_the_block_where_sequences_diverge() -> None:
    cache = RadixKVCache(16, SIZE)
    tables = [put(cache, [1, 2, 3, 4, 5, 6])]
    # diverges inside the third block, which is not split
    tables.append(put(cache, [1, 2, 3, 4, 5, 9]))
    assert tree(cache) == {(1, 2, 3, 4): {(5, 6): {}, (5, 9): {}}}
    tables.append(put(cache, [1, 2, 8, 8]))
    assert tree(cache) == {(1, 2): {(3, 4): {(5, 6): {}, (5, 9): {}}, (8, 8): {}}}
    assert cached(cache, [1, 2, 3, 4, 5, 6]) == cached(cache, [1, 2, 3, 4, 5, 9]) == 6
    cache.check(tables)


def test_unrelated_sequences_hang_at_the_root() -> None:
    cache = RadixKVCache(8, SIZE)
    put(cache, [1, 2])
    put(cache, [1, 3])
    put(cache, [1, 2], Namespace(salt="other"))
    assert tree(cache) == {(1, 2): {}, (1, 3): {}}
    assert set(cache.roots) == {Namespace(), Namespace(salt="other")}


def test_tree_is_removed_with_its_last_block() -> None:
    cache = RadixKVCache(2, SIZE)
    for salt in ("a", "b", "c"):
        cache.deallocate(put(cache, [1, 2, 3, 4], Namespace(salt=salt)))
        assert set(cache.roots) == {Namespace(salt=salt)}
        cache.check([])


@settings(deadline=None, max_examples=at_depth(50))
@given(
    queries=st.lists(st.lists(st.integers(1, 2), max_size=12), min_size=1, max_size=8),
    limit=st.integers(0, 14),
)
def test_match_changes_nothing(queries: list[list[int]], limit: int) -> None:
    cache = RadixKVCache(16, SIZE)
    for tail in ([1, 1, 2, 2], [2, 1, 2, 2], [1, 1, 1, 1]):
        cache.deallocate(put(cache, [1, 2, 1, 2, *tail]))
    before = tree(cache), cache._pool.free_ids()
    for tokens in queries:
        cache.match(tokens, keys(tokens), limit)
    assert (tree(cache), cache._pool.free_ids()) == before


def test_match_depends_only_on_token_ids() -> None:
    cache = RadixKVCache(8, SIZE)
    tokens = [1, 2, 3, 4]
    table = list(cache.allocate(tokens).block_ids)
    cache.publish(table, tokens, PrefixKeys(Namespace(), [7, 7]), range(2))
    assert cache.match(tokens, PrefixKeys(Namespace()), 4).block_ids == tuple(table)
    assert cache.match([1, 2, 3, 5], PrefixKeys(Namespace(), [7, 7]), 4).block_ids == tuple(
        table[:1]
    )


def test_tree_may_exceed_the_recursion_limit() -> None:
    depth = 1200
    cache = RadixKVCache(2 * depth, 1)
    tokens = [1] * depth
    for end in range(depth, 1, -1):  # each new sequence diverges one block before the previous one
        tokens[end - 1 :] = [2]
        prefix = PrefixKeys(Namespace(), range(depth))
        table = list(cache.allocate(tokens, prefix=prefix).block_ids)
        cache.publish(table, tokens, prefix, range(end))
        cache.deallocate(table)
    cache.check([])
    cache.flush()
    cache.check([])


# -- eviction order --------------------------------------------------------------------------------


def take_one(cache: RadixKVCache, table: list[int]) -> None:
    cache.extend(table, 0, len(table) * SIZE + 1)


def test_eviction_starts_at_the_tail_of_a_path() -> None:
    cache = RadixKVCache(3, SIZE)
    tokens = [1, 2, 3, 4, 5, 6]
    cache.deallocate(put(cache, tokens))
    table: list[int] = []
    for length in (4, 2, 0):
        take_one(cache, table)
        assert cached(cache, tokens) == length


def test_eviction_takes_least_recently_used_leaves_first() -> None:
    cache = RadixKVCache(4, SIZE)
    old, new = [1, 2, 3, 4], [1, 2, 5, 6, 7, 8]
    cache.deallocate(put(cache, old))
    cache.deallocate(put(cache, new))
    table: list[int] = []
    for lengths in [(2, 6), (2, 4), (2, 2), (0, 0)]:
        take_one(cache, table)
        assert (cached(cache, old), cached(cache, new)) == lengths


def test_use_of_a_leaf_refreshes_its_whole_path() -> None:
    cache = RadixKVCache(4, SIZE)
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    cache.deallocate(put(cache, first))
    cache.deallocate(put(cache, second))
    again = cache.match(first, keys(first), 4).block_ids
    cache.adopt(again)
    cache.deallocate(again)
    table: list[int] = []
    for lengths in [(4, 2), (4, 0), (2, 0), (0, 0)]:
        take_one(cache, table)
        assert (cached(cache, first), cached(cache, second)) == lengths


# -- twins: a table whose block has no name because its contents were already in the tree ----------


@pytest.fixture
def twins() -> tuple[RadixKVCache, list[int], list[int]]:
    """`mine` holds a private copy of its second block, and a third block in the tree under an
    unheld block.
    """
    cache = RadixKVCache(8, SIZE)
    theirs = put(cache, [1, 2, 3, 4])
    # the last token is never cached, so the second block is computed twice
    mine = put(cache, [1, 2, 3, 4])
    assert mine[0] == theirs[0]
    assert mine[1] != theirs[1]
    tokens = [1, 2, 3, 4, 5, 6]
    cache.extend(mine, 4, 6)
    cache.publish(mine, tokens, keys(tokens), range(2, 3))
    assert cache.match(tokens, keys(tokens), 6).block_ids == (*theirs, mine[2])
    cache.deallocate(theirs)
    assert cache.ref_count(theirs[1]) == 0
    cache.check([mine])
    return cache, theirs, mine


def test_ancestors_of_blocks_in_use_are_evicted_last(
    twins: tuple[RadixKVCache, list[int], list[int]],
) -> None:
    cache, _, mine = twins
    other = put(cache, [9, 9, 9, 9, 9, 9])
    cache.deallocate(other)  # used later than its parents, but evicted first
    assert cache.num_free_blocks() == 5
    table: list[int] = []
    for length in (6, 6, 6, 6, 2):
        assert cached(cache, [1, 2, 3, 4, 5, 6]) == 6
        take_one(cache, table)
        assert cached(cache, [1, 2, 3, 4, 5, 6]) == length
        cache.check([mine, table])
    assert cache.num_free_blocks() == 0


def test_blocks_below_a_reused_block_lose_only_their_names(
    twins: tuple[RadixKVCache, list[int], list[int]],
) -> None:
    cache, theirs, mine = twins
    table: list[int] = []
    cache.extend(table, 0, 5 * SIZE)
    assert theirs[1] in table
    assert [cache.ref_count(block_id) for block_id in mine] == [1, 1, 1]
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    cache.deallocate(table)
    cache.extend(mine, 6, 8)
    cache.publish(mine, tokens, keys(tokens), range(3, 4))  # no parent to attach to
    assert cached(cache, tokens) == 2
    cache.check([mine])
    again = put(cache, tokens)  # another sequence fills the gap
    assert cached(cache, tokens) == 8
    cache.check([mine, again])


def test_parent_becomes_a_leaf_when_its_child_is_freed(
    twins: tuple[RadixKVCache, list[int], list[int]],
) -> None:
    cache, theirs, mine = twins
    cache.deallocate(mine)
    free = [block_id for block_id in cache._pool.free_ids() if block_id in {*theirs, mine[2]}]
    assert free == [mine[2], theirs[1], theirs[0]]
    cache.check([])


def test_free_blocks_below_a_reused_block_are_forgotten() -> None:
    cache = RadixKVCache(9, SIZE)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    tables: list[list[int]] = []
    # each recomputes the path and adds one block to the previous path
    for num_blocks in (2, 3, 4):
        table: list[int] = []
        cache.extend(table, 0, num_blocks * SIZE)
        cache.publish(table, tokens, keys(tokens), range(num_blocks))
        tables.append(table)
    path = cache.match(tokens, keys(tokens), 8).block_ids
    assert path == (*tables[0], tables[1][2], tables[2][3])
    for table in tables[:2]:
        cache.deallocate(table)  # only the last block of the path is still held
    taken: list[int] = []
    cache.extend(taken, 0, 2 * SIZE)
    assert not set(taken) & set(path), "the two unnamed blocks go first"
    cache.check([tables[2], taken])
    cache.extend(taken, 2 * SIZE, 3 * SIZE)
    assert taken[2] == path[1]
    cache.check([tables[2], taken])
    assert cache.match(tokens, keys(tokens), 8).block_ids == path[:1]
    assert cache._pool.free_ids() == [path[2], path[0]]


def test_flush_forgets_paths_in_use_and_their_descendants() -> None:
    cache = RadixKVCache(8, SIZE)
    tokens = [1, 2, 3, 4, 5, 6]
    table = put(cache, tokens[:4])
    cache.flush()
    cache.extend(table, 4, 6)
    cache.publish(table, tokens, keys(tokens), range(2, 3))
    assert tree(cache) == {}
    cache.check([table])


# -- check -----------------------------------------------------------------------------------------


def lose_contents(cache: RadixKVCache, top: Node) -> None:
    top.token_ids.pop()


def exchange_key(cache: RadixKVCache, top: Node) -> None:
    top.children[9, 9] = top.children.pop((5, 6))


def exchange_blocks(cache: RadixKVCache, top: Node) -> None:
    top.block_ids.reverse()


def lose_parent(cache: RadixKVCache, top: Node) -> None:
    next(iter(top.children.values())).parent = None


def lose_children(cache: RadixKVCache, top: Node) -> None:
    top.children.clear()


def lose_name(cache: RadixKVCache, top: Node) -> None:
    cache.blocks[top.block_ids[0]].hash = -1


def pin_for_nothing(cache: RadixKVCache, top: Node) -> None:
    cache.blocks[top.block_ids[0]].pins += 1


def jump_the_queue(cache: RadixKVCache, top: Node) -> None:
    """Move the first block of the run before its descendants: it leaves the ring while the others
    rotate.
    """
    pool = cache._pool
    pool._unlink(top.block_ids[0])
    order = [top.block_ids[0], *pool.free_ids()]
    for block_id in order[1:]:
        pool._unlink(block_id)
    for block_id in order:
        pool._link(cache.blocks[block_id])


@pytest.mark.parametrize(
    "damage",
    [
        *(lose_contents, lose_parent, lose_children, lose_name),
        *(exchange_key, exchange_blocks, pin_for_nothing, jump_the_queue),
    ],
)
def test_check_detects_inconsistencies(damage: Callable[[RadixKVCache, Node], None]) -> None:
    cache = RadixKVCache(6, SIZE)
    for tail in ([5, 6], [7, 8]):
        cache.deallocate(put(cache, [1, 2, 3, 4, *tail]))
    cache.check([])
    damage(cache, next(iter(cache.roots[Namespace()].children.values())))
    with pytest.raises(AssertionError):
        cache.check([])


def test_check_detects_a_table_that_is_not_a_path() -> None:
    cache = RadixKVCache(8, SIZE)
    table = put(cache, [1, 2, 3, 4, 5, 6])
    cache.check([table])
    for order in itertools.permutations(table):
        if list(order) != table:
            with pytest.raises(AssertionError, match="path"):
                cache.check([list(order)])
