"""Units: the pieces of memory that stand behind blocks, so that sliding-window layers can give
theirs back.

A unit holds one block's tokens for a few layers. Every block has units for the layers that see all
tokens, and more for the layers with a window, until it has left the window of every table that
holds it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from nano_inference.kv_cache.block_hash import NO_PREFIX
from nano_inference.kv_cache.block_pool import Block

NO_UNIT = -1


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What one block costs. A model whose layers all see everything has one unit a block: the block
    itself.

    Attributes:
        num_full: units for the layers that see all tokens.
        num_sliding: units for the layers with a window.
        window: tokens that those see, the row's own included; 0 where there are none.
        beside: units are a memory of their own, and each block has one for all other layers too.
    """

    num_full: int = 1
    num_sliding: int = 0
    window: int = 0
    beside: bool = False

    def __post_init__(self) -> None:
        if min(self.num_full, self.num_sliding, self.window) < 0 or not self.num_units:
            raise ValueError(
                f"{self} is no layout: counts are not negative, and a block has at least one unit."
            )
        if (self.num_sliding > 0) != (self.window > 0):
            raise ValueError(
                f"{self} is no layout: units of sliding layers and their window come together."
            )

    @property
    def num_units(self) -> int:
        """Units of a block within the window."""
        return self.num_full + self.num_sliding

    def num_slid(self, start: int, block_size: int) -> int:
        """Leading blocks of a sequence that no row from position `start` on sees through a
        window.
        """
        # The row at `start` sees the keys above start - window.
        return max(0, start - self.window + 1) // block_size if self.num_sliding else 0

    def most_in_window(self, length: int, block_size: int) -> int:
        """Blocks that the rows of a chunk and their windows touch at most, wherever the chunk
        starts.
        """
        return (self.window + length - 1 + block_size - 2) // block_size + 1

    def most_units(self, num_tokens: int, length: int, block_size: int) -> int:
        """Units that a sequence of so many tokens needs at most while it is computed in chunks of
        `length` tokens.
        """
        blocks = -(-num_tokens // block_size)
        within = min(blocks, self.most_in_window(length, block_size)) if self.num_sliding else 0
        return self.num_full * blocks + self.num_sliding * within


UNIFORM = BlockLayout()


class UnitPool:
    """Which units stand behind which block, and which can be taken.

    A block has its units of full layers as long as a table holds it or its contents have a name. It
    keeps those of sliding layers too, but they may be taken from a block that is in no table's
    window: the least recently let go first.

    Attributes:
        unit_of: row by row [layout.num_units, num_blocks]: full layers first; `NO_UNIT` where there
            is none.
        changed: blocks whose units changed; a mirror of `unit_of` clears it.
        num_in_window: blocks that at least one table has in its window.
        spared: blocks, by id, that `reclaim` passed over; see `spare_no_more`.
    """

    def __init__(self, num_units: int, num_blocks: int, layout: BlockLayout) -> None:
        self.layout = layout
        self.num_units, self.num_blocks = num_units, num_blocks
        self.unit_of = array("q", [NO_UNIT]) * (layout.num_units * num_blocks)
        self.changed: set[int] = set()
        self.num_in_window = 0
        self.free = list(range(num_units - 1, -1, -1))  # a stack
        # held or named, in no table's window: in the order of being let go
        self._slid: OrderedDict[int, Block] = OrderedDict()
        self.spared: OrderedDict[int, Block] = OrderedDict()

    def assign(self, block: Block) -> None:
        """All units of a fresh block, which its one holder has in its window."""
        for place in self._places(block):
            self.unit_of[place] = self.free.pop()
        self.changed.add(block.block_id)
        block.stripped, block.num_users = False, 1
        self.num_in_window += 1

    def give_back(self, block: Block) -> None:
        """Take all units from a block without a holder and a name."""
        self._withdraw(block)
        self._drop(block, self._places(block))

    def reclaim(self, spares: Callable[[Block], bool] | None = None) -> bool:
        """Take the sliding units of the block that was let go first, of those that `spares` does
        not name. False where there is none. A block that was spared is not asked about again.
        """
        while spares is not None and self._slid and spares(next(iter(self._slid.values()))):
            at, block = self._slid.popitem(last=False)
            self.spared[at] = block
        queue = self.spared if spares is None and not self._slid else self._slid
        if not queue:
            return False
        _, block = queue.popitem(last=False)
        self._drop(block, self._places(block)[self.layout.num_full :])
        return True

    def spare_no_more(self, block: Block) -> None:
        """There is no reason any more to spare this block."""
        if self.spared.pop(block.block_id, None) is not None:
            self.offer(block)

    def enter(self, block: Block) -> None:
        """One more table has this block in its window."""
        self._withdraw(block)
        self.num_in_window += block.num_users == 0
        block.num_users += 1

    def leave(self, block: Block, still_held: bool) -> None:
        """It left the window of one table, or that table ended. A block without a holder is not
        taken apart: see `offer`.
        """
        block.num_users -= 1
        if not block.num_users:
            self.num_in_window -= 1
            if still_held:
                self.offer(block)

    def offer(self, block: Block) -> None:
        """This block is held, but maybe in no table's window; then its sliding units may be taken.

        The end of a finished sequence is not offered: requests meet at ends, and a block there is
        reused as a whole.
        """
        if not block.num_users and not block.stripped and block.block_id not in self.spared:
            self._slid.setdefault(block.block_id, block)

    def check(self, blocks: list[Block], users: dict[int, int]) -> None:
        """Assert that every unit is free or behind one block, and that blocks have what they
        must.
        """
        behind = [unit for unit in self.unit_of if unit != NO_UNIT]
        assert sorted(behind + self.free) == list(range(self.num_units)), (
            "a unit is lost, or in two places"
        )
        full = self.layout.num_full
        for block in blocks:
            units = [self.unit_of[place] for place in self._places(block)]
            alive = block.ref_count > 0 or block.hash != NO_PREFIX
            assert all((unit != NO_UNIT) == alive for unit in units[:full]), (
                "units of full layers: neither all nor due"
            )
            there = alive and not block.stripped
            assert all((unit != NO_UNIT) == there for unit in units[full:]), (
                "units of sliding layers: not as marked"
            )
            assert block.num_users == users.get(block.block_id, 0), "users and tables disagree"
            assert there or not block.num_users, "a block within a window lacks its units"
            offered = block.block_id in {**self._slid, **self.spared}
            assert not offered or (there and not block.num_users), (
                "units are offered that are needed or gone"
            )
            assert offered or block.num_users or not (block.ref_count and there), (
                "units are held back"
            )
        assert self.num_in_window == sum(block.num_users > 0 for block in blocks)

    def _withdraw(self, block: Block) -> None:
        self._slid.pop(block.block_id, None)
        self.spared.pop(block.block_id, None)

    def _places(self, block: Block) -> range:
        return range(block.block_id, len(self.unit_of), self.num_blocks)

    def _drop(self, block: Block, places: range) -> None:
        for place in places:
            if self.unit_of[place] != NO_UNIT:
                self.free.append(self.unit_of[place])
                self.unit_of[place] = NO_UNIT
        block.stripped = True
        self.changed.add(block.block_id)
