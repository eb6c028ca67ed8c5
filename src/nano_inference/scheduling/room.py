"""What a plan has left of the KV cache: a local copy of its counts. Reads the cache and writes only
to itself.
"""

from collections.abc import Sequence as Listed

from nano_inference.kv_cache.manager import CacheView


class Room:
    """Blocks and units that can be taken, and the counts of blocks that a plan changes.

    A fresh block takes `layout.num_units` units. A block that no table holds any more gives back
    its units of full layers, one that is in no table's window those of sliding layers.
    """

    def __init__(self, cache: CacheView) -> None:
        self.layout = cache.layout
        self.blocks = cache.num_free_blocks()
        self.units = cache.num_free_units()
        self._cache = cache
        self._refs: dict[int, int] = {}
        self._users: dict[int, int] = {}

    def refs(self, block_id: int) -> int:
        """How many tables hold a block."""
        return self._refs[block_id] if block_id in self._refs else self._cache.ref_count(block_id)

    def fresh(self, reserved_units: int = 0) -> int:
        """Blocks that can be taken, if some units are kept back."""
        return max(0, min(self.blocks, (self.units - reserved_units) // self.layout.num_units))

    def take(self, num_blocks: int) -> None:
        """Take fresh blocks; a negative number gives them back."""
        self.blocks -= num_blocks
        self.units -= num_blocks * self.layout.num_units

    def hold(self, block_ids: Listed[int], num_slid: int) -> None:
        """A table holds these blocks, all but the first `num_slid` of them in its window."""
        self._count(block_ids, num_slid, 1)

    def let_go(self, block_ids: Listed[int], num_slid: int) -> None:
        """A table holds these blocks no more."""
        self._count(block_ids, num_slid, -1)

    def _count(self, block_ids: Listed[int], num_slid: int, change: int) -> None:
        # the count before of a block that changes hands: taken at 0, given back at 1
        lone = change > 0
        for block_id in block_ids:
            refs = self.refs(block_id)
            self._refs[block_id] = refs + change
            if refs == 1 - lone:
                self.blocks -= change
                self.units -= change * self.layout.num_full
        if self.layout.num_sliding:
            for block_id in block_ids[num_slid:]:
                users = self._users.get(block_id, self._cache.num_users(block_id))
                self._users[block_id] = users + change
                if users == 1 - lone:
                    self.units -= change * self.layout.num_sliding
