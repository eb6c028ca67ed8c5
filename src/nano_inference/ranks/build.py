"""Plan of an engine before weights are read: specs, shards, operations, memory, numerics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nano_inference.arrays import Device, Dtype
from nano_inference.checkpoints.folders import gguf_of
from nano_inference.checkpoints.loading import gguf_formats, load_spec, resolve_model
from nano_inference.checkpoints.shard_checks import mesh_of, require_experts
from nano_inference.config import MTP, SELF, EngineConfig
from nano_inference.core.gate import Gate
from nano_inference.core.sequence import DRAFT, POLICY, REFERENCE
from nano_inference.device.backends import (
    choose_dtype,
    choose_ops,
    device_of,
    in_kind_of_ops,
    numerics_of,
    require_drafting,
)
from nano_inference.device.memory import Claims, MemoryBudget, plan_memory
from nano_inference.device.quantization import settle_quantization
from nano_inference.drafts.heads import EagleSpec, HeadsSpec, heads_bytes, read_heads
from nano_inference.errors import ConfigError
from nano_inference.features import ENGINE_LIMITS, NO_ROUTES, Setting, require
from nano_inference.models.parameters.experts import block_formats
from nano_inference.models.parameters.mtp import drafting_table, whole_table
from nano_inference.models.parameters.storage import codes_bytes, num_bytes, require_whole_groups
from nano_inference.models.parameters.table import param_table
from nano_inference.models.sharding.rank_exchange import RankExchange
from nano_inference.models.sharding.shard import ModelShard, shard_of
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.mtp_layer import mtp_layer, with_mtp
from nano_inference.ops.formats import FILE
from nano_inference.ops.interface import Numerics, Ops
from nano_inference.parallel.bounds import SEGMENTS
from nano_inference.parallel.mesh import Place

if TYPE_CHECKING:
    from nano_inference.device.memory_profile import DeviceMemory
    from nano_inference.parallel.process_group import ProcessGroup


@dataclass(frozen=True)
class Rank:
    """One of the ranks that share an engine's models, and its communication with the others.

    Attributes:
        mesh_place: Position in the mesh.
        ranks_here: Number of ranks that share this machine, its memory and cores.
        rank_exchange: Factory of the communication for a shard of a model. It returns None for a
            whole model.
        agree: Function that returns the KV cache agreed on by all ranks, given the one that fits
            here.
        engines: Index of its engine, and the number of engines in lockstep.
        gate: Coordinator with other engines. None if there are none.
    """

    mesh_place: Place
    ranks_here: int = 1
    rank_exchange: Callable[[ModelShard], RankExchange | None] = lambda _: None
    agree: Callable[[MemoryBudget], MemoryBudget] = lambda budget: budget
    engines: tuple[int, int] = (0, 1)
    gate: Gate | None = None


def rank_in_lockstep(config: EngineConfig, engines: "ProcessGroup", gate: Gate) -> Rank:
    """Return the rank of a single-rank engine that shares its experts with other engines.

    `gate` is the engine's side of the lockstep.
    """
    require(ENGINE_LIMITS, Setting(config, lockstep=True))
    member = engines.rank, engines.size
    return Rank(
        Place(),
        rank_exchange=lambda part: RankExchange(part, engines=engines),
        engines=member,
        gate=gate,
    )


@dataclass(frozen=True)
class EnginePlan:
    """Plan of one rank of an engine, before any weight is read."""

    config: EngineConfig
    rank: Rank
    folders: Mapping[str, Path]  # by weight set
    specs: Mapping[str, ModelSpec]  # whole models by weight set
    parts: Mapping[str, ModelShard]  # this rank's shards by weight set
    dtype: Dtype
    device: Device
    ops: Ops
    memory_budget: MemoryBudget  # on CUDA with an estimated workspace, since nothing has run yet
    numerics: Numerics
    heads: tuple[Path, HeadsSpec] | None = None  # draft heads and their folder


def plan_engine(
    config: EngineConfig,
    memory: "DeviceMemory | None" = None,
    *,
    rank: Rank | None = None,
    resolve: Callable[[str], Path] = resolve_model,
) -> EnginePlan:
    """Read the configurations of a config's models and plan the engine.

    Reads no weights and has no side effects.

    Args:
        config: Config of the engine.
        memory: Memory of the card. None means the actual card, or no card on a CPU.
        rank: Rank to plan. None means rank 0.
        resolve: Function from a model's name to its folder.

    Raises `ConfigError` or `ModelLoadError`.
    """
    rank = rank or Rank(Place(mesh_of(config)))
    device = device_of(config)
    config = settle_quantization(config, device)
    in_lockstep = rank.gate is not None or rank.engines[1] > 1
    require(ENGINE_LIMITS, Setting(config, lockstep=in_lockstep))
    if config.codes == FILE and resolve is resolve_model:
        resolve = partial(resolve_model, coded=True)
    folders, specs, heads = _sources(config, resolve)
    if config.draft_model is not None:
        _settle_drafting(config, specs)
    _require_same_vocabulary(specs, config)
    _require_lockstep(config, specs, rank)
    parts = {name: shard_of(spec, rank.mesh_place, rank.engines) for name, spec in specs.items()}
    _require_whole_groups(config, specs)
    dtype = choose_dtype(config, specs[POLICY], device)
    served = {name: spec for name, spec in specs.items() if name != DRAFT}
    make_ops = choose_ops(config, served, dtype, device)
    dtype, device = in_kind_of_ops(make_ops(1), dtype, device)
    claims = _guessed_claims(
        config,
        parts,
        dtype,
        memory or memory_of(device),
        kernels=make_ops(1).name == "cuda",
        heads=heads,
    )
    budget = plan_memory(config, parts, claims, dtype, device, rank.ranks_here)
    ops = make_ops(budget.num_blocks)
    if specs[POLICY].moe is None:
        facts = {NO_ROUTES: specs[POLICY].architecture}
        require(ENGINE_LIMITS, Setting(config, **facts))
    if DRAFT in specs:
        require_drafting(config, ops, specs[DRAFT], dtype, device)
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


def _sources(
    config: EngineConfig, resolve: Callable[[str], Path]
) -> tuple[dict[str, Path], dict[str, ModelSpec], tuple[Path, HeadsSpec] | None]:
    """Return the folders and specs of the models by weight set, and the draft heads."""
    folder = resolve(config.model_path)
    folders = {POLICY: folder}
    if config.ref_model_path is not None:
        same = config.ref_model_path == config.model_path
        folders[REFERENCE] = folder if same else resolve(config.ref_model_path)
    specs = {name: load_spec(each) for name, each in folders.items()}
    if config.draft_model == MTP:
        specs[POLICY] = with_mtp(specs[POLICY])
        specs[DRAFT] = mtp_layer(specs[POLICY])  # its layer stores keys and values
    if config.draft_model in (None, SELF, MTP):
        return folders, specs, None
    drafting = resolve(config.draft_model)
    heads = read_heads(drafting, specs[POLICY])
    if heads is None:
        folders[DRAFT], specs[DRAFT] = drafting, load_spec(drafting)
        return folders, specs, None
    if isinstance(heads, EagleSpec):
        specs[DRAFT] = heads.layer  # its layer stores keys and values
    return folders, specs, (drafting, heads)


def counted_weights(plan: EnginePlan) -> int:
    """Return the bytes that a plan's weights will take. Raises `ModelLoadError`.

    For a `.gguf` file that is computed in blocks, the headers are read, which the memory budget
    does not need.
    """
    size = plan.memory_budget.weights
    file = gguf_of(plan.config.model_path)
    if plan.config.codes != FILE or file is None:
        return size
    part = plan.parts[POLICY]
    table = whole_table(part.whole, part)
    plain = num_bytes(table, plan.dtype, FILE)
    return size - plain + num_bytes(table, plan.dtype, gguf_formats(file, table))


def _guessed_claims(
    config: EngineConfig,
    parts: Mapping[str, ModelShard],
    dtype: Dtype,
    memory: "DeviceMemory | None",
    kernels: bool,
    heads: tuple[Path, HeadsSpec] | None,
) -> Claims:
    """Return an estimate of the memory claims other than the KV cache, before anything has run."""
    # the weights of heads and of the policy's own layer are not those of a whole model
    is_model = heads is None and config.draft_model != MTP
    models = [part for name, part in parts.items() if is_model or name != DRAFT]
    weights = sum(_weight_bytes(config, part, dtype) for part in models)
    whole = parts[POLICY].whole
    is_mtp = config.draft_model == MTP
    copied = drafting_table(whole) if is_mtp else param_table(whole, parts[POLICY])
    weights += codes_bytes(copied, dtype, config.draft_quantization)
    weights += 0 if heads is None else heads_bytes(heads[1], dtype)
    if memory is None:
        return Claims(weights)
    from nano_inference.device.memory_profile import guess

    reading = memory.read()
    workspace = guess(config, [part.spec for part in parts.values()], dtype, kernels)
    return Claims(weights, workspace, others=reading.used, total=reading.total, estimated=True)


def _weight_bytes(config: EngineConfig, part: ModelShard, dtype: Dtype) -> int:
    table = whole_table(part.whole, part)
    formats = block_formats(part.whole, table) if config.codes == FILE else config.codes
    return num_bytes(table, dtype, formats)


def memory_of(device: Device) -> "DeviceMemory | None":
    if device.type != "cuda":
        return None
    from nano_inference.device.memory_profile import DeviceMemory

    return DeviceMemory(device)


def _settle_drafting(config: EngineConfig, specs: dict[str, ModelSpec]) -> None:
    """Extend the draft model's positions to the policy's.

    Raise `ConfigError` for too many layers.
    """
    policy = specs[POLICY]
    if config.draft_layers is not None and config.draft_layers > policy.num_layers:
        raise ConfigError(
            f"draft_layers={config.draft_layers} exceeds the {policy.num_layers} layers of the "
            "policy."
        )
    if DRAFT in specs:  # sequences may exceed its positions, with less accurate drafts
        specs[DRAFT] = replace(specs[DRAFT], max_position=policy.max_position)


def _require_same_vocabulary(specs: Mapping[str, ModelSpec], config: EngineConfig) -> None:
    sizes = {name: spec.vocab_size for name, spec in specs.items()}
    others = {REFERENCE: "ref_model_path", DRAFT: "draft_model"}
    for name, option in others.items():
        if sizes.get(name, sizes[POLICY]) != sizes[POLICY]:
            raise ConfigError(
                f"{option}={getattr(config, option)!r} has {sizes[name]} tokens in its vocabulary, "
                f"the policy {sizes[POLICY]}; use a model with the policy's vocabulary."
            )


def _require_whole_groups(config: EngineConfig, specs: Mapping[str, ModelSpec]) -> None:
    """Raise `ConfigError` if ranks cannot share codes.

    The formats of a file are not known yet: `load_params` checks them.
    """
    ranks, quantization = config.tensor_parallel, config.codes
    if ranks == 1 or quantization is None:
        return
    if ranks > SEGMENTS:
        raise ConfigError(
            f"quantization={quantization!r} is not possible with tensor_parallel={ranks}: columns "
            f"are summed in {SEGMENTS} segments; use at most {SEGMENTS} ranks."
        )
    for spec in specs.values():
        require_whole_groups(spec, ranks, quantization, quantization)


def _require_lockstep(config: EngineConfig, specs: Mapping[str, ModelSpec], rank: Rank) -> None:
    """Raise `ConfigError` unless the number of engines matches the config's expert parallelism."""
    asked, engines = config.expert_parallel, rank.engines[1]
    require_experts(config, specs.values())
    if engines != (asked if config.tensor_parallel == 1 else 1):
        raise ConfigError(
            f"expert_parallel={asked} with tensor_parallel=1 needs {asked} engines in lockstep, "
            f"which are started together; this engine is one of {engines}."
        )
