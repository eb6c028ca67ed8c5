"""Construction of an engine's parts from its plan: models, KV tensors, cache, runner."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nano_inference.arrays import HOST, Device, dtype_name, is_tensor, on_device
from nano_inference.checkpoints.loading import load_params, stored_shapes
from nano_inference.checkpoints.packed import load_packed
from nano_inference.config import MTP, SELF, EngineConfig
from nano_inference.core.sequence import DRAFT, POLICY, REFERENCE
from nano_inference.device.backends import (
    captures_graphs,
    device_of,
    num_threads,
    start_up_line,
    try_attention,
)
from nano_inference.device.kept_files import DEFAULT_BYTES, KeptFiles
from nano_inference.device.kv_tensors import KVStorage, storage_key
from nano_inference.device.memory import (
    Claims,
    MemoryBudget,
    gibibytes,
    lacks_memory,
    longest_asked,
    no_memory_for,
    plan_memory,
    require_weights_fit,
    share_for,
)
from nano_inference.device.quantization import told_weights
from nano_inference.device.runner import ModelRunner
from nano_inference.device.units import UnitMap
from nano_inference.drafts.heads import EagleSpec, HeadWeights
from nano_inference.drafts.model import spread_layers
from nano_inference.errors import ConfigError
from nano_inference.features import CALL_LIMITS, Setting, require
from nano_inference.kv_cache.caches import CACHES, KVCache
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.mtp import whole_table
from nano_inference.models.parameters.storage import coded_copies, formats_of, num_bytes
from nano_inference.models.parameters.table import param_table
from nano_inference.models.routes import RouteRecord
from nano_inference.models.spec.mtp import PARAMS, MtpSpec
from nano_inference.models.taps import Taps
from nano_inference.ops.formats import FILE
from nano_inference.ops.interface import Numerics
from nano_inference.ranks.build import EnginePlan, Rank, memory_of, plan_engine

if TYPE_CHECKING:
    from nano_inference.device.memory_profile import DeviceMemory, GraphMemory
    from nano_inference.device.pools import EnginePools

logger = logging.getLogger("nano_inference")

DRAFTING_SEQS = 16  # maximum sequences with drafts beyond their last block


@dataclass(frozen=True)
class Parts:
    """Parts of an engine."""

    config: EngineConfig  # with `quantization` resolved
    folder: Path  # folder of the policy
    # holds the models and KV tensors by weight set; sets of equal shape share KV tensors
    runner: ModelRunner
    cache: KVCache
    memory_budget: MemoryBudget
    numerics: Numerics
    heads: HeadWeights | None = None  # draft heads
    kept_files: KeptFiles | None = None  # files of evicted kept blocks


def assemble(
    config: EngineConfig,
    memory: "DeviceMemory | None" = None,
    graph_memory: "GraphMemory | None" = None,
    rank: Rank | None = None,
) -> Parts:
    """Load everything that a config specifies.

    Args:
        config: Config of the engine.
        memory: Memory of the card, as in `plan_engine`.
        graph_memory: Function that measures the memory of CUDA graphs (`measure`). None means to
            capture them, if there are any.
        rank: Rank to assemble if several share the models. None means a single rank.

    Raises `ConfigError` or `ModelLoadError`.
    """
    with on_device(device_of(config)):
        return _assemble(config, memory, graph_memory, rank)


def _assemble(
    config: EngineConfig,
    memory: "DeviceMemory | None",
    graph_memory: "GraphMemory | None",
    rank: Rank | None,
) -> Parts:
    plan = plan_engine(config, memory, rank=rank)
    asked, config, device = config, plan.config, plan.device
    graph_memory = graph_memory or _graph_memory(plan)
    _set_threads(num_threads(config), device)
    logger.info(
        "%s", start_up_line(config, plan.ops, plan.numerics, device, graph_memory is not None)
    )
    for line in _quantisation_lines(plan):
        logger.info("%s", line)
    try_attention(config, plan.specs, plan.memory_budget.num_blocks, plan.dtype, device)
    memory = memory or memory_of(device)
    pools = _pools(plan)
    models = _tapped(plan, _load(plan, pools))
    if config.codes == FILE:
        plan = replace(plan, memory_budget=replace(plan.memory_budget, weights=_held(plan, models)))
    if memory is not None and plan.ops.name == "cuda":
        from nano_inference.device.memory_profile import measure

        claims = measure(config, models, plan.memory_budget.weights, memory, graph_memory)
        budget = plan_memory(config, plan.parts, claims, plan.dtype, device, plan.rank.ranks_here)
        plan = replace(plan, memory_budget=budget)
    weights = plan.memory_budget.weights
    logger.info("%s", told_weights(config, asked, plan.dtype, weights, device))
    plan = replace(plan, memory_budget=plan.rank.agree(plan.memory_budget))
    _tell_of_memory(plan, memory)
    return _with_cache(plan, models, pools)


def _set_threads(count: int, device: Device) -> None:
    """Set the number of threads of torch's operations, which a host engine does not use."""
    if device is HOST:
        return
    import torch

    torch.set_num_threads(count)


