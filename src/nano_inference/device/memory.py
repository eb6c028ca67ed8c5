"""How much memory the KV cache gets, what fits into it, and the table that says so."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nano_inference.config import EngineConfig
from nano_inference.core.sequence import POLICY
from nano_inference.device.kv_tensors import (
    common_layout,
    kv_format,
    state_layout,
    storage_key,
    unit_width,
)
from nano_inference.device.state_tensors import state_bytes
from nano_inference.errors import ConfigError
from nano_inference.kv_cache.sliding_window import UNIFORM, BlockLayout
from nano_inference.models.routes import bytes_per_token
from nano_inference.models.sharding.shard import ModelShard
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.system.machine import free_memory

CPU_SHARE = 0.25  # of the available memory


@dataclass(frozen=True, slots=True)
class Claims:
    """What else the device's memory is for, in bytes. Of a CPU's only the weights are counted, and
    only to be shown.

    Attributes:
        weights: of all models.
        workspace: most that a step takes beside them.
        graphs: what captured CUDA graphs take.
        others: what stands on the card beside this engine: other processes, the CUDA context.
        total: memory of the card; 0: a CPU.
        estimated: nothing was run, the workspace is a guess.
    """

    weights: int
    workspace: int = 0
    graphs: int = 0
    others: int = 0
    total: int = 0
    estimated: bool = False

    @property
    def sum(self) -> int:
        """All of it."""
        return self.weights + self.workspace + self.graphs + self.others


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Where the engine's memory goes. Sizes in bytes.

    Attributes:
        bytes_per_token: of a token that all layers can see; where ranks share a sequence's tokens,
            this one's share.
        num_blocks: block ids. With sliding-window layers the memory is that of units, and ids are
            plenty.
        num_units: pieces of memory; see `layout`. Without sliding-window layers a block is one.
        layout: what a block costs.
        state_bytes: of one unit, where units are of layers with a state, a memory beside that of
            keys and values; 0: there is no such memory.
        workspace: most that a step takes beside weights and KV cache; 0 on a CPU, where it is not
            counted.
        graphs: what CUDA graphs take; 0 without.
        others: what stood on the card beside the engine when it was built; 0 on a CPU.
        estimated: no step was run to measure the workspace.
    """

    device: str
    weights: int
    kv_cache: int
    bytes_per_token: int
    num_blocks: int
    num_units: int
    block_size: int
    max_model_len: int
    layout: BlockLayout = UNIFORM
    workspace: int = 0
    graphs: int = 0
    others: int = 0
    estimated: bool = False
    state_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values of all layers fit at once."""
        if self.state_bytes:
            return self.num_blocks * self.block_size
        return self.num_units // self.layout.num_units * self.block_size

    def num_sequences(self, length: int) -> int:
        """How many sequences of so many tokens fit while each computes one more token; none shares
        a block.
        """
        by_ids = self.num_blocks // -(-length // self.block_size)
        return min(by_ids, self.num_units // self.layout.most_units(length, 1, self.block_size))

    def told_states(self) -> str:
        """How many states there are, and what a running sequence takes of them."""
        each = self.layout.most_in_window(1, self.block_size)
        return (
            f"{self.num_units:,} of {_megabytes(self.state_bytes)}, one a block; a sequence that "
            f"runs needs {each}, the others serve prefixes"
        )

    def claims(self) -> list[tuple[str, int]]:
        """What takes memory beside weights and KV cache, by name; only what does."""
        workspace = "workspace, guessed" if self.estimated else "workspace"
        claims = [
            (workspace, self.workspace),
            ("CUDA graphs", self.graphs),
            ("held by others", self.others),
        ]
        return [claim for claim in claims if claim[1]]

    def __str__(self) -> str:
        states = self.state_bytes * self.num_units
        slides = self.layout.num_sliding and not states
        whole = self.num_tokens // self.block_size
        blocks = f"{whole:,} blocks of {self.block_size} tokens"
        rows = [
            ("weights", _megabytes(self.weights)),
            *((name, _megabytes(size)) for name, size in self.claims()),
            ("KV cache", f"{_megabytes(self.kv_cache - states)} = {blocks}"),
            ("a token takes", f"{self.bytes_per_token:,} bytes"),
        ]
        if self.state_bytes:
            rows.append(("states", f"{_megabytes(states)} = {self.told_states()}"))
        elif self.layout.num_sliding:
            later = self.bytes_per_token * self.layout.num_full // self.layout.num_units
            rows.append(
                (
                    "  further back",
                    f"{later:,} bytes, once it has left the window of {self.layout.window:,}",
                )
            )
        rows += [
            (
                "tokens that fit",
                f"{self.num_tokens:,}{' within windows' if slides else ''}",
            ),
            ("longest sequence", f"{self.max_model_len:,} tokens"),
        ]
        if self.layout.num_sliding:
            rows.append(("  of which fit", f"{self.num_sequences(self.max_model_len):,}"))
        return "\n".join(
            [f"memory on {self.device}", *(f"  {name:<17} {value}" for name, value in rows)]
        )


def longest_asked(config: EngineConfig, specs: Sequence[ModelSpec]) -> int:
    """Tokens of the longest sequence that the models and the configuration allow, whether it fits
    or not.
    """
    limit = min(spec.max_position for spec in specs)
    return min(config.max_model_len or limit, limit)


def plan_memory(
    config: EngineConfig,
    parts: Mapping[str, ModelShard],
    claims: Claims,
    dtype: torch.dtype,
    device: torch.device,
    ranks_here: int = 1,
) -> MemoryBudget:
    """How many blocks the KV cache gets on one rank. Raises `ConfigError` where not even one token
    fits.

    Every block has room for every model: blocks belong to whichever weight set takes them. A rank
    keeps the layers and KV heads that it computes; what a block costs in units is the same on every
    rank. Of several ranks that share a CPU's memory each plans for its part.
    """
    specs, some = [part.whole for part in parts.values()], next(iter(parts.values()))
    asked_len = longest_asked(config, specs)
    # flex walks the KV tensors by itself and knows blocks only.
    knows_units = config.attention != "flex"
    held = {name: part.spec for name, part in parts.items()}
    states = state_layout(specs, config.block_size)
    if states is not None:
        return _with_states(config, held, states, claims, dtype, device, asked_len)
    layout = (
        common_layout(specs, asked_len, some.position.mesh.pipeline) if knows_units else UNIFORM
    )
    unit_bytes = _bytes_of_unit(config, held, layout, dtype, asked_len)
    memory = _for_the_cache(config, claims, device, unit_bytes * layout.num_units, ranks_here)
    chunk = min(config.max_tokens_per_batch, config.max_chunk_tokens or asked_len, asked_len)
    useful = config.max_batch_size * layout.most_units(
        asked_len, chunk if config.enable_chunked_prefill else asked_len, config.block_size
    )
    num_units = min(memory // unit_bytes, useful)
    _require_free(config, claims, num_units * unit_bytes, ranks_here)
    max_model_len = min(asked_len, _longest(layout, num_units, config) * config.block_size)
    return MemoryBudget(
        device=str(device),
        weights=claims.weights,
        kv_cache=num_units * unit_bytes,
        bytes_per_token=unit_bytes * layout.num_units // config.block_size,
        num_blocks=_num_blocks(layout, num_units, max_model_len, config),
        num_units=num_units,
        block_size=config.block_size,
        max_model_len=max_model_len,
        layout=layout,
        workspace=claims.workspace,
        graphs=claims.graphs,
        others=claims.others,
        estimated=claims.estimated,
    )


def _with_states(
    config: EngineConfig,
    specs: Mapping[str, ModelSpec],
    layout: BlockLayout,
    claims: Claims,
    dtype: torch.dtype,
    device: torch.device,
    asked_len: int,
) -> MemoryBudget:
    """The same of models whose layers with a state have a memory of their own, of so many units.

    Either gets half of the memory, and what the other has no use for.
    """
    size = config.block_size
    kept = kv_format(dtype, config.kv_cache_dtype)
    block_bytes = _bytes_of_keys(specs, layout, kept) * size + _bytes_of_routes(config, specs)
    unit_bytes = _bytes_of_states(specs, layout, size, dtype)
    least = layout.most_in_window(1, size)
    memory = _for_the_cache(config, claims, device, block_bytes + least * unit_bytes, 1)
    longest = -(-asked_len // size)
    chunk = min(config.max_tokens_per_batch, config.max_chunk_tokens or asked_len, asked_len)
    chunk = chunk if config.enable_chunked_prefill else asked_len
    useful_blocks = config.max_batch_size * longest
    useful_units = config.max_batch_size * layout.most_units(asked_len, chunk, size)
    num_units = max(least, min(useful_units, memory // 2 // unit_bytes))
    num_blocks = min(useful_blocks, (memory - num_units * unit_bytes) // block_bytes)
    num_units = min(useful_units, (memory - num_blocks * block_bytes) // unit_bytes)
    _require_free(config, claims, num_blocks * block_bytes + num_units * unit_bytes, ranks_here=1)
    blocks = min(num_blocks, _longest(layout, num_units, config))
    return MemoryBudget(
        device=str(device),
        weights=claims.weights,
        kv_cache=num_blocks * block_bytes + num_units * unit_bytes,
        bytes_per_token=block_bytes // size,
        num_blocks=num_blocks,
        num_units=num_units,
        block_size=size,
        max_model_len=min(asked_len, blocks * size),
        layout=layout,
        workspace=claims.workspace,
        graphs=claims.graphs,
        others=claims.others,
        estimated=claims.estimated,
        state_bytes=unit_bytes,
    )


def _bytes_of_unit(
    config: EngineConfig,
    specs: Mapping[str, ModelSpec],
    layout: BlockLayout,
    dtype: torch.dtype,
    asked_len: int,
) -> int:
    """Return the bytes of a unit of keys and values, with its states and experts."""
    stored = config.block_size // config.context_parallel  # tokens of a block that this rank stores
    size = _bytes_of_keys(specs, layout, kv_format(dtype, config.kv_cache_dtype)) * stored
    size += _bytes_of_states(specs, layout, config.block_size, dtype)
    routes, ids_of_a_unit = _bytes_of_routes(config, specs), -(-asked_len // max(layout.window, 1))
    # blocks of layers with a window alone share a unit one after the other
    return size + (-(-routes // layout.num_full) if layout.num_full else routes * ids_of_a_unit)


def _bytes_of_keys(specs: Mapping[str, ModelSpec], layout: BlockLayout, kept: KvFormat) -> int:
    """Bytes of a token's keys and values in a unit, in all storages."""
    sizes = {
        storage_key(spec, layout, name): (
            unit_width(spec, layout, kept),
            kept.stored.itemsize,
            spec.kv_tensors,
        )
        for name, spec in specs.items()
    }
    return sum(math.prod(each) for each in sizes.values())


