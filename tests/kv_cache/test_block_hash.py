import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import PagedKVCache, compute_block_hash
from nano_inference.kv_cache import block_hash
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys

CALM = settings(deadline=None)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
NAMESPACES = st.builds(
    Namespace,
    weight_set=st.text(max_size=4),
    version=st.integers(0, 10**6),
    salt=st.none() | st.text(max_size=4),
    adapter=st.none() | st.text(max_size=4),
)


def chain(tokens: list[int], block_size: int, namespace: Namespace | None = None) -> list[int]:
    prefix = PrefixKeys(namespace or Namespace())
    prefix.extend(tokens, block_size)
    return prefix.hashes


@CALM
@given(first=IDS, second=IDS)
def test_equal_hashes_mean_equal_tokens(first: list[int], second: list[int]) -> None:
    assert (compute_block_hash(first) == compute_block_hash(second)) == (first == second)


def test_ids_above_255_count_in_full() -> None:
    different = [1, 257, 2**16 + 1, 2**31 + 1]
    assert len({compute_block_hash([token]) for token in different}) == len(different)


@CALM
@given(tokens=IDS, parent=st.integers(0, 2**256 - 1))
def test_parent_is_part_of_the_name(tokens: list[int], parent: int) -> None:
    assert compute_block_hash(tokens, parent) != compute_block_hash(tokens)
    assert compute_block_hash(tokens, parent) != compute_block_hash(tokens, parent ^ 1)
    assert 0 <= compute_block_hash(tokens, parent) < 2**256


def test_parent_zero_differs_from_no_parent() -> None:
    assert compute_block_hash([1], 0) != compute_block_hash([1])


def test_empty_block_has_no_name() -> None:
    with pytest.raises(ValueError, match="token"):
        compute_block_hash([])


@CALM
@given(
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=12),
    size=st.integers(1, 3),
    cut=st.integers(0, 12),
)
def test_chain_grows_the_same_in_any_steps(tokens: list[int], size: int, cut: int) -> None:
    prefix = PrefixKeys(Namespace(salt="x"))
    prefix.extend(tokens[:cut], size)
    prefix.extend(tokens, size)
    assert prefix.hashes == chain(tokens, size, Namespace(salt="x"))
    assert len(prefix.hashes) == len(tokens) // size


@CALM
@given(order=st.permutations([(1, 2), (3, 4), (5, 6)]))
def test_order_of_blocks_matters(order: list[tuple[int, int]]) -> None:
    straight, other = (
        chain([1, 2, 3, 4, 5, 6], 2),
        chain([token for pair in order for token in pair], 2),
    )
    assert (straight[-1] == other[-1]) == (order == [(1, 2), (3, 4), (5, 6)])


def test_equal_blocks_in_a_row_have_different_names() -> None:
    assert len(set(chain([7] * 8, 2))) == 4


@CALM
@given(one=NAMESPACES, other=NAMESPACES)
def test_namespaces_are_encoded_injectively(one: Namespace, other: Namespace) -> None:
    assert (one.encode() == other.encode()) == (one == other)


def test_namespaces_separate_every_block() -> None:
    spaces = [
        Namespace(),
        Namespace(salt=""),
        Namespace(salt="a"),
        Namespace(adapter="a"),
        Namespace(adapter=""),
        Namespace(version=1),
        Namespace(weight_set="reference"),
        Namespace(weight_set="policy1", version=0),
        Namespace(salt="a", adapter="b"),
        Namespace(salt="ab"),
    ]
    names = [chain([1, 2, 3, 4], 2, space) for space in spaces]
    for index in range(2):
        assert len({name[index] for name in names}) == len(spaces)


def test_copied_chain_is_independent() -> None:
    prefix = PrefixKeys(Namespace(salt="a"))
    prefix.extend([1, 2], 2)
    copy = prefix.copy()
    copy.extend([1, 2, 3, 4], 2)
    assert len(prefix.hashes) == 1
    assert copy.namespace == prefix.namespace
    assert copy.hashes == chain([1, 2, 3, 4], 2, Namespace(salt="a"))


@pytest.mark.parametrize("distinct", [1, 2])
def test_collision_is_caught_by_comparing_tokens(
    monkeypatch: pytest.MonkeyPatch, distinct: int
) -> None:
    monkeypatch.setattr(
        block_hash, "compute_block_hash", lambda ids, parent=-1, *, extra=b"": sum(ids) % distinct
    )
    cache = PagedKVCache(num_blocks=64, block_size=2)
    prompts = [list(ids) for ids in itertools.product([1, 2, 3], repeat=4)]
    for tokens in prompts:
        prefix = PrefixKeys(Namespace())
        prefix.extend(tokens, 2)
        match = cache.match(tokens, prefix, 4)
        held = [token for block_id in match.block_ids for token in cache.blocks[block_id].token_ids]
        assert held == tokens[: match.cached_length]
        table = list(cache.allocate(tokens, prefix=prefix).block_ids)
        cache.publish(table, tokens, prefix, range(2))
        cache.deallocate(table)
        cache.check([])


def test_collision_of_namespaces_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "compute_block_hash", lambda ids, parent=-1, *, extra=b"": 1)
    cache = PagedKVCache(num_blocks=8, block_size=2)
    mine = PrefixKeys(Namespace(salt="mine"))
    mine.extend([1, 2], 2)
    cache.publish(list(cache.allocate([1, 2], prefix=mine).block_ids), [1, 2], mine, range(1))
    theirs = PrefixKeys(Namespace(salt="theirs"))
    theirs.extend([1, 2], 2)
    assert cache.match([1, 2], mine, 2).cached_length == 2
    assert cache.match([1, 2], theirs, 2).cached_length == 0
