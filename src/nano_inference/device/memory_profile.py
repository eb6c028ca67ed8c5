"""Measurement of a step's memory in addition to weights and KV cache.

The largest step runs before the cache is allocated.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nano_inference.config import EngineConfig
from nano_inference.core.sequence import POLICY
from nano_inference.device.adapters import reserved_bytes, with_and_without_adapters
from nano_inference.device.kv_tensors import (
    KVStorage,
    common_layout,
    kv_shape,
    state_layout,
)
from nano_inference.device.memory import Claims, gibibytes, longest_asked
from nano_inference.device.units import UnitMap
from nano_inference.device.warm_up import run_all_kinds
from nano_inference.errors import ConfigError, RankLost, one_line
from nano_inference.kv_cache.block_pool import Block
from nano_inference.kv_cache.sliding_window import UnitPool
from nano_inference.models.decoder import Decoder
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch, to_device
from nano_inference.types import SamplingParams

# size of the storage for trial steps: every block table repeats these blocks
SCRATCH_BLOCKS = 4
MOST_BEST = 20  # top logprobs per row in trial steps
TILE_ROWS = 1024  # maximum scored rows whose logits an estimate counts as in memory together

# Sampling parameters of the largest draw: all features together.
GREEDIEST = SamplingParams(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: -1.0},
    top_logprobs=MOST_BEST,
    raw_logprobs=True,
    sampling_mask=True,
)

# captures graphs, releases them, and returns their bytes
GraphMemory = Callable[[Mapping[str, Decoder], Mapping[str, KVStorage]], int]


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory use of a card at one moment, in bytes.

    Attributes:
        total: Memory of the card.
        free: Memory that no process has allocated.
        reserved: Memory that torch has allocated in this process.
        allocated: Part of `reserved` in use by tensors.
        peak: Maximum of `allocated` since `DeviceMemory.reset_peak`.
    """

    total: int
    free: int
    reserved: int
    allocated: int
    peak: int

    @property
    def used(self) -> int:
        """Memory that is unavailable to a new tensor: neither free nor in torch's cache."""
        return self.total - self.free - (self.reserved - self.allocated)