def _bytes_of_states(
    specs: Mapping[str, ModelSpec], layout: BlockLayout, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes that layers with a state keep of one block, in all storages."""
    kept = {storage_key(spec, layout, name): spec.state for name, spec in specs.items()}
    return sum(state_bytes(each, block_size, dtype) for each in kept.values() if each is not None)


def _bytes_of_routes(config: EngineConfig, specs: Mapping[str, ModelSpec]) -> int:
    """Bytes of the record of a block's experts, where there is one."""
    moe = specs[POLICY].moe
    if moe is None or not config.enable_return_routed_experts:
        return 0
    return bytes_per_token(moe) * config.block_size


def _for_the_cache(
    config: EngineConfig, claims: Claims, device: torch.device, smallest: int, ranks_here: int
) -> int:
    """Bytes for the KV cache, at least `smallest`: those of one block. Raises `ConfigError`."""
    asked = config.kv_cache_memory
    if asked is not None and asked < smallest:
        raise ConfigError(
            f"kv_cache_memory of {asked:,} bytes holds no block of {config.block_size} tokens; "
            "give at least "
            f"{smallest:,} bytes."
        )
    if not claims.total:
        free = free_memory()
        memory = asked or int(free.size * CPU_SHARE / ranks_here)
        if memory < smallest:
            shared = f", shared by {ranks_here} ranks" if ranks_here > 1 else ""
            raise ConfigError(
                f"a quarter of the free memory{free.told_limit}{shared}, {gibibytes(memory)}, "
                f"holds no block of {config.block_size} tokens; give kv_cache_memory of at least "
                f"{smallest:,} bytes."
            )
        return memory
    require_weights_fit(claims, device)
    if asked is not None:
        left = claims.total - claims.sum
        if asked > left and not claims.estimated:
            raise ConfigError(
                f"kv_cache_memory of {gibibytes(asked)} does not fit on {device}: {_told(claims)} "
                "leave "
                f"{gibibytes(max(left, 0))} of its {gibibytes(claims.total)}; give at most "
                f"{max(left, 0):,} bytes"
                f"{_less_workspace(config, claims, asked, claims.total)}."
            )
        return asked
    memory = int(claims.total * config.gpu_memory_utilization) - claims.sum
    if memory < smallest and not claims.estimated:
        raise ConfigError(_no_room(config, claims, device, smallest))
    return max(memory, smallest)  # of a guess nothing follows


def _require_free(config: EngineConfig, claims: Claims, size: int, ranks_here: int) -> None:
    """Raise `ConfigError` where a CPU's memory cannot hold the KV caches that were asked for, of so
    many bytes on each rank here.
    """
    if claims.total or config.kv_cache_memory is None:
        return
    free = free_memory()
    if size * ranks_here > free.size:
        ranks = f" on each of {ranks_here} ranks" if ranks_here > 1 else ""
        raise ConfigError(
            f"kv_cache_memory of {gibibytes(config.kv_cache_memory)}{ranks} does not fit in "
            f"memory: {gibibytes(free.size)} are free{free.told_limit}; give at most "
            f"{free.size // ranks_here:,} bytes."
        )


def lacks_memory(problem: BaseException) -> bool:
    """Whether a device, torch or Python had no memory to give."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    # torch has no type for it on a CPU
    return isinstance(problem, kinds) or "DefaultCPUAllocator" in str(problem)


def no_memory_for(what: str, device: torch.device, cure: str) -> ConfigError:
    """An error that says what could not be allocated on a CPU, and how much is free there."""
    free = free_memory()
    return ConfigError(
        f"{what} cannot be allocated: {gibibytes(free.size)} of {device}'s memory are free"
        f"{free.told_limit}; {cure}."
    )


def require_weights_fit(claims: Claims, device: torch.device) -> None:
    """Raise `ConfigError` where the weights alone are more than the card has left."""
    free = max(claims.total - claims.others, 0)
    if claims.weights > free:
        raise ConfigError(
            f"the weights take {gibibytes(claims.weights)}, and {gibibytes(free)} of the "
            f"{gibibytes(claims.total)} of "
            f"{device} are free; use a smaller model, a dtype of fewer bytes, or a card that "
            "no other program uses."
        )


def _no_room(config: EngineConfig, claims: Claims, device: torch.device, smallest: int) -> str:
    """Which setting would leave room for a block, and at which value."""
    needed = claims.sum + smallest
    share = math.ceil(100 * needed / claims.total) / 100
    what = (
        f"{_told(claims)} take {gibibytes(claims.sum)} of the {gibibytes(claims.total)} of {device}"
    )
    less = _less_workspace(
        config, claims, smallest, int(claims.total * config.gpu_memory_utilization)
    )
    if share > 1:
        return f"{what}, which leaves no room for a KV cache; use a smaller model{less}."
    own = f"gpu_memory_utilization={config.gpu_memory_utilization:g}"
    return (
        f"{what}, which leaves no room for a KV cache under {own}; give it at least "
        f"{share:.2f}{less}."
    )


def _less_workspace(config: EngineConfig, claims: Claims, smallest: int, memory: int) -> str:
    """The tokens of a step whose workspace would leave so many bytes, as advice; nothing where
    there are none.
    """
    room = memory - (claims.sum - claims.workspace) - smallest
    tokens = config.max_tokens_per_batch * max(room, 0) // max(claims.workspace, 1)
    if not 0 < tokens < config.max_tokens_per_batch:
        return ""
    return f", or lower max_tokens_per_batch from {config.max_tokens_per_batch} to {tokens}"


def _told(claims: Claims) -> str:
    parts = [
        ("weights", claims.weights),
        ("a step's workspace", claims.workspace),
        ("CUDA graphs", claims.graphs),
        ("others on the card", claims.others),
    ]
    told = [f"{name} ({gibibytes(size)})" for name, size in parts if size]
    return ", ".join(told[:-1]) + " and " + told[-1] if len(told) > 1 else told[0]


def share_for(budget: MemoryBudget, length: int, total: int) -> float:
    """The share of a card's memory that would hold one sequence of so many tokens; rounded up to
    hundredths.
    """
    blocks = -(-length // budget.block_size)
    cache = blocks * budget.block_size * budget.bytes_per_token
    claimed = budget.weights + budget.workspace + budget.graphs + budget.others
    return math.ceil(100 * (claimed + cache) / total) / 100


def _longest(layout: BlockLayout, num_units: int, config: EngineConfig) -> int:
    """Blocks of the longest sequence that can run alone. A chunk is cut to what fits, if it may be
    cut at all.
    """
    whole = num_units // layout.num_units
    if not layout.num_sliding or not config.enable_chunked_prefill:
        return whole
    within = layout.most_in_window(1, config.block_size)
    if whole < within:
        return whole
    if not layout.num_full:
        return 2**62
    return (num_units - layout.num_sliding * within) // layout.num_full


def _num_blocks(
    layout: BlockLayout, num_units: int, max_model_len: int, config: EngineConfig
) -> int:
    """Block ids: so many that units run out first."""
    if layout.num_full:
        return num_units // layout.num_full
    # All layers slide: what left the window takes no memory, but its id is held, and its name may
    # lead to a match.
    longest = -(-max_model_len // config.block_size)
    return min(
        config.max_batch_size * longest,
        max(longest, num_units * -(-max_model_len // layout.window)),
    )


def gibibytes(size: int) -> str:
    """A size for a sentence."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else _megabytes(size)


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
