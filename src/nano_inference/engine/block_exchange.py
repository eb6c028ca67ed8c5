"""Export of KV blocks from an engine and import into another one, by name.

A block's name is a chained hash over the token ids up to its end, rooted in weight set, version,
salt and adapter. The importing engine recomputes the name from the tokens that come with the
blocks, so a block is never found under a wrong name. The contents of a block are not checked:
engines that exchange blocks must trust each other, and use equal version numbers only for equal
weights.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nano_inference.arrays import Tensor, dtype_name, host, namespace, of_kind
from nano_inference.core.sequence import POLICY
from nano_inference.device.blocks import MOST_BYTES, put_blocks
from nano_inference.device.runner import ModelRunner
from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.errors import InvalidRequest, VersionGone
from nano_inference.kv_cache.block_changes import BlockChanges, BlockReport
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Format that two engines must share to exchange blocks.

    Attributes:
        numerics: Fingerprint of the arithmetic. It also decides the order of values in a block.
        block_size: Tokens per block.
        dtype: Data type of keys and values.
        shapes: Shape of a block's part on each rank: [2, layers, KV heads, block_size, head_dim],
            keys first.
    """

    numerics: str
    block_size: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def part_bytes(self) -> list[int]:
        """Bytes of a block's part on each rank."""
        return [math.prod(shape) * getattr(host, self.dtype).itemsize for shape in self.shapes]

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return sum(self.part_bytes)


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """Consecutive blocks of a chain, in host memory.

    Attributes:
        format: Format of every block.
        namespace: Namespace of the names: everything except tokens that the blocks depend on.
        names: Names of all blocks from the head of the chain to the last block in `data`.
        token_ids: Tokens of these blocks, `len(names) * block_size`.
        first: Index in the chain of the first block in `data`.
        data: Keys and values, uint8 [blocks, bytes of a block], with the ranks' parts concatenated.
    """

    format: BlockFormat
    namespace: Namespace
    names: tuple[int, ...]
    token_ids: tuple[int, ...]
    first: int
    data: Tensor


