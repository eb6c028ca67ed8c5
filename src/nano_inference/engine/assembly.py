"""From a config to the parts of an engine: device, models by weight set, KV tensors, memory budget, numerics."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from nano_inference.config import ATTENTION_OF, Backend, CacheType, EngineConfig
from nano_inference.engine.memory import MemoryBudget, plan_memory
from nano_inference.engine.runner import ModelRunner
from nano_inference.engine.storage import KVStorage, UnitMap, storage_key
from nano_inference.errors import ConfigError
from nano_inference.kv_cache.paged import PagedKVCache
from nano_inference.kv_cache.radix import RadixKVCache
from nano_inference.models.decoder import Decoder
from nano_inference.models.loading import load_params, load_spec, resolve_dtype, resolve_model
from nano_inference.models.spec import ModelSpec
from nano_inference.models.weights import num_bytes, param_table
from nano_inference.ops.backend import Numerics, Ops
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.cpu.build import KernelsUnavailable
from nano_inference.ops.reference import reference_ops
from nano_inference.scheduling.sequence import POLICY, REFERENCE

logger = logging.getLogger("nano_inference")


CACHES: dict[CacheType, type[PagedKVCache | RadixKVCache]] = {"paged": PagedKVCache, "radix": RadixKVCache}


@dataclass(frozen=True)
class EnginePlan:
    """What an engine of some config is made of, before any weight is read."""

    config: EngineConfig
    folders: Mapping[str, Path]  # by weight set
    specs: Mapping[str, ModelSpec]  # by weight set
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    memory_budget: MemoryBudget
    numerics: Numerics


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    folder: Path  # of the policy
    runner: ModelRunner  # with the models, and the KV tensors, by weight set; sets of one shape share
    cache: PagedKVCache | RadixKVCache
    memory_budget: MemoryBudget
    numerics: Numerics


def plan_engine(config: EngineConfig) -> EnginePlan:
    """Read the configurations of a config's models and decide all that follows from them.

    It reads no weights and changes nothing of the process. Raises `ConfigError` or `ModelLoadError`.
    """
    device = _device(config.device)
    folder = resolve_model(config.model_path)
    folders = {POLICY: folder}
    if config.ref_model_path is not None:
        same = config.ref_model_path == config.model_path
        folders[REFERENCE] = folder if same else resolve_model(config.ref_model_path)
    specs = {name: load_spec(each) for name, each in folders.items()}
    _require_same_vocabulary(specs, config)
    dtype = resolve_dtype(config.dtype, specs[POLICY])
    weight_bytes = sum(num_bytes(param_table(spec), dtype) for spec in specs.values())
    budget = plan_memory(config, list(specs.values()), weight_bytes, dtype, device)
    ops = _ops(config, specs, dtype, device, budget.num_blocks)
    return EnginePlan(
        config=config,
        folders=folders,
        specs=specs,
        dtype=dtype,
        device=device,
        ops=ops,
        memory_budget=budget,
        numerics=_numerics(ops, dtype, device),
    )


def assemble(config: EngineConfig) -> Parts:
    """Load everything that a config names. Raises `ConfigError` or `ModelLoadError`."""
    plan = plan_engine(config)
    torch.set_num_threads(_num_threads(config))
    folders, specs, dtype, device, budget = plan.folders, plan.specs, plan.dtype, plan.device, plan.memory_budget
    if config.max_model_len is not None and budget.max_model_len < config.max_model_len:
        logger.warning("max_model_len=%d is lowered to %d.", config.max_model_len, budget.max_model_len)
    logger.info("%s", budget)
    _try_attention(plan)
    params: dict[str, dict[str, Any]] = {}
    for name, each in folders.items():
        frozen_copy = name == REFERENCE and each == folders[POLICY]
        params[name] = (
            {key: param.clone() for key, param in params[POLICY].items()}
            if frozen_copy
            else load_params(each, specs[name], dtype, device, plan.ops.allocate)
        )
    models = {name: Decoder(specs[name], params[name], plan.ops, budget.max_model_len) for name in folders}
    cache = CACHES[config.cache_type](
        budget.num_blocks, config.block_size, layout=budget.layout, num_units=budget.num_units
    )
    units = UnitMap(cache.units, device) if cache.units is not None else None
    by_key = {
        storage_key(spec, budget.layout): KVStorage(spec, budget.num_blocks, config.block_size, dtype, device, units)
        for spec in specs.values()
    }
    return Parts(
        folder=folders[POLICY],
        runner=_runner(plan, models, {name: by_key[storage_key(spec, budget.layout)] for name, spec in specs.items()}),
        cache=cache,
        memory_budget=budget,
        numerics=plan.numerics,
    )


def _require_same_vocabulary(specs: Mapping[str, ModelSpec], config: EngineConfig) -> None:
    sizes = {name: spec.vocab_size for name, spec in specs.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"ref_model_path={config.ref_model_path!r} has a vocabulary of {sizes[REFERENCE]} tokens, the policy "
            f"one of {sizes[POLICY]}; a reference model must have the policy's."
        )


def _ops(
    config: EngineConfig, specs: Mapping[str, ModelSpec], dtype: torch.dtype, device: torch.device, num_blocks: int
) -> Ops:
    if config.attention == "flex":
        from nano_inference.ops.flex import flex_ops  # brings in torch's compiler

        return flex_ops(reference_ops(), num_blocks)
    best: Backend = "cuda" if device.type == "cuda" else "cpu"
    asked = config.backend if config.backend != "auto" else ATTENTION_OF.get(config.attention, "auto")
    backend = best if asked == "auto" else asked
    if backend == "reference":
        return reference_ops()
    problem = _no_kernels_for(backend, specs, dtype, device)
    if problem is None:
        try:
            return _KERNELS[backend](config)
        except KernelsUnavailable as unavailable:
            problem = str(unavailable)
    if asked != "auto":
        raise ConfigError(f"backend={backend!r} is not available: {problem}")
    _warn_of_the_reference(backend, problem)
    return reference_ops()


def _runner(plan: EnginePlan, models: dict[str, Decoder], storages: dict[str, KVStorage]) -> ModelRunner:
    if plan.ops.name != "cuda":
        return ModelRunner(models, storages)
    from nano_inference.engine.cuda_runner import make_runner  # brings in Triton

    return make_runner(plan.config, models, storages, max_model_len=plan.memory_budget.max_model_len)


def _cpu_kernels(config: EngineConfig) -> Ops:
    return cpu_ops(_num_threads(config))


def _cuda_kernels(config: EngineConfig) -> Ops:
    from nano_inference.ops.cuda.backend import cuda_ops  # brings in Triton

    attention = "flashinfer" if config.attention == "flashinfer" else "triton"
    return cuda_ops(batch_invariant=config.batch_invariant is True, attention=attention)


_KERNELS: dict[Backend, Callable[[EngineConfig], Ops]] = {"cpu": _cpu_kernels, "cuda": _cuda_kernels}


@functools.cache  # one warning a process
def _warn_of_the_reference(backend: Backend, problem: str) -> None:
    kernels = backend.upper()
    logger.warning("The reference backend runs, many times slower than the %s kernels: %s", kernels, problem)


def _no_kernels_for(
    backend: Backend, specs: Mapping[str, ModelSpec], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why a backend's kernels cannot run these models, or None."""
    if backend == "cuda":
        return None
    if device.type != "cpu":
        return f"the CPU kernels do not run on {device}."
    if dtype not in (torch.bfloat16, torch.float32):
        return f"{str(dtype).removeprefix('torch.')} has no CPU kernels; bfloat16 and float32 have."
    for spec in specs.values():
        if spec.head_dim % 16 or spec.head_dim > 256:
            return f"head_dim={spec.head_dim} has no CPU kernels; multiples of 16 up to 256 have."
    return None


def _num_threads(config: EngineConfig) -> int:
    return config.num_threads or psutil.cpu_count(logical=False) or torch.get_num_threads()


def _try_attention(plan: EnginePlan) -> None:
    """Find out now, not in the middle of a step, whether the attention that was asked for runs here."""
    if plan.config.attention == "flex":
        from nano_inference.ops.flex import HeadShape, require_flex

        shapes = [
            HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale)
            for spec in plan.specs.values()
        ]
        budget = plan.memory_budget
        require_flex(
            shapes, num_blocks=budget.num_blocks, block_size=budget.block_size, dtype=plan.dtype, device=plan.device
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is not a device; use 'cpu', 'cuda' or 'cuda:N'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} is not available: torch {torch.__version__} sees no CUDA device.")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; use 'cpu', 'cuda' or 'cuda:N'.")
    return device


def _numerics(ops: Ops, dtype: torch.dtype, device: torch.device) -> Numerics:
    return Numerics(
        backend=ops.name,
        version=ops.version,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        torch=torch.__version__,
        # The reference's products are the library's: on a GPU it chooses a kernel by the shape of a whole batch.
        schedule_invariant=ops.schedule_invariant and (ops.name == "cuda" or device.type == "cpu"),
    )
