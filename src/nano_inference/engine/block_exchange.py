"""KV blocks that leave an engine and enter another one, by their names.

A name is a chain of hashes over token ids, rooted in weight set, version, salt and adapter; the
engine that takes blocks in makes it again from the tokens that came with them, so a block can never
be found under a name that is not its own. What stands in it is believed: engines that exchange
blocks trust each other, and their versions name the same weights.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """What must agree before a block of one engine means anything to another.

    Attributes:
        numerics: fingerprint of the arithmetic; it decides also in which order a backend keeps what
            is in a block.
        block_size: tokens.
        dtype: of keys and values.
        shapes: of one block's part on each rank: [2, layers, KV heads, block_size, head_dim], keys
            first.
    """

    numerics: str
    block_size: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def part_bytes(self) -> list[int]:
        """Of one block, by rank."""
        return [math.prod(shape) * getattr(torch, self.dtype).itemsize for shape in self.shapes]

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return sum(self.part_bytes)


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """Some blocks of a chain, on the host.

    Attributes:
        format: of every block.
        namespace: what they depend on besides tokens.
        names: of all blocks from the head of the chain to the last one here.
        token_ids: their contents, from the head on: `len(names) * block_size`.
        first: place of the first block whose keys and values are here.
        data: uint8 [blocks, bytes of a block], the ranks' parts one behind the other.
    """

    format: BlockFormat
    namespace: Namespace
    names: tuple[int, ...]
    token_ids: tuple[int, ...]
    first: int
    data: Tensor


class BlockExchange:
    """Takes blocks out of an engine's cache and puts others' in, between steps. For any thread."""

    def __init__(
        self, shared: SharedLoop, cache: KVCacheManager, runner: ModelRunner, *, enabled: bool
    ) -> None:
        self._shared = shared
        self._cache = cache
        self._runner = runner
        self._enabled = enabled  # whether prefixes are looked for at all
        self._news: BlockChanges | None = None
        self._format: BlockFormat | None = None
        self.num_exported = 0  # blocks
        self.num_imported = 0

    @property
    def format(self) -> BlockFormat:
        """Of this engine's blocks. Raises `InvalidRequest` where they cannot be exchanged."""
        if self._format is None:
            dtype = str(self._runner.storage.keys.dtype).removeprefix("torch.")
            with self._shared.lock:
                shapes = tuple(self._runner.block_shapes())
            self._format = BlockFormat(
                self._shared.loop.numerics, self._cache.block_size, dtype, shapes
            )
        return self._format

    def require_enabled(self) -> None:
        """Raise `InvalidRequest` where prefixes are not cached."""
        self._shared.require_alive()
        if not self._enabled:
            raise InvalidRequest(
                "blocks are exchanged by prefix, and enable_prefix_caching is off."
            )

    def names(self, token_ids: Sequence[int], salt: str | None = None) -> tuple[int, ...]:
        """Names of the full blocks of a prompt under the weights that serve."""
        prefix = PrefixKeys(Namespace(POLICY, self._shared.loop.sequences.versions[POLICY], salt))
        prefix.extend(list(token_ids), self._cache.block_size)
        return tuple(prefix.hashes)

    def count_blocks(self, names: Sequence[int]) -> int:
        """How many blocks at the head of a chain are here; they may be gone when this returns."""
        with self._shared.lock:
            return self._cache.count(names)

    def export_blocks(
        self, names: Sequence[int], first: int = 0, max_bytes: int = MOST_BYTES
    ) -> BlockPiece | None:
        """Blocks of a chain from place `first` on, as many as are here and as `max_bytes` hold (one
        at least).

        `names` begin at the head of the chain. None: block `first` is not here (any more). What was
        found counts as used, so that it is among the last to be reused while its next pieces are
        fetched. Blocks that lack what layers with a window stored in them are not found, nor is
        what follows them.

        Raises `InvalidRequest` where prefixes are not cached, or the weights or the cache sleep.
        """
        self.require_enabled()
        layout = self.format
        most = max(1, max_bytes // layout.block_bytes)
        piece: BlockPiece | None = None

        def read() -> None:
            nonlocal piece
            found = self._cache.find(names)
            table = found.block_ids[first : first + most]
            if not table:
                return
            self._cache.adopt(found.block_ids)
            self._cache.deallocate(found.block_ids)
            end = first + len(table)
            tokens = found.token_ids[: end * layout.block_size]
            data = torch.cat(self._runner.read_blocks(table), dim=1)
            piece = BlockPiece(layout, found.namespace, tuple(names[:end]), tokens, first, data)
            self.num_exported += len(table)

        self._between_steps(read)
        return piece

    def import_blocks(self, piece: BlockPiece) -> int:
        """Take in blocks; returns how many of the chain, from its head on, are here now.

        They are free blocks that hold a prefix, the last to be reused. Where too few are free, or
        what comes before them is not here, fewer are taken, or none.

        Raises `InvalidRequest`, with nothing changed, where format, sizes or names do not fit,
        `VersionGone` where other weights serve.
        """
        self.require_enabled()
        self._check(piece)
        prefix = PrefixKeys(piece.namespace, piece.names)
        num_here, gone = 0, False

        def write() -> None:
            nonlocal num_here, gone
            gone = self._shared.loop.sequences.versions[POLICY] != piece.namespace.version
            if gone:
                return
            table, cached = put_blocks(
                *(self._cache, self._runner, piece.token_ids, prefix, piece.first),
                piece.data.split(piece.format.part_bytes, dim=1),
            )
            num_here = len(table)
            self.num_imported += len(table) - cached
            self._cache.deallocate(table)

        self._between_steps(write)
        if gone:
            self._refuse_version(piece.namespace.version)
        return num_here

    def report(self, lost: bool = False) -> BlockReport:
        """Names that came and went since the last report; the first one, and one after a `lost`
        one, is whole.
        """
        with self._shared.lock:
            if self._news is None:
                self._news = BlockChanges()
            elif lost:
                self._news.forget()
            return self._news.take(self._cache.observe(self._news))

    def _between_steps(self, act: Callable[[], None]) -> None:
        """Call `act` with nothing in flight, and with the cache awake."""
        with self._shared.lock:
            if "kv_cache" in self._shared.life.asleep:
                raise InvalidRequest("the KV cache is asleep; wake() the engine first.")
            self._shared.between_steps(POLICY, act)

    def _check(self, piece: BlockPiece) -> None:
        ours, theirs, space = self.format, piece.format, piece.namespace
        for name in ("numerics", "block_size", "dtype", "shapes"):
            if getattr(ours, name) != getattr(theirs, name):
                raise InvalidRequest(
                    f"blocks of {name} {getattr(theirs, name)!r}; here it is "
                    f"{getattr(ours, name)!r}."
                )
        if space.weight_set != POLICY:
            raise InvalidRequest(
                f"blocks of the weight set {space.weight_set!r} are not exchanged."
            )
        if space.version != self._shared.loop.sequences.versions[POLICY]:
            self._refuse_version(space.version)
        count = len(piece.names) - piece.first
        if not 0 <= piece.first < len(piece.names) or len(piece.names) > self._cache.num_blocks:
            raise InvalidRequest(
                f"blocks [{piece.first}, {len(piece.names)}) are not a piece that fits this cache."
            )
        if len(piece.token_ids) != len(piece.names) * ours.block_size:
            raise InvalidRequest(
                f"{len(piece.token_ids)} token ids do not fill {len(piece.names)} blocks."
            )
        if piece.data.dtype != torch.uint8 or piece.data.shape != (count, ours.block_bytes):
            raise InvalidRequest(
                f"{piece.data.numel()} bytes of {piece.data.dtype} came for {count} blocks of "
                f"{ours.block_bytes}."
            )
        made = PrefixKeys(space)
        made.extend(piece.token_ids, ours.block_size)
        if tuple(made.hashes) != tuple(piece.names):
            raise InvalidRequest("the names of the blocks are not those of their tokens.")

    def _refuse_version(self, version: int) -> None:
        serving = self._shared.loop.sequences.versions[POLICY]
        raise VersionGone(f"blocks of weight version {version}; version {serving} serves.")
