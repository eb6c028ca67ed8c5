"""From a config to the parts of an engine: models by weight set, KV tensors, memory budget,
numerics.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nano_inference.checkpoints.folders import gguf_of
from nano_inference.checkpoints.loading import gguf_formats, load_params, load_spec, resolve_model
from nano_inference.checkpoints.shard_checks import mesh_of, require_experts
from nano_inference.config import SELF, CacheType, EngineConfig
from nano_inference.core.gate import Gate
from nano_inference.core.sequence import DRAFT, POLICY, REFERENCE
from nano_inference.device.backends import (
    captures_graphs,
    choose_device,
    choose_dtype,
    choose_ops,
    num_threads,
    numerics_of,
    require_drafting,
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
from nano_inference.device.memory_profile import (
    CudaMemory,
    DeviceMemory,
    GraphMemory,
    guess,
    measure,
)
from nano_inference.device.quantization import settle_quantization, told_weights
from nano_inference.device.runner import ModelRunner
from nano_inference.device.units import UnitMap
from nano_inference.drafts.heads import (
    EagleSpec,
    HeadsSpec,
    HeadWeights,
    heads_bytes,
    read_heads,
)
from nano_inference.drafts.model import spread_layers
from nano_inference.errors import ConfigError
from nano_inference.features import CALL_LIMITS, ENGINE_LIMITS, NO_ROUTES, Runs, Setting, require
from nano_inference.kv_cache.hash_cache import PagedKVCache
from nano_inference.kv_cache.radix import RadixKVCache
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.storage import (
    coded_copies,
    codes_bytes,
    formats_of,
    num_bytes,
    require_whole_groups,
)
from nano_inference.models.parameters.table import param_table
from nano_inference.models.routes import RouteRecord
from nano_inference.models.sharding.rank_exchange import RankExchange
from nano_inference.models.sharding.shard import ModelShard, shard_of
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.formats import FILE
from nano_inference.ops.interface import Numerics, Ops
from nano_inference.parallel.bounds import SEGMENTS
from nano_inference.parallel.mesh import Place
from nano_inference.parallel.process_group import ProcessGroup

logger = logging.getLogger("nano_inference")

DRAFTING_SEQS = 16  # that may have drafts beyond their last block at once

CACHES: dict[CacheType, type[PagedKVCache | RadixKVCache]] = {
    "paged": PagedKVCache,
    "radix": RadixKVCache,
}


@dataclass(frozen=True)
class Rank:
    """One of the ranks that share an engine's models, and how it gets on with the others.

    Attributes:
        place: where it stands.
        ranks_here: how many of them share this machine, its memory and its cores.
        rank_exchange: what it exchanges with others, for a shard of a model; None: it has all.
        agree: from the KV cache that this rank can have to the one that all have.
        engines: which one its engine is of how many in lockstep.
        gate: what the other engines decide; None: there are none.
    """

    place: Place
    ranks_here: int = 1
    rank_exchange: Callable[[ModelShard], RankExchange | None] = lambda _: None
    agree: Callable[[MemoryBudget], MemoryBudget] = lambda budget: budget
    engines: tuple[int, int] = (0, 1)
    gate: Gate | None = None


def rank_in_lockstep(config: EngineConfig, engines: ProcessGroup, gate: Gate) -> Rank:
    """Return the place of an engine, which is one rank, among the engines that share its experts.
    `gate` is its side of their lockstep.
    """
    require(ENGINE_LIMITS, Setting(config, lockstep=True))
    place = engines.rank, engines.size
    return Rank(
        Place(),
        rank_exchange=lambda part: RankExchange(part, engines=engines),
        engines=place,
        gate=gate,
    )


@dataclass(frozen=True)
class EnginePlan:
    """What one rank of an engine of some config is made of, before any weight is read."""

    config: EngineConfig
    rank: Rank
    folders: Mapping[str, Path]  # by weight set
    specs: Mapping[str, ModelSpec]  # by weight set: of the whole model
    parts: Mapping[str, ModelShard]  # by weight set: what this rank holds
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    memory_budget: MemoryBudget  # on CUDA with a guess of the workspace, as nothing was run yet
    numerics: Numerics
    heads: tuple[Path, HeadsSpec] | None = None  # that draft, and where they lie


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    config: EngineConfig  # with `quantization` as it is settled
    folder: Path  # of the policy
    # with the models, and the KV tensors, by weight set; sets of one shape share
    runner: ModelRunner
    cache: PagedKVCache | RadixKVCache
    memory_budget: MemoryBudget
    numerics: Numerics
    heads: HeadWeights | None = None  # that draft
    kept_files: KeptFiles | None = None  # of blocks that a request asked to keep


def plan_engine(
    config: EngineConfig,
    memory: DeviceMemory | None = None,
    *,
    rank: Rank | None = None,
    resolve: Callable[[str], Path] = resolve_model,
) -> EnginePlan:
    """Read the configurations of a config's models and decide all that follows from them.

    It reads no weights and changes nothing of the process.

    Args:
        config: of the engine.
        memory: of the card; None: as CUDA tells, or none on a CPU.
        rank: whose plan it is; None: rank 0's.
        resolve: finds the folder of a model's name.

    Raises `ConfigError` or `ModelLoadError`.
    """
    rank = rank or Rank(Place(mesh_of(config)))
    device = choose_device(config.device)
    config = settle_quantization(config, device)
    in_lockstep = rank.gate is not None or rank.engines[1] > 1
    require(ENGINE_LIMITS, Setting(config, lockstep=in_lockstep))
    if config.codes == FILE and resolve is resolve_model:
        resolve = partial(resolve_model, coded=True)
    folder = resolve(config.model_path)
    folders = {POLICY: folder}
    if config.ref_model_path is not None:
        same = config.ref_model_path == config.model_path
        folders[REFERENCE] = folder if same else resolve(config.ref_model_path)
    specs = {name: load_spec(each) for name, each in folders.items()}
    heads = None
    if config.draft_model not in (None, SELF):
        drafting = resolve(config.draft_model)
        found = read_heads(drafting, specs[POLICY])
        if found is None:
            folders[DRAFT], specs[DRAFT] = drafting, load_spec(drafting)
        else:
            heads = drafting, found
            if isinstance(found, EagleSpec):
                specs[DRAFT] = found.layer  # for the keys and values of its layer
    if config.draft_model is not None:
        _settle_drafting(config, specs)
    _require_same_vocabulary(specs, config)
    _require_lockstep(config, specs, rank)
    parts = {name: shard_of(spec, rank.place, rank.engines) for name, spec in specs.items()}
    _require_whole_groups(config, specs)
    dtype = choose_dtype(config, specs[POLICY], device)
    served = {name: spec for name, spec in specs.items() if name != DRAFT}
    make_ops = choose_ops(config, served, dtype, device)
    claims = _guessed_claims(
        config,
        parts,
        dtype,
        memory or _memory_of(device),
        kernels=make_ops(1).name == "cuda",
        heads=None if heads is None else heads[1],
    )
    budget = plan_memory(config, parts, claims, dtype, device, rank.ranks_here)
    ops = make_ops(budget.num_blocks)
    if specs[POLICY].moe is None:
        facts = {NO_ROUTES: specs[POLICY].architecture}
        require(ENGINE_LIMITS, Setting(config, **facts))
    if DRAFT in specs:
        require_drafting(config, ops, specs[DRAFT], dtype, device)
    if heads is not None:
        runs = Runs(ops.name, str(device))
        require(ENGINE_LIMITS, Setting(heads=config.draft_model, runs=runs))
    return EnginePlan(
        config=config,
        rank=rank,
        folders=folders,
        specs=specs,
        parts=parts,
        dtype=dtype,
        device=device,
        ops=ops,
        memory_budget=budget,
        numerics=numerics_of(config, ops, dtype, device, specs),
        heads=heads,
    )


def assemble(
    config: EngineConfig,
    memory: DeviceMemory | None = None,
    graph_memory: GraphMemory | None = None,
    rank: Rank | None = None,
) -> Parts:
    """Load everything that a config names.

    Args:
        config: of the engine.
        memory: of the card, as in `plan_engine`.
        graph_memory: measures what CUDA graphs take (`measure`); None: by capturing them, where
            there are any.
        rank: whose parts these are, where several share the models; None: there is one.

    Raises `ConfigError` or `ModelLoadError`.
    """
    device = choose_device(config.device)
    # kernels of Triton go to the current
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _assemble(config, memory, graph_memory, rank)


def _assemble(
    config: EngineConfig,
    memory: DeviceMemory | None,
    graph_memory: GraphMemory | None,
    rank: Rank | None,
) -> Parts:
    plan = plan_engine(config, memory, rank=rank)
    asked, config, device = config, plan.config, plan.device
    graph_memory = graph_memory or _graph_memory(plan)
    torch.set_num_threads(num_threads(config))
    logger.info(
        "%s", start_up_line(config, plan.ops, plan.numerics, device, graph_memory is not None)
    )
    for line in _quantisation_lines(plan):
        logger.info("%s", line)
    try_attention(config, plan.specs, plan.memory_budget.num_blocks, plan.dtype, device)
    memory = memory or _memory_of(device)
    models = _load(plan)
    if config.codes == FILE:
        plan = replace(plan, memory_budget=replace(plan.memory_budget, weights=_held(plan, models)))
    if memory is not None and plan.ops.name == "cuda":
        claims = measure(config, models, plan.memory_budget.weights, memory, graph_memory)
        budget = plan_memory(config, plan.parts, claims, plan.dtype, device, plan.rank.ranks_here)
        plan = replace(plan, memory_budget=budget)
    weights = plan.memory_budget.weights
    logger.info("%s", told_weights(config, asked, plan.dtype, weights, device))
    plan = replace(plan, memory_budget=plan.rank.agree(plan.memory_budget))
    _tell_of_memory(plan, memory)
    return _with_cache(plan, models)


def _with_cache(plan: EnginePlan, models: Mapping[str, Decoder]) -> Parts:
    config, budget, device = plan.config, plan.memory_budget, plan.device
    cache = CACHES[config.cache_type](
        *(budget.num_blocks, config.block_size),
        layout=budget.layout,
        num_units=budget.num_units,
        evicted=lambda: kept_files,  # which need the runner, and so the cache
    )
    units = UnitMap(cache.units, device) if cache.units is not None else None
    specs = {name: part.spec for name, part in plan.parts.items()}
    # whose KV tensors drafts are written into; blocks of units have no scratch
    drafting = DRAFT if DRAFT in specs else POLICY if config.draft_model == SELF else None
    drafting = None if units is not None else drafting
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
            f"the KV cache of {gibibytes(budget.kv_cache)} does not fit on {device} any more: "
            "another program has taken "
            f"memory meanwhile; lower gpu_memory_utilization={config.gpu_memory_utilization:g}, "
            "or start again."
        ) from None
    storages = {
        name: by_key[storage_key(spec, budget.layout, name)] for name, spec in specs.items()
    }
    moe = specs[POLICY].moe
    if config.enable_return_routed_experts and moe is not None:
        kept = storages[POLICY]
        models[POLICY].routes = RouteRecord(moe, kept.num_blocks, kept.block_size, device)
    if config.draft_model == SELF:
        models = {**models, DRAFT: _self_draft(config, models[POLICY])}
        storages[DRAFT] = storages[POLICY]
    runner, heads = _runner(plan, models, storages), _load_heads(plan)
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


def _kept_files(
    plan: EnginePlan, runner: ModelRunner, cache: PagedKVCache | RadixKVCache
) -> KeptFiles | None:
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
    """The policy with some of its layers, or with copies of its matrices as codes, or both."""
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


def _load(plan: EnginePlan) -> dict[str, Decoder]:
    """The models, by weight set. Raises `ConfigError` where they do not fit."""
    longest = longest_asked(plan.config, list(plan.specs.values()))
    budget = plan.memory_budget
    positions = longest if budget.estimated else budget.max_model_len
    params: dict[str, dict[str, Any]] = {}
    try:
        for name, each in plan.folders.items():
            frozen_copy = name == REFERENCE and each == plan.folders[POLICY]
            params[name] = (
                {key: param.clone() for key, param in params[POLICY].items()}
                if frozen_copy
                else load_params(
                    each,
                    plan.specs[name],
                    plan.dtype,
                    plan.device,
                    plan.ops.allocate,
                    plan.parts[name],
                    plan.config.codes,
                )
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
        if plan.device.type == "cpu":
            what = f"the weights ({gibibytes(budget.weights)})"
            raise no_memory_for(what, plan.device, "use a smaller model") from None
        memory = _memory_of(plan.device)
        if memory is not None:
            memory.release()
            reading, weights = memory.read(), budget.weights
            require_weights_fit(
                Claims(weights, others=reading.used, total=reading.total), plan.device
            )
        raise ConfigError(
            f"the weights ({gibibytes(budget.weights)}) do not fit on {plan.device}; use a "
            "smaller model, "
            "or a card that no other program uses."
        ) from None


def _held(plan: EnginePlan, models: Mapping[str, Decoder]) -> int:
    """Bytes of the models' weights, in the formats that they have."""
    tables = {name: param_table(part.whole, part) for name, part in plan.parts.items()}
    return sum(
        num_bytes(tables[name], plan.dtype, formats_of(model.params))
        for name, model in models.items()
    )