class DeviceMemory:
    """Memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> MemoryReading:
        """Return the current memory use. Nothing may be running."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryReading(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(self._device),
            allocated=torch.cuda.memory_allocated(self._device),
            peak=torch.cuda.max_memory_allocated(self._device),
        )

    def reset_peak(self) -> None:
        """Restart the measurement of the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """Return unused memory to the card."""
        gc.collect()
        torch.cuda.empty_cache()


def measure(
    config: EngineConfig,
    models: Mapping[str, Decoder],
    weights: int,
    memory: DeviceMemory,
    graph_memory: GraphMemory | None = None,
) -> Claims:
    """Measure what the card's memory holds in addition to the KV cache.

    Runs the largest step and every variant of a draw once, so that no kernel is compiled later, and
    captures graphs once.

    Args:
        config: Config of the engine.
        models: Models by weight set, with their weights.
        weights: Size of the weights in bytes.
        memory: Memory of the card.
        graph_memory: Function that captures the graphs on a scratch storage, releases them, and
            returns their bytes.

    Raises `ConfigError` if the step does not fit.
    """
    memory.release()
    storages = _scratch(config, models)
    memory.reset_peak()
    before = memory.read()
    try:
        run_largest_steps(config, models, storages)
        run_all_kinds(config, models, storages)
    except torch.OutOfMemoryError:
        raise ConfigError(_too_large(config, models, weights, before)) from None
    except RankLost:  # has the error of another rank as its cause
        raise
    except Exception as problem:
        raise ConfigError(
            f"the CUDA kernels fail on the largest step ({one_line(problem)}); use "
            "backend='reference', and find the kernel with `nano-inference info --selftest`."
        ) from problem
    workspace = max(memory.read().peak - before.allocated, 0)
    memory.release()
    graphs = _graphs(config, models, storages, weights, graph_memory)
    del storages
    memory.release()
    after = memory.read()
    # includes kernels, the CUDA context and this process's other tensors
    others = max(after.used - weights, 0)
    adapters = reserved_bytes(config, models[POLICY].part)
    return Claims(weights, workspace, graphs, others, after.total, adapters=adapters)


def _graphs(
    config: EngineConfig,
    models: Mapping[str, Decoder],
    storages: Mapping[str, KVStorage],
    weights: int,
    graph_memory: GraphMemory | None,
) -> int:
    """Return the bytes of captured graphs. Raise `ConfigError` if they cannot be captured."""
    if graph_memory is None:
        return 0
    try:
        return graph_memory(models, storages)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"the CUDA graphs of batches up to max_batch_size={config.max_batch_size} do not fit "
            f"next to the weights ({gibibytes(weights)}); lower max_batch_size to "
            f"{max(config.max_batch_size // 2, 1)}."
        ) from None
    except Exception as problem:
        raise ConfigError(
            f"CUDA graphs cannot be captured ({one_line(problem)}); cuda_graphs=False runs without "
            "them."
        ) from problem


@torch.inference_mode()
def run_largest_steps(
    config: EngineConfig, models: Mapping[str, Decoder], storages: Mapping[str, KVStorage]
) -> None:
    """Run the steps that take the most memory.

    These are a step of the maximum number of rows, all scored, and a step of the maximum number of
    decodes at full length. If the engine has adapters, both also run with one.
    """
    specs = [model.spec for model in models.values()]
    longest = longest_asked(config, specs)
    drawn = _sampling(min(config.scheduler.max_draws, config.max_tokens_per_batch))
    for lengths, scored in ((_chunk_lengths(config, longest), True), ([1] * len(drawn), False)):
        for name, model in models.items():
            batch = _batch(lengths, longest, config.block_size, name, scored)
            for variant in with_and_without_adapters(config, model, batch):
                result = model.forward(to_device(variant, model.device), storages[name])
                if model.is_last_stage:
                    model.draw(result.hidden, to_device(drawn, model.device), result.rows)
                del result


def guess(
    config: EngineConfig, specs: Iterable[ModelSpec], dtype: torch.dtype, kernels: bool
) -> int:
    """Return an estimate of a step's bytes in addition to weights and KV cache, without running
    one.

    Args:
        config: Config of the engine.
        specs: Specifications of the models.
        dtype: Dtype of weights and activations.
        kernels: True if attention is a kernel. The reference's attention lists the slots that each
            row reads.
    """
    specs = list(specs)
    rows, size = config.max_tokens_per_batch, dtype.itemsize
    most = 0
    for spec in specs:
        kinds = [spec.layer(layer) for layer in range(spec.num_layers)]
        heads = max(2 * (spec.num_heads * kind.head_dim + kind.kept) for kind in kinds)
        inner = max(kind.intermediate_size for kind in kinds)
        a_row = 3 * 4 * spec.hidden_size + size * (heads + 3 * inner)
        a_row += 3 * 4 * spec.num_layers * spec.layer_inputs
        # all products of a row, before and after their summation
        if spec.moe is not None:
            a_row += spec.moe.experts_per_token * (
                8 * spec.hidden_size + 3 * size * spec.moe.intermediate_size
            )
            if spec.moe.shared is not None:  # its products are concatenated to the others
                a_row += 4 * (spec.moe.experts_per_token + 2) * spec.hidden_size
                a_row += 3 * size * spec.moe.shared.intermediate_size
        if not kernels:
            a_row += 9 * longest_asked(config, specs)  # a slot and a flag for each key
        logits = 2 * 4 * spec.vocab_size * max(config.scheduler.max_draws, min(rows, TILE_ROWS))
        most = max(most, rows * a_row + logits)
    return most


def _scratch(config: EngineConfig, models: Mapping[str, Decoder]) -> dict[str, KVStorage]:
    """Return storages of a few blocks, with units if those of the engine will have units: kernels
    that read the map of units are separate kernels.
    """
    units = _scratch_units(config, models)
    shared: dict[object, KVStorage] = {}
    storages: dict[str, KVStorage] = {}
    for name, model in models.items():
        key = (kv_shape(model.spec), units is not None and model.spec.windows)
        if key not in shared:
            shared[key] = KVStorage(
                model.spec,
                SCRATCH_BLOCKS,
                config.block_size,
                model.dtype,
                model.device,
                units,
                config.kv_cache_dtype,
            )
            for tensor in shared[key].tensors:  # uninitialized memory may contain NaN
                tensor.zero_()
        storages[name] = shared[key]
    return storages


def _scratch_units(config: EngineConfig, models: Mapping[str, Decoder]) -> UnitMap | None:
    """Return the units of a few blocks, or None if a block is a unit."""
    parts = [model.part for model in models.values()]
    specs = [part.whole for part in parts]
    stages = parts[0].position.mesh.pipeline
    layout = state_layout(specs, config.block_size)
    if layout is None:
        layout = common_layout(specs, longest_asked(config, specs), stages)
    if not layout.num_sliding:
        return None
    pool = UnitPool(layout.num_units * SCRATCH_BLOCKS, SCRATCH_BLOCKS, layout)
    for block in range(SCRATCH_BLOCKS):
        pool.assign(Block(block))
    units = UnitMap(pool, next(iter(models.values())).device)
    pool.changed.clear()  # the map has just been made of them
    return units


def _chunk_lengths(config: EngineConfig, longest: int) -> list[int]:
    """Return the chunk lengths of a step with the maximum numbers of rows and of chunks.

    The first chunks have the maximum length.
    """
    room = config.max_tokens_per_batch
    most = min(config.max_chunk_tokens or longest, longest)
    lengths: list[int] = []
    for remaining in reversed(range(min(config.max_batch_size, room))):
        lengths.append(min(most, room - remaining))
        room -= lengths[-1]
    return lengths


def _batch(
    lengths: Sequence[int], longest: int, block_size: int, weight_set: str, scored: bool
) -> ForwardBatch:
    """Return chunks that end at the maximum length, all on the same few blocks."""
    blocks = [index % SCRATCH_BLOCKS for index in range(-(-longest // block_size))]
    ends = torch.tensor(lengths).cumsum(0)
    return batch_of_rows(
        [Rows([0] * length, longest - length, blocks) for length in lengths],
        block_size,
        draws=(ends - 1).tolist(),
        scores=[(row, 0) for row in range(int(ends[-1]))] if scored else (),
        num_best=MOST_BEST if scored else 0,
        weight_set=weight_set,
    )


def _sampling(num_samples: int) -> SamplingBatch:
    return sampling_batch([DrawRequest(GREEDIEST, row, (0, row, 1)) for row in range(num_samples)])


def _too_large(
    config: EngineConfig, models: Mapping[str, Decoder], weights: int, before: MemoryReading
) -> str:
    room = before.total - before.used
    model = next(iter(models.values()))
    guessed = guess(config, [each.spec for each in models.values()], model.dtype, kernels=True)
    tokens = min(
        config.max_tokens_per_batch // 2, config.max_tokens_per_batch * room // max(guessed, 1)
    )
    return (
        f"a step of max_tokens_per_batch={config.max_tokens_per_batch} and "
        f"max_batch_size={config.max_batch_size} does "
        f"not fit: the weights take {gibibytes(weights)}, and {gibibytes(room)} of "
        f"{gibibytes(before.total)} are free; lower max_tokens_per_batch to {max(tokens, 1)}."
    )
