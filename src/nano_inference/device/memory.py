"""Size of the KV cache, the lengths that fit into it, and the table that reports both."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nano_inference.arrays import Device, Dtype
from nano_inference.config import EngineConfig
from nano_inference.core.failures import is_out_of_memory
from nano_inference.core.sequence import POLICY
from nano_inference.device.kv_tensors import (
    common_layout,
    kv_format,
    state_layout,
    storage_key,
    unit_width,
)
from nano_inference.device.state_tensors import state_bytes
from nano_inference.errors import ConfigError, LacksMemory
from nano_inference.kv_cache.sliding_window import UNIFORM, BlockLayout
from nano_inference.models.routes import bytes_per_token
from nano_inference.models.sharding.shard import ModelShard
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.system.machine import free_memory

CPU_SHARE = 0.25  # default part of the available memory


@dataclass(frozen=True, slots=True)
class Claims:
    """Memory of the device that is not available to the KV cache, in bytes.

    On a CPU only the weights are counted, and only for display.

    Attributes:
        weights: Weights of all models.
        workspace: Maximum that a step takes in addition to weights and KV cache.
        graphs: Captured CUDA graphs.
        others: Other memory in use on the card: other processes, the CUDA context.
        total: Memory of the card, or 0 on a CPU.
        estimated: True if no step was run and the workspace is an estimate.
        adapters: Largest adapters that may be loaded later.
    """

    weights: int
    workspace: int = 0
    graphs: int = 0
    others: int = 0
    total: int = 0
    estimated: bool = False
    adapters: int = 0

    @property
    def sum(self) -> int:
        """Sum of all claims."""
        return self.weights + self.workspace + self.graphs + self.others + self.adapters


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Breakdown of the engine's memory. Sizes are in bytes.

    Attributes:
        bytes_per_token: Size of a token that all layers can see. If ranks share a sequence's
            tokens, this rank's share.
        num_blocks: Number of block ids. With sliding-window layers, units limit the memory and ids
            are plentiful.
        num_units: Number of units of memory (see `layout`). Without sliding-window layers, a block
            is a unit.
        layout: Units that a block takes.
        state_bytes: Size of a unit in the separate memory of layers with a state, or 0 if there is
            none.
        workspace: Maximum that a step takes in addition to weights and KV cache. A CPU's is not
            counted (0).
        graphs: Size of CUDA graphs, or 0 without graphs.
        others: Memory of the card in use by others when the engine was built, or 0 on a CPU.
        estimated: True if no step was run to measure the workspace.
        adapters: Memory reserved for adapters, or 0 on a CPU.
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
    adapters: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose keys and values of all layers fit."""
        if self.state_bytes:
            return self.num_blocks * self.block_size
        return self.num_units // self.layout.num_units * self.block_size

    @property
    def sum(self) -> int:
        """Bytes that the engine takes of its device."""
        return self.weights + self.kv_cache + self.workspace + self.graphs + self.adapters

    def num_sequences(self, length: int) -> int:
        """Return how many sequences of this length fit while each computes another token.

        The sequences share no blocks.
        """
        by_ids = self.num_blocks // -(-length // self.block_size)
        return min(by_ids, self.num_units // self.layout.most_units(length, 1, self.block_size))

    def told_states(self) -> str:
        """Return a description of the number of states and of their use by a running sequence."""
        per_sequence = self.layout.most_in_window(1, self.block_size)
        return (
            f"{self.num_units:,} of {_megabytes(self.state_bytes)}, one per block; a running "
            f"sequence needs {per_sequence}, the others serve prefixes"
        )

    def claims(self) -> list[tuple[str, int]]:
        """Return the non-zero claims other than weights and KV cache, by name."""
        workspace = "workspace (est.)" if self.estimated else "workspace"
        claims = [
            (workspace, self.workspace),
            ("CUDA graphs", self.graphs),
            ("adapters (max.)", self.adapters),
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
    """Return the maximum sequence length by models and config, even if memory is too small."""
    limit = min(spec.max_position for spec in specs)
    return min(config.max_model_len or limit, limit)


def plan_memory(
    config: EngineConfig,
    parts: Mapping[str, ModelShard],
    claims: Claims,
    dtype: Dtype,
    device: Device,
    ranks_here: int = 1,
) -> MemoryBudget:
    """Return the memory budget of one rank. Raise `ConfigError` if not even one block fits.

    Every block has room for every model, because any weight set may use it. A rank stores the
    layers and KV heads that it computes. A block takes the same number of units on every rank. If
    several ranks share a CPU's memory, each plans for its part.
    """
    specs, some = [part.whole for part in parts.values()], next(iter(parts.values()))
    asked_len = longest_asked(config, specs)
    # Flex attention indexes the KV tensors by block and does not support units.
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
        adapters=claims.adapters,
    )


def _with_states(
    config: EngineConfig,
    specs: Mapping[str, ModelSpec],
    layout: BlockLayout,
    claims: Claims,
    dtype: Dtype,
    device: Device,
    asked_len: int,
) -> MemoryBudget:
    """Return the budget for models whose layers with a state have a separate memory.

    Keys and states each get half of the memory, and the part that the other cannot use.
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
    dtype: Dtype,
    asked_len: int,
) -> int:
    """Return the bytes of a unit of keys and values, including its states and routed experts."""
    stored = config.block_size // config.context_parallel  # tokens of a block that this rank stores
    size = _bytes_of_keys(specs, layout, kv_format(dtype, config.kv_cache_dtype)) * stored
    size += _bytes_of_states(specs, layout, config.block_size, dtype)
    routes, ids_of_a_unit = _bytes_of_routes(config, specs), -(-asked_len // max(layout.window, 1))
    # If all layers have windows, several blocks use the same unit one after another.
    return size + (-(-routes // layout.num_full) if layout.num_full else routes * ids_of_a_unit)


def _bytes_of_keys(specs: Mapping[str, ModelSpec], layout: BlockLayout, kept: KvFormat) -> int:
    """Return the bytes of a token's keys and values in a unit, over all storages."""
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
    specs: Mapping[str, ModelSpec], layout: BlockLayout, block_size: int, dtype: Dtype
) -> int:
    """Return the bytes of a block's states, over all storages."""
    kept = {storage_key(spec, layout, name): spec.state for name, spec in specs.items()}
    return sum(state_bytes(each, block_size, dtype) for each in kept.values() if each is not None)