def counted_weights(plan: EnginePlan) -> int:
    """Bytes that the models' weights of a plan will take. Of a `.gguf` file that is computed in its
    blocks the headers are read, which the memory of the plan itself does not need. Raises
    `ModelLoadError`.
    """
    size = plan.memory_budget.weights
    file = gguf_of(plan.config.model_path)
    if plan.config.codes != FILE or file is None:
        return size
    part = plan.parts[POLICY]
    table = param_table(part.whole, part)
    plain = num_bytes(table, plan.dtype, FILE)
    return size - plain + num_bytes(table, plan.dtype, gguf_formats(file, table))


def _guessed_claims(
    config: EngineConfig,
    parts: Mapping[str, ModelShard],
    dtype: torch.dtype,
    memory: DeviceMemory | None,
    kernels: bool,
    heads: HeadsSpec | None,
) -> Claims:
    """What the memory is for beside the KV cache, before anything runs."""
    models = [part for name, part in parts.items() if heads is None or name != DRAFT]
    weights = sum(num_bytes(param_table(part.whole, part), dtype, config.codes) for part in models)
    policy = parts[POLICY]
    copied = config.draft_quantization
    weights += codes_bytes(param_table(policy.whole, policy), dtype, copied)
    weights += 0 if heads is None else heads_bytes(heads, dtype)
    if memory is None:
        return Claims(weights)
    reading = memory.read()
    workspace = guess(config, [part.spec for part in parts.values()], dtype, kernels)
    return Claims(weights, workspace, others=reading.used, total=reading.total, estimated=True)


