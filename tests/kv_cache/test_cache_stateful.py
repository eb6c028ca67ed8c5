"""Every cache kind against the model in `machine`, and the guarantees to callers."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from nano_inference import PagedKVCache, RadixKVCache
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.manager import KVCacheManager
from tests.depth import at_depth
from tests.kv_cache.machine import CacheFactory, CacheMachine, Written


class PagedMachine(CacheMachine):
    factory = PagedKVCache


class RadixMachine(CacheMachine):
    """A block is matchable while all its ancestors are. Leaves are evicted first, paths in use
    last.
    """

    factory = RadixKVCache

    def _publish(self, name: Written, block_id: int) -> None:
        namespace, tokens = name
        if len(tokens) == self.size or (namespace, tokens[: -self.size]) in self.named:
            self.named.setdefault(name, block_id)

    def _next(self) -> set[int]:
        leaves = {b: t for b, t in self.freed_at.items() if not self._has_used_below(b)}
        return {min(leaves, key=leaves.__getitem__)} if leaves else set(self.freed_at)

    def _forget(self, block_id: int) -> None:
        name = next((name for name, b in self.named.items() if b == block_id), None)
        if name is None:
            return
        was_used = self._has_used_below(block_id)
        self.named = {
            n: b
            for n, b in self.named.items()
            if n[0] != name[0] or n[1][: len(name[1])] != name[1]
        }
        if was_used:  # only if no leaf was free; its parent may be a leaf now
            self._use_path(name)

    def _release(self, block_ids: list[int]) -> None:
        names = {block_id: name for name, block_id in self.named.items()}
        for index in reversed(range(len(block_ids))):
            block_id = block_ids[index]
            if self.cache.ref_count(block_id) == 0:
                self._used(block_id)
                if block_id in names and not self._has_used_below(block_id):
                    self._use_path(names[block_id], still_held=block_ids[:index])

    def _use_path(self, name: Written, still_held: list[int] | None = None) -> None:
        """Refresh the ancestors, deepest first, up to the first that has another descendant in use."""
        namespace, tokens = name
        for end in range(len(tokens) - self.size, 0, -self.size):
            block_id = self.named[namespace, tokens[:end]]
            held = self.cache.ref_count(block_id) > 0 or block_id in (still_held or [])
            if held or self._has_used_below(block_id):
                return
            self._used(block_id)

    def _has_used_below(self, block_id: int) -> bool:
        (name,) = [name for name, b in self.named.items() if b == block_id] or [None]
        return name is not None and any(
            self.cache.ref_count(b) > 0
            for (namespace, tokens), b in self.named.items()
            if b != block_id and namespace == name[0] and tokens[: len(name[1])] == name[1]
        )


@pytest.mark.parametrize("machine", [PagedMachine, RadixMachine])
def test_cache_is_consistent_after_any_history(machine: type[CacheMachine]) -> None:
    few = settings(
        max_examples=at_depth(120),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(machine, settings=few)


def run_history(machine: CacheMachine, seed: int, steps: int) -> None:
    """Run a long history with many evictions on a cache that is nearly full all the time."""
    r = random.Random(seed)
    size = r.choice([1, 2, 3])
    machine.build(num_blocks=r.randrange(8, 24), block_size=size)
    stems = [[r.choice([7, 300]) for _ in range(20)] for _ in range(2)]
    weights = "aaaaeeefp" + "d" * r.randrange(3, 8)
    for _ in range(steps):
        tokens = r.choice(stems)[: size * r.randrange(1, 7)] + [r.choice([7, 300])] * r.randrange(2)
        salt, publish, pick = (
            r.choice([None, None, None, "salt"]),
            r.random() < 0.9,
            r.randrange(2**16),
        )
        match r.choice(weights if r.random() < 0.95 else "mv"):
            case "a":
                machine.allocate(tokens, salt, "policy", publish)
            case "m":
                machine.admit(tokens, salt, "reference", pick, r.randrange(1, 14), publish)
            case "v":
                machine.drop_version(r.choice(["policy", "reference"]), True)
            case _ if not machine.tables:
                continue
            case "e":
                machine.extend([pick], tokens[:5], publish)
            case "f":
                machine.fork(pick)
            case "p":
                machine.publish(pick)
            case _:
                machine.deallocate([pick])
        machine.invariants_of_the_cache()
        machine.what_is_free_and_not_reused_still_matches()
        machine.every_table_reads_its_own_prefix()


@pytest.mark.parametrize("machine", [PagedMachine, RadixMachine])
@pytest.mark.parametrize("seed", range(6))
def test_cache_is_consistent_after_long_histories(machine: type[CacheMachine], seed: int) -> None:
    for part in range(10):
        run_history(machine(), seed * 10 + part, steps=60)


@pytest.fixture(params=[PagedKVCache, RadixKVCache])
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


def test_match_leaves_one_token_to_compute(factory: CacheFactory) -> None:
    cache = factory(num_blocks=8, block_size=2)
    tokens = [1, 2, 3, 4]
    publish_all(cache, tokens, keys(tokens, 2))
    assert cache.allocate(tokens).cached_length == 2
    assert cache.match(tokens, keys(tokens, 2), 3).cached_length == 2
    assert cache.match(tokens, keys(tokens, 2), 4).cached_length == 4


def test_allocate_hashes_tokens_if_no_prefix_is_passed(factory: CacheFactory) -> None:
    cache = factory(num_blocks=8, block_size=2)
    tokens = [1000, 2, 3]
    publish_all(cache, tokens, keys(tokens, 2))
    again = cache.allocate(tokens)
    assert again.cached_length == 2
    assert len(again.block_ids) == 2


def test_flush_frees_no_block_in_use(factory: CacheFactory) -> None:
    cache = factory(num_blocks=4, block_size=2)
    tokens = [1, 2, 3, 4]
    table = publish_all(cache, tokens, keys(tokens, 2))
    cache.flush()
    assert cache.num_free_blocks() == 2
    assert all(cache.ref_count(block_id) == 1 for block_id in table)
    assert cache.match(tokens, keys(tokens, 2), 4).block_ids == ()
    assert not set(cache.allocate([5, 6, 7, 8]).block_ids) & set(table)


def test_dead_version_is_reused_before_a_live_one(factory: CacheFactory) -> None:
    cache = factory(num_blocks=4, block_size=2)
    dead, live = Namespace(version=0), Namespace(weight_set="reference")
    old = publish_all(cache, [1, 2, 3, 4], keys([1, 2, 3, 4], 2, dead))
    kept = publish_all(cache, [1, 2, 3, 4], keys([1, 2, 3, 4], 2, live))
    cache.deallocate(kept)  # unused for longer than the dead blocks
    cache.deallocate(old)
    cache.drop_version("policy", 0)
    assert set(cache.allocate([9, 9, 9, 9]).block_ids) == set(old)
    assert cache.match([1, 2, 3, 4], keys([1, 2, 3, 4], 2, live), 4).cached_length == 4


def test_sizes_must_be_positive(factory: CacheFactory) -> None:
    for num_blocks, block_size in [(0, 4), (4, 0), (-1, 4)]:
        with pytest.raises(ValueError, match="positive"):
            factory(num_blocks=num_blocks, block_size=block_size)
