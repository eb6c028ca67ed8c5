"""A KV cache that finds prefixes in a radix tree over token ids.

This is the idea of SGLang's RadixAttention.
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
    """A run of blocks that are always reached together. A root is an empty run.

    Attributes:
        namespace: Namespace of the whole tree.
        parent: Run before this one. None for a root.
        block_ids: Blocks of the run.
        token_ids: Concatenated contents of the blocks.
        children: Runs that may follow, by the token ids of their first block. Two children may
            begin with the same tokens if their first blocks differ, because a block is never
            divided.
    """

    namespace: Namespace
    parent: "Node | None"
    block_ids: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict[tuple[int, ...], "Node"])


class RadixKVCache(KVCacheManager):
    """A KV cache with a tree over token ids for each namespace. Edges are runs of whole blocks.

    A block's position in the tree depends only on token ids. Its hash only marks that it is in the
    tree. The pool records the block above each block, and so reuses leaves first. The tree records
    only contents.

    A block is in the tree only while all blocks above it are. A block whose ancestors were evicted
    is not published, and evicting a block evicts everything below it.

    Unnamed blocks are reused first, then leaves of the tree, least recently used first. Using a
    block uses its whole path. A path stays while a table holds any block of it, unless nothing else
    is free.
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
        self._node_of: dict[int, Node] = {}  # block id -> its run

    def _found(self, token_ids: Sequence[int], prefix: PrefixKeys, num_blocks: int) -> list[int]:
        """Return the blocks that hold the head of a sequence.

        Splits no run and does not count as a use.
        """
        root = self.roots.get(prefix.namespace)
        return [] if root is None else self._follow(root, 0, _as_list(token_ids), 0, num_blocks)[0]

    def publish(
        self, table: Sequence[int], token_ids: Sequence[int], prefix: PrefixKeys, blocks: range
    ) -> None:
        """Insert these full blocks into the tree, below the blocks before them or their duplicates.

        If the tree already has the contents, it keeps its block, and the table's block stays
        unnamed. A stripped block in the tree is replaced by one that is not.
        """
        tokens = _as_list(token_ids)
        position = self._place_before(table, tokens, prefix, blocks.start)
        if position is None:
            return
        matches, node, length = self._follow(*position, tokens, blocks.start, blocks.stop)
        first = blocks.start + len(matches)
        for old, new in zip(matches, table[blocks.start : first], strict=True):
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

    def _name_before(self, block: Block) -> int:
        return NO_PREFIX if block.above is None else block.above.hash

    def _forget(self, block: Block) -> None:
        """Evict a block and everything below it.

        A block to evict has others below it only if no leaf is free.
        """
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
        """Forget the prefixes of a dead weight version. Their free blocks are reused first."""
        for namespace in list(self.roots):
            if (namespace.weight_set, namespace.version) == (weight_set, version):
                self._drop(self.roots.pop(namespace))

    def flush(self) -> None:
        """Forget every prefix. Blocks in use stay in use."""
        for namespace in list(self.roots):
            self._drop(self.roots.pop(namespace))

    def _contents(self, block_ids: Sequence[int]) -> list[int]:
        """Return the token ids of named blocks, in O(1) per block along a path."""
        token_ids: list[int] = []
        node, index = None, 0
        for block_id in block_ids:
            last, node = node, self._node_of[block_id]
            index = index + 1 if node is last else 0
            if index >= len(node.block_ids) or node.block_ids[index] != block_id:
                index = node.block_ids.index(block_id)
            token_ids += self._run(node.token_ids, index, index + 1)
        return token_ids

    def _check_names(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that runs, contents and names agree, and that every table follows a path."""
        blocks = self._pool.blocks
        seen: list[int] = []
        for namespace, root in self.roots.items():
            assert root.children, "a tree has no blocks"
            assert not root.block_ids, "a root has blocks"
            for node in _subtree(root):
                assert node.namespace is namespace or node.namespace == namespace, (
                    "a run is in the wrong tree"
                )
                assert len(node.token_ids) == len(node.block_ids) * self.block_size, (
                    "a run's contents have the wrong length"
                )
                assert node is root or node.block_ids, "a run is empty"
                self._check_chain(node)
                seen += node.block_ids
        named = {block.block_id for block in blocks if block.hash != NO_PREFIX}
        assert len(seen) == len(named), "a block is in the tree twice"
        assert set(seen) == self._node_of.keys() == named, "tree and names disagree"
        for left, right in itertools.chain.from_iterable(map(itertools.pairwise, tables)):
            if left in named and right in named:
                assert blocks[right].above is blocks[left], "a table leaves its path in the tree"

    # -- positions: a node and an index in its run -------------------------------------------------

    def _place_before(
        self, table: Sequence[int], tokens: list[int], prefix: PrefixKeys, index: int
    ) -> tuple[Node, int] | None:
        """Return the position for block `index` of a sequence.

        None if the blocks before it are not in the tree.
        """
        last = self._node_of.get(table[index - 1]) if index else None
        if (
            last is not None
            and last.block_ids[-1] == table[index - 1]
            and last.namespace == prefix.namespace
        ):
            # a sequence that extends its own run: O(1) for any length
            return last, len(last.block_ids)
        root = self.roots.get(prefix.namespace) or Node(prefix.namespace, None)
        matches, node, length = self._follow(root, 0, tokens, 0, index)
        return (node, length) if len(matches) == index else None

    def _follow(
        self, node: Node, length: int, tokens: list[int], first: int, end: int
    ) -> tuple[list[int], Node, int]:
        """Match blocks [first, end) of a sequence, starting at block `length` of `node`'s run.

        Return the matching blocks and the position after them.
        """
        matches: list[int] = []
        while (at := first + len(matches)) < end:
            if length == len(node.block_ids):
                child = node.children.get(tuple(self._run(tokens, at, at + 1)))
                if child is None:
                    break
                node, length = child, 0
            equal = self._count_equal(node, length, tokens, at, end)
            if not equal:
                break
            matches += node.block_ids[length : length + equal]
            length += equal
        return matches, node, length

    def _count_equal(self, node: Node, length: int, tokens: list[int], at: int, end: int) -> int:
        """Return how many blocks of the run equal blocks [at, end) of a sequence.

        The comparison starts at block `length` of the run.
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
        """Return the token ids of blocks [first, end)."""
        return tokens[first * self.block_size : end * self.block_size]

    # -- changing the tree -------------------------------------------------------------------------

    def _open_run(self, node: Node, first_block: list[int]) -> Node:
        """Return the run to extend after this one.

        That is the run itself if it is a leaf, otherwise a new child.
        """
        if node.parent is None:
            self.roots[node.namespace] = node
        elif not node.children:
            return node
        child = node.children[tuple(first_block)] = Node(node.namespace, node)
        return child

    def _exchange(self, old: Block, new: Block) -> None:
        """Replace a block in the tree by an unnamed block with the same contents."""
        node = self._node_of.pop(old.block_id)
        index = node.block_ids.index(old.block_id)
        below = node.block_ids[index + 1 : index + 2] or [
            child.block_ids[0] for child in node.children.values()
        ]
        node.block_ids[index] = new.block_id
        self._node_of[new.block_id] = node
        self._pool.give_name(new, old.hash, old.namespace)
        self._pool.exchange(old, new, [self._pool.blocks[block_id] for block_id in below])

    def _split(self, node: Node, length: int) -> None:
        """Split a run after its first `length` blocks. The rest becomes its only child."""
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
        """Forget the blocks of a childless run from index `length` on, the last one first."""
        for block_id in reversed(node.block_ids[length:]):
            del self._node_of[block_id]
            self._pool.forget(self._pool.blocks[block_id])
        del node.block_ids[length:], node.token_ids[length * self.block_size :]

    def _detach(self, node: Node) -> None:
        """Remove a run from its parent's children.

        If it was the last run of its tree, remove the root too.
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
            assert self._node_of[block.block_id] is node, "a block is in the wrong run"
            assert block.namespace == node.namespace, "a block is in the wrong tree"
            assert block.above is above, "pool and tree disagree on the block above"
            above = block
        for key, child in node.children.items():
            assert child.parent is node, "a child has the wrong parent"
            assert list(key) == self._run(child.token_ids, 0, 1), "a child has the wrong key"


def _as_list(token_ids: Sequence[int]) -> list[int]:
    return token_ids if isinstance(token_ids, list) else list(token_ids)


def _subtree(top: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it, parents first.

    Iterative, because a tree can be as deep as a sequence has blocks.
    """
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()