def _pools(plan: EnginePlan) -> "EnginePools | None":
    """Return memory that keeps its addresses in a sleep, or None if the device has none."""
    if plan.ops.name != "cuda":
        return None
    from nano_inference.device import pools  # imports torch

    try:
        made = pools.pools_of(plan.device)
    except pools.NoVirtualMemory as problem:
        logger.info("sleep: memory moves, and wake captures graphs again (%s)", problem)
        return None
    if made is not None:
        logger.info("sleep: addresses and graphs are kept")
    return made


def _tapped(plan: EnginePlan, models: dict[str, Decoder]) -> dict[str, Decoder]:
    """Return the models, with taps in the policy if draft heads read its activations."""
    spec, policy = None if plan.heads is None else plan.heads[1], models[POLICY]
    layers = spec.layer_ids if isinstance(spec, EagleSpec) else ()
    if plan.config.draft_model == MTP:
        layers = (policy.spec.num_layers,)
    if not layers:
        return models
    taps = Taps(layers)
    if plan.ops.name == "cuda":
        from nano_inference.device.captured_taps import taps_of  # imports torch

        taps = taps_of(plan.config, layers, policy)
    return {**models, POLICY: policy.twin(taps=taps)}


def _with_cache(
    plan: EnginePlan, models: Mapping[str, Decoder], pools: "EnginePools | None"
) -> Parts:
    config, budget, device = plan.config, plan.memory_budget, plan.device
    cache = CACHES[config.cache_type](
        *(budget.num_blocks, config.block_size),
        layout=budget.layout,
        num_units=budget.num_units,
        evicted=lambda: kept_files,  # lazy: the files need the runner, which needs the cache
    )
    storages = _storages(plan, cache, pools)
    record, moe, kept = None, plan.parts[POLICY].spec.moe, storages[POLICY]
    if config.enable_return_routed_experts and moe is not None:
        sizes, write = (kept.num_blocks, kept.block_size), models[POLICY].ops.record_experts
        record = RouteRecord(moe, *sizes, device, write)
    if record is not None:
        policy = models[POLICY]
        models = {**models, POLICY: policy.twin(routes=record, taps=policy.taps)}
    if config.draft_model == SELF:
        models = {**models, DRAFT: _self_draft(config, models[POLICY])}
        storages[DRAFT] = kept
    runner, heads = _runner(plan, models, storages, pools), _load_heads(plan)
    kept_files = _kept_files(plan, runner, cache)
    return Parts(
        config=config,
        folder=plan.folders[POLICY],
        runner=runner,
        cache=cache,
        memory_budget=budget,
        numerics=plan.numerics,
        heads=heads,
        kept_files=kept_files,
    )


def _storages(
    plan: EnginePlan, cache: KVCache, pools: "EnginePools | None"
) -> dict[str, KVStorage]:
    """Return the KV tensors by weight set. Sets of equal shape share them. Raises `ConfigError`."""
    config, budget, device = plan.config, plan.memory_budget, plan.device
    units = UnitMap(cache.units, device) if cache.units is not None else None
    specs = {name: part.spec for name, part in plan.parts.items()}
    # weight set whose KV tensors receive drafts; keys in units have no scratch blocks
    drafting = DRAFT if DRAFT in specs else POLICY if config.draft_model == SELF else None
    drafting = None if units is not None and not budget.layout.beside else drafting
    try:
        by_key = {
            storage_key(spec, budget.layout, name): KVStorage(
                spec,
                budget.num_blocks + (_num_scratch(config) if name == drafting else 0),
                config.block_size // config.context_parallel,
                plan.dtype,
                device,
                units,
                config.kv_cache_dtype,
                None if pools is None else pools.kv_cache,
            )
            for name, spec in specs.items()
        }
    except (RuntimeError, MemoryError) as problem:
        if not lacks_memory(problem):
            raise
        if device.type == "cpu":
            what = f"the KV cache of {gibibytes(budget.kv_cache)}"
            raise no_memory_for(what, device, "give a smaller kv_cache_memory") from None
        raise ConfigError(
            f"the KV cache of {gibibytes(budget.kv_cache)} no longer fits on {device}: another "
            "program has taken memory meanwhile; lower "
            f"gpu_memory_utilization={config.gpu_memory_utilization:g}, or start again."
        ) from None
    return {name: by_key[storage_key(spec, budget.layout, name)] for name, spec in specs.items()}