class BlockExchange:
    """Export from and import into an engine's cache, between steps. Any thread may use it."""

    def __init__(
        self, shared: SharedLoop, cache: KVCacheManager, runner: ModelRunner, *, enabled: bool
    ) -> None:
        self._shared = shared
        self._cache = cache
        self._runner = runner
        self._enabled = enabled  # True if prefix caching is on
        self._news: BlockChanges | None = None
        self._format: BlockFormat | None = None
        self.num_exported = 0  # blocks
        self.num_imported = 0

    @property
    def format(self) -> BlockFormat:
        """Format of this engine's blocks. Raises `InvalidRequest` if they cannot be exchanged."""
        if self._format is None:
            dtype = dtype_name(self._runner.storage.keys.dtype)
            with self._shared.lock:
                shapes = tuple(self._runner.block_shapes())
            self._format = BlockFormat(
                self._shared.loop.numerics, self._cache.block_size, dtype, shapes
            )
        return self._format

    def require_enabled(self) -> None:
        """Raise `InvalidRequest` if prefixes are not cached."""
        self._shared.require_alive()
        if not self._enabled:
            raise InvalidRequest(
                "exchanging blocks needs a prefix cache; set enable_prefix_caching=True."
            )

    def names(self, token_ids: Sequence[int], salt: str | None = None) -> tuple[int, ...]:
        """Return the names of the full blocks of a prompt under the current weights."""
        prefix = PrefixKeys(Namespace(POLICY, self._shared.loop.sequences.versions[POLICY], salt))
        prefix.extend(list(token_ids), self._cache.block_size)
        return tuple(prefix.hashes)

    def count_blocks(self, names: Sequence[int]) -> int:
        """Return how many blocks at the head of a chain are cached. They may be evicted
        afterwards.
        """
        with self._shared.lock:
            return self._cache.count(names)

    def export_blocks(
        self, names: Sequence[int], first: int = 0, max_bytes: int = MOST_BYTES
    ) -> BlockPiece | None:
        """Return cached blocks of a chain from index `first` on, at least one and at most
        `max_bytes`. Return None if block `first` is not cached.

        `names` begin at the head of the chain. The exported blocks count as used, so that they are
        evicted late while the next pieces are fetched. A block without the values of layers with a
        window counts as missing, and so do all blocks after it.

        Raises `InvalidRequest` if prefixes are not cached, or if the weights or the cache are
        asleep.
        """
        self.require_enabled()
        layout = self.format
        most = max(1, max_bytes // layout.block_bytes)
        piece: BlockPiece | None = None

        def read() -> None:
            nonlocal piece
            match = self._cache.find(names)
            table = match.block_ids[first : first + most]
            if not table:
                return
            self._cache.adopt(match.block_ids)
            self._cache.deallocate(match.block_ids)
            end = first + len(table)
            tokens = match.token_ids[: end * layout.block_size]
            parts = self._runner.read_blocks(table)
            data = namespace(parts[0]).cat(parts, dim=1)
            piece = BlockPiece(layout, match.namespace, tuple(names[:end]), tokens, first, data)
            self.num_exported += len(table)

        self._between_steps(read)
        return piece

    def import_blocks(self, piece: BlockPiece) -> int:
        """Import blocks. Return how many blocks of the chain, from its head on, are cached now.

        Imported blocks are cached but not in use, and count as the most recently used. If too few
        blocks are free, or the blocks before them are missing, fewer are imported, or none.

        Raises `InvalidRequest`, with nothing changed, if format, sizes or names do not match, and
        `VersionGone` if the weights have another version.
        """
        self.require_enabled()
        self._check(piece)
        prefix = PrefixKeys(piece.namespace, piece.names)
        data = of_kind(self._runner.storage.keys, piece.data)
        num_here, gone = 0, False

        def write() -> None:
            nonlocal num_here, gone
            gone = self._shared.loop.sequences.versions[POLICY] != piece.namespace.version
            if gone:
                return
            table, cached = put_blocks(
                *(self._cache, self._runner, piece.token_ids, prefix, piece.first),
                data.split(piece.format.part_bytes, dim=1),
            )
            num_here = len(table)
            self.num_imported += len(table) - cached
            self._cache.deallocate(table)

        self._between_steps(write)
        if gone:
            self._refuse_version(piece.namespace.version)
        return num_here

    def report(self, lost: bool = False) -> BlockReport:
        """Return the names added and removed since the last report. The first report, and one with
        `lost`, lists all names.
        """
        with self._shared.lock:
            if self._news is None:
                self._news = BlockChanges()
            elif lost:
                self._news.forget()
            return self._news.take(self._cache.observe(self._news))

    def _between_steps(self, act: Callable[[], None]) -> None:
        """Call `act` with no step in flight and the cache awake."""
        with self._shared.lock:
            if "kv_cache" in self._shared.life.asleep:
                raise InvalidRequest("the KV cache is asleep; call wake() first.")
            self._shared.between_steps(POLICY, act)

    def _check(self, piece: BlockPiece) -> None:
        ours, theirs, space = self.format, piece.format, piece.namespace
        for name in ("numerics", "block_size", "dtype", "shapes"):
            if getattr(ours, name) != getattr(theirs, name):
                raise InvalidRequest(
                    f"cannot import blocks: their {name} is {getattr(theirs, name)!r}, this "
                    f"engine's is {getattr(ours, name)!r}."
                )
        if space.weight_set != POLICY:
            raise InvalidRequest(
                f"cannot import blocks of the weight set {space.weight_set!r}; only blocks of "
                f"{POLICY!r} are exchanged."
            )
        if space.version != self._shared.loop.sequences.versions[POLICY]:
            self._refuse_version(space.version)
        count = len(piece.names) - piece.first
        if not 0 <= piece.first < len(piece.names) or len(piece.names) > self._cache.num_blocks:
            raise InvalidRequest(
                f"blocks [{piece.first}, {len(piece.names)}) are not a valid piece for a cache of "
                f"{self._cache.num_blocks} blocks."
            )
        if len(piece.token_ids) != len(piece.names) * ours.block_size:
            raise InvalidRequest(
                f"{len(piece.token_ids)} token ids do not match {len(piece.names)} blocks of "
                f"{ours.block_size}."
            )
        if dtype_name(piece.data.dtype) != "uint8" or piece.data.shape != (count, ours.block_bytes):
            raise InvalidRequest(
                f"{piece.data.numel()} elements of {piece.data.dtype} do not match {count} blocks "
                f"of {ours.block_bytes} bytes."
            )
        made = PrefixKeys(space)
        made.extend(piece.token_ids, ours.block_size)
        if tuple(made.hashes) != tuple(piece.names):
            raise InvalidRequest("the names of the blocks do not match their tokens.")

    def _refuse_version(self, version: int) -> None:
        serving = self._shared.loop.sequences.versions[POLICY]
        raise VersionGone(
            f"cannot import blocks of weight version {version}; this engine serves version "
            f"{serving}."
        )