def _bytes_of_routes(config: EngineConfig, specs: Mapping[str, ModelSpec]) -> int:
    """Return the bytes of a block's routed experts, or 0 if they are not recorded."""
    moe = specs[POLICY].moe
    if moe is None or not config.enable_return_routed_experts:
        return 0
    return bytes_per_token(moe) * config.block_size


def _for_the_cache(
    config: EngineConfig, claims: Claims, device: Device, smallest: int, ranks_here: int
) -> int:
    """Return the bytes for the KV cache.

    Raise `ConfigError` if less than `smallest`, a block's size.
    """
    asked = config.kv_cache_memory
    if asked is not None and asked < smallest:
        raise ConfigError(
            f"kv_cache_memory of {asked:,} bytes is too small for one block of {config.block_size} "
            f"tokens; give at least {smallest:,} bytes."
        )
    if not claims.total:
        free = free_memory()
        memory = asked or int(free.size * CPU_SHARE / ranks_here)
        if memory < smallest:
            shared = f", shared by {ranks_here} ranks" if ranks_here > 1 else ""
            raise LacksMemory(
                f"a quarter of the free memory{free.told_limit}{shared}, {gibibytes(memory)}, "
                f"is too small for one block of {config.block_size} tokens; give kv_cache_memory "
                f"of at least {smallest:,} bytes."
            )
        return memory
    require_weights_fit(claims, device)
    if asked is not None:
        left = claims.total - claims.sum
        if asked > left and not claims.estimated:
            raise LacksMemory(
                f"kv_cache_memory of {gibibytes(asked)} does not fit on {device}: {_told(claims)} "
                f"leave {gibibytes(max(left, 0))} of its {gibibytes(claims.total)}; give at most "
                f"{max(left, 0):,} bytes"
                f"{_less_workspace(config, claims, asked, claims.total)}."
            )
        return asked
    memory = int(claims.total * config.gpu_memory_utilization) - claims.sum
    if memory < smallest and not claims.estimated:
        raise LacksMemory(_no_room(config, claims, device, smallest))
    return max(memory, smallest)  # only a measured value is rejected, never an estimate