def _kept_files(plan: EnginePlan, runner: ModelRunner, cache: KVCache) -> KeptFiles | None:
    config = plan.config
    if config.kept_cache_folder is None:
        return None
    return KeptFiles(
        Path(config.kept_cache_folder),
        config.kept_cache_bytes or DEFAULT_BYTES,
        cache,
        runner,
        f"{plan.folders[POLICY]} {plan.numerics.fingerprint}",
        lambda: cache.kept.clock(),
    )


def _self_draft(config: EngineConfig, policy: Decoder) -> Decoder:
    """Return the policy with fewer layers, with its matrices as codes, or both."""
    layers = params = None
    if config.draft_layers is not None:
        layers = spread_layers(policy.spec.num_layers, config.draft_layers)
    if config.draft_quantization is not None:
        params = coded_copies(
            param_table(policy.spec), policy.params, policy.ops.allocate, config.draft_quantization
        )
    return policy.twin(params, layers=layers)


def _load_heads(plan: EnginePlan) -> HeadWeights | None:
    if plan.heads is None:
        return None
    folder, spec = plan.heads
    weights = HeadWeights(spec, plan.dtype, plan.device, plan.ops.allocate)
    weights.load(folder)
    return weights


def _load(plan: EnginePlan, pools: "EnginePools | None") -> dict[str, Decoder]:
    """Return the models by weight set. Raise `ConfigError` if they do not fit."""
    longest = longest_asked(plan.config, list(plan.specs.values()))
    budget = plan.memory_budget
    positions = longest if budget.estimated else budget.max_model_len
    params: dict[str, dict[str, Any]] = {}
    try:
        for name, folder in plan.folders.items():
            frozen_copy = name == REFERENCE and folder == plan.folders[POLICY]
            params[name] = (
                {
                    key: _copy(param, pools)
                    for key, param in params[POLICY].items()
                    if not key.startswith(PARAMS)
                }
                if frozen_copy
                else _load_params(plan, name, folder, pools)
            )
        return {
            name: Decoder(
                part.spec, params[name], plan.ops, positions, plan.rank.rank_exchange(part)
            )
            for name, part in plan.parts.items()
            if name in params
        }
    except (RuntimeError, MemoryError) as problem:
        if not lacks_memory(problem):
            raise
        params.clear()
        if pools is not None:
            pools.close()
        if plan.device.type == "cpu":
            what = f"the weights ({gibibytes(budget.weights)})"
            raise no_memory_for(what, plan.device, "use a smaller model") from None
        memory = memory_of(plan.device)
        if memory is not None:
            memory.release()
            reading, weights = memory.read(), budget.weights
            require_weights_fit(
                Claims(weights, others=reading.used, total=reading.total), plan.device
            )
        raise ConfigError(
            f"the weights ({gibibytes(budget.weights)}) do not fit on {plan.device}; use a smaller "
            "model, or a card that no other program uses."
        ) from None


def _copy(param: Any, pools: "EnginePools | None") -> Any:
    """Return a copy of a parameter, in the engine's pool if it is a tensor."""
    if pools is None or not is_tensor(param):
        return param.clone()
    return pools.weights.take(tuple(param.shape), param.dtype).copy_(param)


def _load_params(
    plan: EnginePlan, name: str, folder: Path, pools: "EnginePools | None"
) -> dict[str, Any]:
    spec, part, codes, ops = plan.specs[name], plan.parts[name], plan.config.codes, plan.ops
    if spec.mtp is not None:
        _require_mtp(folder, spec.mtp)
    if plan.device is HOST and ops.packing is not None:
        return load_packed(folder, spec, plan.dtype, plan.device, ops.packing, part, codes)
    matrix: Any = ops.allocate  # the CUDA backend's takes an arena
    vector = None
    if pools is not None:
        matrix, vector = partial(matrix, arena=pools.weights), pools.weights.take
    return load_params(folder, spec, plan.dtype, plan.device, matrix, part, codes, vector)