def _quantisation_lines(plan: EnginePlan) -> list[str]:
    """Of each model that is stored as codes: what becomes of it, and the memory that it takes."""
    dtype = str(plan.dtype).removeprefix("torch.")
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
        f"{gibibytes(num_bytes(param_table(spec, plan.parts[name]), plan.dtype, codes))}"
        for name, spec in plan.specs.items()
        if spec.quantisation is not None
    ]


def _memory_of(device: torch.device) -> DeviceMemory | None:
    return CudaMemory(device) if device.type == "cuda" else None


def _tell_of_memory(plan: EnginePlan, memory: DeviceMemory | None) -> None:
    budget, asked = plan.memory_budget, plan.config.max_model_len
    if asked is not None and budget.max_model_len < asked:
        logger.warning(
            "max_model_len=%d is lowered to %d.%s",
            asked,
            budget.max_model_len,
            _would_hold(plan, memory),
        )
    # a log line each: those that servers write hold no line ends
    for line in str(budget).splitlines():
        logger.info("%s", line)


def _would_hold(plan: EnginePlan, memory: DeviceMemory | None) -> str:
    """Which share of the card would hold the longest sequence, where the KV cache is what limits
    it.
    """
    longest = longest_asked(plan.config, list(plan.specs.values()))
    if (
        memory is None
        or plan.memory_budget.max_model_len >= longest
        or plan.config.kv_cache_memory is not None
    ):
        return ""
    share = share_for(plan.memory_budget, longest, memory.read().total)
    if share > 1:
        return " No more fits on this card."
    return f" gpu_memory_utilization of at least {share:.2f} would hold {longest} tokens."


