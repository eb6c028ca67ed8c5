"""A KV cache whose prefixes are found in a radix tree over token ids (the idea of SGLang's
RadixAttention).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nano_inference.kv_cache.block_hash import NO_PREFIX, Namespace, PrefixKeys
from nano_inference.kv_cache.block_pool import Block
from nano_inference.kv_cache.manager import EvictedBlocks, KVCacheManager
from nano_inference.kv_cache.sliding_window import UNIFORM, BlockLayout


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks that are always reached together, and what follows it. A root is an empty
    run.

    Attributes:
        namespace: of the whole tree.
        parent: the run before this one; None for a root.
        block_ids: the blocks of the run.
        token_ids: their contents, one after the other.
        children: the runs that may follow, by the token ids of their first block. Two of them may
            begin with the same tokens, as long as their first blocks differ: a block is never
            divided.
    """

    namespace: Namespace
    parent: "Node | None"
    block_ids: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict[tuple[int, ...], "Node"])


class RadixKVCache(KVCacheManager):
    """A KV cache with a tree over token ids for each namespace. Its edges are runs of whole blocks.

    Token ids alone decide where a block hangs; its hash is only a mark that it hangs somewhere. The
    pool knows for each block the one above it, and so reuses leaves first; the tree knows only
    contents. A block hangs in the tree as long as everything above it does: a block whose ancestors
    are gone is not published, and if one is reused after all, what hangs below goes with it.

    Blocks without a name are reused first, then leaves of the tree, the longest unused first. Using
    a block uses its whole path, and a path stays as long as a table holds anything on it, unless
    nothing else is free.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        layout: BlockLayout = UNIFORM,
        num_units: int | None = None,
        evicted: Callable[[], EvictedBlocks | None] = lambda: None,
    ) -> None:
        super().__init__(
            num_blocks, block_size, layout=layout, num_units=num_units, evicted=evicted
        )
        self.roots: dict[Namespace, Node] = {}
        self._node_of: dict[int, Node] = {}  # block id -> the run that it is in

    def _found(self, token_ids: Sequence[int], prefix: PrefixKeys, num_blocks: int) -> list[int]:
        """Blocks that hold the head of a sequence. Splits nothing and counts as no use."""
        root = self.roots.get(prefix.namespace)
        return [] if root is None else self._follow(root, 0, _as_list(token_ids), 0, num_blocks)[0]

    def publish(
        self, table: Sequence[int], token_ids: Sequence[int], prefix: PrefixKeys, blocks: range
    ) -> None:
        """Hang these full blocks into the tree, under the blocks before them: the table's own or
        their twins.

        Where the contents already hang there, that stays, and the table's block remains without a
        name; but a stripped block makes way for one that is not.
        """
        tokens = _as_list(token_ids)
        place = self._place_before(table, tokens, prefix, blocks.start)
        if place is None:
            return
        found, node, length = self._follow(*place, tokens, blocks.start, blocks.stop)
        first = blocks.start + len(found)
        for old, new in zip(found, table[blocks.start : first], strict=True):
            if self._pool.blocks[old].stripped and not self._pool.blocks[new].stripped:
                self._exchange(self._pool.blocks[old], self._pool.blocks[new])
        if first == blocks.stop:
            return
        if length < len(node.block_ids):
            self._split(node, length)
        above = self._pool.blocks[node.block_ids[-1]] if node.block_ids else None
        node = self._open_run(node, self._run(tokens, first, first + 1))
        node.block_ids += table[first : blocks.stop]
        node.token_ids += self._run(tokens, first, blocks.stop)
        for index in range(first, blocks.stop):
            block = self._pool.blocks[table[index]]
            self._pool.give_name(block, prefix.hashes[index], prefix.namespace)
            self._pool.put_below(block, above)
            self._node_of[block.block_id] = node
            above = block

    def _forget(self, block: Block) -> None:
        """Drop a block, and what hangs below it: there is something only where no leaf is free."""
        node = self._node_of[block.block_id]
        for child in node.children.values():
            self._drop(child)
        node.children.clear()
        is_last = node.block_ids[-1] == block.block_id
        length = len(node.block_ids) - 1 if is_last else node.block_ids.index(block.block_id)
        if length == 0:
            self._detach(node)
        self._cut(node, length)

    def _drop_version(self, weight_set: str, version: int) -> None:
        """Forget the prefixes of a dead weight version; their free blocks are reused first."""
        for namespace in list(self.roots):
            if (namespace.weight_set, namespace.version) == (weight_set, version):
                self._drop(self.roots.pop(namespace))

    def flush(self) -> None:
        """Forget every prefix. Blocks in use stay in use."""
        for namespace in list(self.roots):
            self._drop(self.roots.pop(namespace))

    def _contents(self, block_ids: Sequence[int]) -> list[int]:
        """Token ids of named blocks. O(1) each where they follow each other down the tree."""
        token_ids: list[int] = []
        node, place = None, 0
        for block_id in block_ids:
            last, node = node, self._node_of[block_id]
            place = place + 1 if node is last else 0
            if place >= len(node.block_ids) or node.block_ids[place] != block_id:
                place = node.block_ids.index(block_id)
            token_ids += self._run(node.token_ids, place, place + 1)
        return token_ids

    def _check_names(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that runs, their order, contents and names agree, and that every table hangs along
        a path.
        """
        blocks = self._pool.blocks
        seen: list[int] = []
        for namespace, root in self.roots.items():
            assert root.children, "a tree without blocks"
            assert not root.block_ids, "a root with blocks"
            for node in _subtree(root):
                assert node.namespace is namespace or node.namespace == namespace, (
                    "a run in the wrong tree"
                )
                assert len(node.token_ids) == len(node.block_ids) * self.block_size, (
                    "a run whose contents do not fit"
                )
                assert node is root or node.block_ids, "an empty run"
                self._check_chain(node)
                seen += node.block_ids
        named = {block.block_id for block in blocks if block.hash != NO_PREFIX}
        assert len(seen) == len(named), "a block hangs in two places"
        assert set(seen) == self._node_of.keys() == named, "tree and names disagree"
        for left, right in itertools.chain.from_iterable(map(itertools.pairwise, tables)):
            if left in named and right in named:
                assert blocks[right].above is blocks[left], "a table is no path of the tree"

    # -- places: a node, and how many blocks of its run lie before ---------------------------------

    def _place_before(
        self, table: Sequence[int], tokens: list[int], prefix: PrefixKeys, index: int
    ) -> tuple[Node, int] | None:
        """Where block `index` of a sequence belongs; None if what comes before it is not in the
        tree.
        """
        last = self._node_of.get(table[index - 1]) if index else None
        if (
            last is not None
            and last.block_ids[-1] == table[index - 1]
            and last.namespace == prefix.namespace
        ):
            # a sequence that grows by itself: O(1), however long it is
            return last, len(last.block_ids)
        root = self.roots.get(prefix.namespace) or Node(prefix.namespace, None)
        found, node, length = self._follow(root, 0, tokens, 0, index)
        return (node, length) if len(found) == index else None

    def _follow(
        self, node: Node, length: int, tokens: list[int], first: int, end: int
    ) -> tuple[list[int], Node, int]:
        """From a place along blocks [first, end) of a sequence: the blocks found, and the place
        that they lead to.
        """
        found: list[int] = []
        while (at := first + len(found)) < end:
            if length == len(node.block_ids):
                child = node.children.get(tuple(self._run(tokens, at, at + 1)))
                if child is None:
                    break
                node, length = child, 0
            equal = self._count_equal(node, length, tokens, at, end)
            if not equal:
                break
            found += node.block_ids[length : length + equal]
            length += equal
        return found, node, length

    def _count_equal(self, node: Node, length: int, tokens: list[int], at: int, end: int) -> int:
        """How many blocks the run, from its block `length` on, shares with blocks [at, end) of a
        sequence.
        """
        most = min(len(node.block_ids) - length, end - at)
        mine = self._run(node.token_ids, length, length + most)
        theirs = self._run(tokens, at, at + most)
        if mine == theirs:
            return most
        return (
            next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            // self.block_size
        )

    def _run(self, tokens: list[int], first: int, end: int) -> list[int]:
        """Token ids of blocks [first, end)."""
        return tokens[first * self.block_size : end * self.block_size]

    # -- changing the tree -------------------------------------------------------------------------

    def _open_run(self, node: Node, first_block: list[int]) -> Node:
        """The run that goes on where this one ends: itself if it is a leaf, else a new child."""
        if node.parent is None:
            self.roots[node.namespace] = node
        elif not node.children:
            return node
        child = node.children[tuple(first_block)] = Node(node.namespace, node)
        return child

    def _exchange(self, old: Block, new: Block) -> None:
        """Hang a block without a name where one with the same contents hangs."""
        node = self._node_of.pop(old.block_id)
        place = node.block_ids.index(old.block_id)
        below = node.block_ids[place + 1 : place + 2] or [
            child.block_ids[0] for child in node.children.values()
        ]
        node.block_ids[place] = new.block_id
        self._node_of[new.block_id] = node
        self._pool.give_name(new, old.hash, old.namespace)
        self._pool.exchange(old, new, [self._pool.blocks[block_id] for block_id in below])

    def _split(self, node: Node, length: int) -> None:
        """Leave the first `length` blocks of a run where they are; the rest becomes its only
        child.
        """
        size = length * self.block_size
        lower = Node(
            node.namespace, node, node.block_ids[length:], node.token_ids[size:], node.children
        )
        for child in lower.children.values():
            child.parent = lower
        self._node_of.update(dict.fromkeys(lower.block_ids, lower))
        del node.block_ids[length:], node.token_ids[size:]
        node.children = {tuple(self._run(lower.token_ids, 0, 1)): lower}

    def _drop(self, top: Node) -> None:
        """Forget the blocks of a subtree, leaves first."""
        for node in reversed(list(_subtree(top))):
            self._cut(node, 0)

    def _cut(self, node: Node, length: int) -> None:
        """Forget the blocks of a run that nothing hangs below, from block `length` on, the last one
        first.
        """
        for block_id in reversed(node.block_ids[length:]):
            del self._node_of[block_id]
            self._pool.forget(self._pool.blocks[block_id])
        del node.block_ids[length:], node.token_ids[length * self.block_size :]

    def _detach(self, node: Node) -> None:
        """Take a run out of its parent's children, and its tree out of the roots if it was the
        last.
        """
        parent = node.parent
        assert parent is not None, "a root holds no block"
        del parent.children[tuple(self._run(node.token_ids, 0, 1))]
        if parent.parent is None and not parent.children:
            del self.roots[parent.namespace]

    def _check_chain(self, node: Node) -> None:
        above = (
            self._pool.blocks[node.parent.block_ids[-1]]
            if node.parent and node.parent.block_ids
            else None
        )
        for block in map(self._pool.blocks.__getitem__, node.block_ids):
            assert self._node_of[block.block_id] is node, "a block in the wrong run"
            assert block.namespace == node.namespace, "a block in the wrong tree"
            assert block.above is above, "pool and tree disagree on what lies above"
            above = block
        for key, child in node.children.items():
            assert child.parent is node, "a child of another run"
            assert list(key) == self._run(child.token_ids, 0, 1), "a child under the wrong key"


def _as_list(token_ids: Sequence[int]) -> list[int]:
    return token_ids if isinstance(token_ids, list) else list(token_ids)


def _subtree(top: Node) -> Iterator[Node]:
    """A node and all below it, parents first. No recursion: a tree can be as deep as a sequence has
    blocks.
    """
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()