def _require_mtp(folder: Path, mtp: MtpSpec) -> None:
    """Raise `ConfigError` if a checkpoint has no multi-token prediction layer."""
    if not any(name.startswith(mtp.prefix) for name in stored_shapes(folder)):
        raise ConfigError(
            f"draft_model='mtp' needs a multi-token prediction layer, but {folder} has no tensor "
            f"{mtp.project!r}; use a checkpoint with this layer, or speculation='suffix'."
        )


def _held(plan: EnginePlan, models: Mapping[str, Decoder]) -> int:
    """Return the bytes of the models' weights in their actual formats."""
    tables = {name: whole_table(part.whole, part) for name, part in plan.parts.items()}
    return sum(
        num_bytes(tables[name], plan.dtype, formats_of(model.params))
        for name, model in models.items()
    )


def _quantisation_lines(plan: EnginePlan) -> list[str]:
    """Return a log line on the conversion and memory of each quantized model."""
    dtype = dtype_name(plan.dtype)
    config, codes = plan.config, plan.config.codes
    names = {
        POLICY: config.model_path,
        REFERENCE: config.ref_model_path,
        DRAFT: config.draft_model,
    }
    return [
        f"{names[name]}: {spec.quantisation.computed}"
        if codes == FILE
        else f"{names[name]}: {spec.quantisation.becomes(dtype)}; its weights take "
        f"{gibibytes(num_bytes(whole_table(spec, plan.parts[name]), plan.dtype, codes))}"
        for name, spec in plan.specs.items()
        if spec.quantisation is not None
    ]


def _tell_of_memory(plan: EnginePlan, memory: "DeviceMemory | None") -> None:
    budget, asked = plan.memory_budget, plan.config.max_model_len
    if asked is not None and budget.max_model_len < asked:
        logger.warning(
            "max_model_len=%d is lowered to %d.%s",
            asked,
            budget.max_model_len,
            _would_hold(plan, memory),
        )
    # one log record per line, because records of servers must not contain line ends
    for line in str(budget).splitlines():
        logger.info("%s", line)


def _would_hold(plan: EnginePlan, memory: "DeviceMemory | None") -> str:
    """Return advice on the card's share that would hold the longest sequence, or an empty text."""
    longest = longest_asked(plan.config, list(plan.specs.values()))
    if (
        memory is None
        or plan.memory_budget.max_model_len >= longest
        or plan.config.kv_cache_memory is not None
    ):
        return ""
    share = share_for(plan.memory_budget, longest, memory.read().total)
    if share > 1:
        return " The card has no room for more."
    return f" gpu_memory_utilization of at least {share:.2f} would hold {longest} tokens."


def _num_scratch(config: EngineConfig) -> int:
    """Return the number of additional blocks for drafts that exceed a sequence's own blocks."""
    if config.draft_model is None:
        return 0
    return DRAFTING_SEQS * -(-config.max_drafts // config.block_size)


def _runner(
    plan: EnginePlan,
    models: Mapping[str, Decoder],
    storages: Mapping[str, KVStorage],
    pools: "EnginePools | None",
) -> ModelRunner:
    if plan.ops.name != "cuda":
        return ModelRunner(models, storages, plan.rank.gate)
    from nano_inference.device.cuda_runner import make_runner  # brings in Triton

    return make_runner(
        plan.config,
        models,
        storages,
        max_model_len=plan.memory_budget.max_model_len,
        gate=plan.rank.gate,
        pools=pools,
    )


def _graph_memory(plan: EnginePlan) -> "GraphMemory | None":
    """Return a function that measures the memory of CUDA graphs, or None without graphs."""
    if plan.ops.name != "cuda" or plan.device.type != "cuda":
        return None
    if not captures_graphs(plan.config, plan.specs[POLICY]):
        return None
    from nano_inference.device.cuda_runner import graph_memory  # brings in Triton

    longest = longest_asked(plan.config, list(plan.specs.values()))
    return lambda models, storages: graph_memory(
        plan.config, models, storages, max_model_len=longest
    )


def is_shared(runner: ModelRunner) -> bool:
    """Return whether several ranks share the model."""
    return runner.shares is not None


def require_one_rank(runner: ModelRunner, what: str) -> None:
    """Raise `InvalidRequest` if several ranks share the model. `what` names the call."""
    require(CALL_LIMITS, Setting(whole_model=what, shared=is_shared(runner)))
