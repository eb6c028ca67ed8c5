"""Units: the pieces of memory that blocks consist of.

A unit holds the keys and values of one block's tokens for a few layers. Every block has units for
the layers that see all tokens. It also has units for the sliding-window layers until it has left
the window of every table that holds it.
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
    """Memory units of one block.

    If all layers of a model see all tokens, a block has one unit.

    Attributes:
        num_full: Units for the layers that see all tokens.
        num_sliding: Units for the sliding-window layers.
        window: Number of tokens that these layers see, including the row's own. 0 if there are
            none.
        beside: True if the units are separate memory, and each block also has memory for all other
            layers.
    """

    num_full: int = 1
    num_sliding: int = 0
    window: int = 0
    beside: bool = False

    def __post_init__(self) -> None:
        if min(self.num_full, self.num_sliding, self.window) < 0 or not self.num_units:
            raise ValueError(
                f"{self} is invalid: counts must be at least 0, and a block needs a unit."
            )
        if (self.num_sliding > 0) != (self.window > 0):
            raise ValueError(
                f"{self} is invalid: num_sliding and window must both be 0 or both be positive."
            )

    @property
    def num_units(self) -> int:
        """Units of a block within the window."""
        return self.num_full + self.num_sliding

    def num_slid(self, start: int, block_size: int) -> int:
        """Return how many leading blocks are outside the window of every row from `start` on."""
        # The row at `start` sees the keys above start - window.
        return max(0, start - self.window + 1) // block_size if self.num_sliding else 0

    def most_in_window(self, length: int, block_size: int) -> int:
        """Return the maximum number of blocks that a chunk's rows and their windows touch."""
        return (self.window + length - 1 + block_size - 2) // block_size + 1

    def most_units(self, num_tokens: int, length: int, block_size: int) -> int:
        """Return the maximum number of units that a sequence of `num_tokens` tokens needs.

        Assumes that it is computed in chunks of `length` tokens.
        """
        blocks = -(-num_tokens // block_size)
        within = min(blocks, self.most_in_window(length, block_size)) if self.num_sliding else 0
        return self.num_full * blocks + self.num_sliding * within


UNIFORM = BlockLayout()


class UnitPool:
    """Units of each block, and the free units.

    A block has its units of full layers while a table holds it or its contents have a name. Its
    units of sliding layers stay too. They may be reclaimed once the block is in no table's window,
    in the order in which blocks left their last window.

    Attributes:
        unit_of: Unit of each block, row by row [layout.num_units, num_blocks], full layers first.
            `NO_UNIT` if the block has none.
        changed: Ids of blocks whose units changed. A mirror of `unit_of` clears the set.
        num_in_window: Number of blocks that are in the window of at least one table.
        spared: Blocks, by id, that `reclaim` skipped. `spare_no_more` makes them reclaimable again.
    """

    def __init__(self, num_units: int, num_blocks: int, layout: BlockLayout) -> None:
        self.layout = layout
        self.num_units, self.num_blocks = num_units, num_blocks
        self.unit_of = array("q", [NO_UNIT]) * (layout.num_units * num_blocks)
        self.changed: set[int] = set()
        self.num_in_window = 0
        self.free = list(range(num_units - 1, -1, -1))  # a stack
        # reclaimable blocks, in the order in which they left the last window
        self._slid: OrderedDict[int, Block] = OrderedDict()
        self.spared: OrderedDict[int, Block] = OrderedDict()

    def assign(self, block: Block) -> None:
        """Assign all units of a fresh block, which its only holder has in its window."""
        for index in self._places(block):
            self.unit_of[index] = self.free.pop()
        self.changed.add(block.block_id)
        block.stripped, block.num_users = False, 1
        self.num_in_window += 1

    def give_back(self, block: Block) -> None:
        """Free all units of a block without a holder and a name."""
        self._withdraw(block)
        self._drop(block, self._places(block))

    def reclaim(self, spares: Callable[[Block], bool] | None = None) -> bool:
        """Free the sliding units of the block that left its last window first.

        Return False if there is no such block. Blocks that `spares` selects are skipped and moved
        to `spared`, so each is checked once.
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
        """Make a spared block reclaimable again."""
        if self.spared.pop(block.block_id, None) is not None:
            self.offer(block)

    def enter(self, block: Block) -> None:
        """Add a table that has this block in its window."""
        self._withdraw(block)
        self.num_in_window += block.num_users == 0
        block.num_users += 1

    def leave(self, block: Block, still_held: bool) -> None:
        """Remove a table that had this block in its window.

        A block that no table holds keeps its units, because it is reused only as a whole (see
        `offer`).
        """
        block.num_users -= 1
        if not block.num_users:
            self.num_in_window -= 1
            if still_held:
                self.offer(block)

    def offer(self, block: Block) -> None:
        """Make the sliding units of a held block reclaimable, unless a table has it in its window.

        The blocks at the end of a finished sequence are not offered. Other requests often match
        them, so such a block is reused only as a whole.
        """
        if not block.num_users and not block.stripped and block.block_id not in self.spared:
            self._slid.setdefault(block.block_id, block)

    def check(self, blocks: list[Block], users: dict[int, int]) -> None:
        """Assert that every unit is free or assigned once, and that every block has its units."""
        assigned = [unit for unit in self.unit_of if unit != NO_UNIT]
        assert sorted(assigned + self.free) == list(range(self.num_units)), (
            "a unit is lost or assigned twice"
        )
        full = self.layout.num_full
        for block in blocks:
            units = [self.unit_of[place] for place in self._places(block)]
            alive = block.ref_count > 0 or block.hash != NO_PREFIX
            assert all((unit != NO_UNIT) == alive for unit in units[:full]), (
                "a block has the wrong units of full layers"
            )
            there = alive and not block.stripped
            assert all((unit != NO_UNIT) == there for unit in units[full:]), (
                "a block's units of sliding layers contradict `stripped`"
            )
            assert block.num_users == users.get(block.block_id, 0), "users and tables disagree"
            assert there or not block.num_users, "a block within a window lacks units"
            offered = block.block_id in {**self._slid, **self.spared}
            assert not offered or (there and not block.num_users), (
                "reclaimable units are needed or missing"
            )
            assert offered or block.num_users or not (block.ref_count and there), (
                "unused units are not reclaimable"
            )
        assert self.num_in_window == sum(block.num_users > 0 for block in blocks)

    def _withdraw(self, block: Block) -> None:
        self._slid.pop(block.block_id, None)
        self.spared.pop(block.block_id, None)

    def _places(self, block: Block) -> range:
        return range(block.block_id, len(self.unit_of), self.num_blocks)

    def _drop(self, block: Block, places: range) -> None:
        for index in places:
            if self.unit_of[index] != NO_UNIT:
                self.free.append(self.unit_of[index])
                self.unit_of[index] = NO_UNIT
        block.stripped = True
        self.changed.add(block.block_id)