def _require_free(config: EngineConfig, claims: Claims, size: int, ranks_here: int) -> None:
    """Raise `LacksMemory` if a CPU's memory cannot hold the requested KV caches of all ranks here.

    `size` is the bytes of each rank's cache.
    """
    if claims.total or config.kv_cache_memory is None:
        return
    free = free_memory()
    if size * ranks_here > free.size:
        ranks = f" on each of {ranks_here} ranks" if ranks_here > 1 else ""
        raise LacksMemory(
            f"kv_cache_memory of {gibibytes(config.kv_cache_memory)}{ranks} does not fit in "
            f"memory: {gibibytes(free.size)} are free{free.told_limit}; give at most "
            f"{free.size // ranks_here:,} bytes."
        )


def lacks_memory(problem: BaseException) -> bool:
    """Return True if an error means that a device, torch or Python is out of memory."""
    lacks = isinstance(problem, MemoryError) or is_out_of_memory(problem)
    # torch raises a plain RuntimeError on a CPU
    return lacks or "DefaultCPUAllocator" in str(problem)


def no_memory_for(what: str, device: Device, cure: str) -> LacksMemory:
    """Return an error about a failed allocation on a CPU, with the free memory."""
    free = free_memory()
    return LacksMemory(
        f"{what} cannot be allocated: {gibibytes(free.size)} of {device}'s memory are free"
        f"{free.told_limit}; {cure}."
    )


def require_weights_fit(claims: Claims, device: Device) -> None:
    """Raise `LacksMemory` if the weights exceed the card's free memory."""
    free = max(claims.total - claims.others, 0)
    if claims.weights > free:
        raise LacksMemory(
            f"the weights take {gibibytes(claims.weights)}, but only {gibibytes(free)} of "
            f"{device}'s {gibibytes(claims.total)} are free; use a smaller model, a smaller dtype, "
            "or a card that no other program uses."
        )


def _no_room(config: EngineConfig, claims: Claims, device: Device, smallest: int) -> str:
    """Return an error message that names a setting and value that leave room for a block."""
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
    current = f"gpu_memory_utilization={config.gpu_memory_utilization:g}"
    return (
        f"{what}, which leaves no room for a KV cache under {current}; give it at least "
        f"{share:.2f}{less}."
    )


def _less_workspace(config: EngineConfig, claims: Claims, smallest: int, memory: int) -> str:
    """Return advice on the `max_tokens_per_batch` that leaves room for a cache of `smallest` bytes.

    Return an empty string if there is no such value.
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
    claimed = [f"{name} ({gibibytes(size)})" for name, size in parts if size]
    return ", ".join(claimed[:-1]) + " and " + claimed[-1] if len(claimed) > 1 else claimed[0]


def share_for(budget: MemoryBudget, length: int, total: int) -> float:
    """Return the share of a card's memory that holds one sequence of `length` tokens.

    The share is rounded up to hundredths.
    """
    blocks = -(-length // budget.block_size)
    cache = blocks * budget.block_size * budget.bytes_per_token
    claimed = budget.weights + budget.workspace + budget.graphs + budget.others
    return math.ceil(100 * (claimed + cache) / total) / 100


def _longest(layout: BlockLayout, num_units: int, config: EngineConfig) -> int:
    """Return the length in blocks of the longest sequence that can run by itself.

    Chunks are shortened to fit if chunked prefill is enabled.
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
    """Return the number of block ids: enough that units run out first."""
    if layout.num_full:
        return num_units // layout.num_full
    # All layers slide: a block that left the window takes no memory, but keeps its id, and its name
    # may still give a prefix hit.
    longest = -(-max_model_len // config.block_size)
    return min(
        config.max_batch_size * longest,
        max(longest, num_units * -(-max_model_len // layout.window)),
    )


def gibibytes(size: int) -> str:
    """Return a size in GiB or MiB for a message."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else _megabytes(size)


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