def _settle_drafting(config: EngineConfig, specs: dict[str, ModelSpec]) -> None:
    """Let the model that drafts have the policy's positions. Raises `ConfigError` for more layers
    than the policy has.
    """
    policy = specs[POLICY]
    if config.draft_layers is not None and config.draft_layers > policy.num_layers:
        raise ConfigError(
            f"draft_layers={config.draft_layers} are more than the {policy.num_layers} layers of "
            "the policy."
        )
    if DRAFT in specs:  # it limits no sequence: beyond its own positions its drafts are worse
        specs[DRAFT] = replace(specs[DRAFT], max_position=policy.max_position)


def _num_scratch(config: EngineConfig) -> int:
    """Blocks behind all others, for drafts that have no room in a sequence's own."""
    if config.draft_model is None:
        return 0
    return DRAFTING_SEQS * -(-config.max_drafts // config.block_size)


def _require_same_vocabulary(specs: Mapping[str, ModelSpec], config: EngineConfig) -> None:
    sizes = {name: spec.vocab_size for name, spec in specs.items()}
    others = {REFERENCE: "ref_model_path", DRAFT: "draft_model"}
    for name, option in others.items():
        if sizes.get(name, sizes[POLICY]) != sizes[POLICY]:
            raise ConfigError(
                f"{option}={getattr(config, option)!r} has a vocabulary of {sizes[name]} tokens, "
                f"the policy one of {sizes[POLICY]}; it must have the policy's."
            )


def _require_whole_groups(config: EngineConfig, specs: Mapping[str, ModelSpec]) -> None:
    """Raise `ConfigError` where ranks cannot share codes; of a file's `load_params` tells the rest,
    as its formats are not known yet.
    """
    ranks, quantization = config.tensor_parallel, config.codes
    if ranks == 1 or quantization is None:
        return
    if ranks > SEGMENTS:
        raise ConfigError(
            f"quantization={quantization!r} is not possible with tensor_parallel={ranks}: columns "
            f"are added up in {SEGMENTS} segments; use at most {SEGMENTS} ranks."
        )
    for spec in specs.values():
        require_whole_groups(spec, ranks, quantization, quantization)


def _require_lockstep(config: EngineConfig, specs: Mapping[str, ModelSpec], rank: Rank) -> None:
    """Raise `ConfigError` unless the experts are spread as the config says."""
    asked, engines = config.expert_parallel, rank.engines[1]
    require_experts(config, specs.values())
    if engines != (asked if config.tensor_parallel == 1 else 1):
        raise ConfigError(
            f"expert_parallel={asked} with tensor_parallel=1 is {asked} engines in lockstep, "
            "which are started "
            f"together; this one is one of {engines}."
        )


def _runner(
    plan: EnginePlan, models: Mapping[str, Decoder], storages: Mapping[str, KVStorage]
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
    )


def _graph_memory(plan: EnginePlan) -> GraphMemory | None:
    """How to find out what CUDA graphs take; None: there are none."""
    if plan.ops.name != "cuda" or plan.device.type != "cuda" or not captures_graphs(plan.config):
        return None
    from nano_inference.device.cuda_runner import graph_memory  # brings in Triton

    longest = longest_asked(plan.config, list(plan.specs.values()))
    return lambda models, storages: graph_memory(
        plan.config, models, storages, max_model_len=longest
    )


def require_one_rank(runner: ModelRunner, what: str) -> None:
    """Raise `InvalidRequest` where several ranks share the model; `what` needs all of it in one
    process.
    """
    require(CALL_LIMITS, Setting(whole_model=what, shared=runner.shares is not None))
