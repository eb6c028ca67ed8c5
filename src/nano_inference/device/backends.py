"""Choice of device, dtype and operations for a config: availability checks, fallbacks, warnings."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from nano_inference.arrays import HOST, Device, Dtype, dtype_for, dtype_name
from nano_inference.checkpoints.loading import resolve_dtype
from nano_inference.config import Backend, EngineConfig
from nano_inference.core.sequence import DRAFT
from nano_inference.errors import ConfigError
from nano_inference.features import ATTENTION_OF, ENGINE_LIMITS, Runs, Setting, require
from nano_inference.models.parameters.experts import has_blocks
from nano_inference.models.parameters.storage import num_bytes
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.states import DeltaNet
from nano_inference.models.spec.traits import traits_of
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.cpu.build import TILES, KernelsUnavailable, available_instruction_set
from nano_inference.ops.cpu.quantised import MOST_COLUMNS
from nano_inference.ops.cuda import availability
from nano_inference.ops.formats import FILE
from nano_inference.ops.interface import Numerics, Ops
from nano_inference.parallel.bounds import SEGMENTS
from nano_inference.system.machine import usable_cores
from nano_inference.system.processor import vendor

logger = logging.getLogger("nano_inference")

Specs = Mapping[str, ModelSpec]
_NONE: Specs = {}
# Builds of the CPU kernels that compute bfloat16 at least as fast as float32. Measurements are in
# docs/models.md. The neon build was not measured.
FAST_BF16 = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2")
LEAST = 32 << 20  # bytes of weights: smaller models stay in the processor's caches in any format
MakeOps = Callable[[int], Ops]  # argument: number of blocks, which flex attention compiles for


def device_of(config: EngineConfig) -> Device:
    """Return an engine's device: `HOST` if one rank runs the CPU kernels, otherwise torch's device.

    `HOST` needs no torch. `in_kind_of_ops` corrects it if the kernels cannot run the models.

    Raises `ConfigError` as `choose_device` does.
    """
    return HOST if _runs_on_host(config) else choose_device(config.device)


def _runs_on_host(config: EngineConfig) -> bool:
    ranks = config.tensor_parallel * config.pipeline_parallel
    ranks *= config.context_parallel * config.expert_parallel
    if ranks > 1 or not wants_cpu_kernels(config):
        return False
    if available_instruction_set() is None and _has_torch():
        return False  # the reference backend runs instead
    finds_none = config.device == "auto" and not (
        availability.has_nvidia_device() and _finds_cuda()
    )
    return config.device.startswith("cpu") or finds_none


def _finds_cuda() -> bool:
    """Return True if torch finds a GPU. Log the reason if it does not use an existing one."""
    reason = (
        "the CUDA kernels need torch, which is not installed; pip install 'nano-inference[gpu]'."
    )
    if _has_torch():
        import torch

        if torch.cuda.is_available():
            return True
        reason = availability.why_no_cuda()
    if availability.has_nvidia_device():
        _warn_once(f"Using the CPU although there is a GPU: {reason}")
    return False


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def choose_device(name: str) -> Device:
    """Return torch's device of this name.

    Raise `ConfigError` without torch or, with torch's reason, without CUDA.
    """
    torch = require_torch(extra="gpu" if name.startswith("cuda") else "train")
    if name == "auto":
        return torch.device("cuda" if _finds_cuda() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={name!r} is not available: {availability.why_no_cuda()}")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device={name!r} does not exist: the last of {count} is 'cuda:{count - 1}'."
            )
    return device


def require_torch(what: str = "this engine", extra: str = "train") -> Any:
    """Return the module torch. Raise `ConfigError` if it is not installed. `what` needs it, and
    the extra `extra` brings it.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise ConfigError(
            f"{what} needs torch, which is not installed: only the CPU kernels on one rank run "
            f"without it; pip install 'nano-inference[{extra}]'."
        ) from None
    return torch


def choose_ops(
    config: EngineConfig,
    specs: Specs,
    dtype: Dtype,
    device: Device,
) -> MakeOps:
    """Return a factory for the operations that a config selects.

    An unavailable backend raises `ConfigError` if the config names it. `"auto"` falls back to the
    reference with a warning.
    """
    for spec in specs.values():
        require(ENGINE_LIMITS, Setting(config, **traits_of(spec)))
    if config.attention == "flex":
        require(ENGINE_LIMITS, Setting(config, runs=Runs("reference", str(device))))
        from nano_inference.ops.flex import flex_ops  # brings in torch's compiler

        return functools.partial(flex_ops, _reference())
    best = _best_backend(config, device)
    asked: Backend = config.backend
    if asked == "auto" and config.attention != "auto":
        asked = ATTENTION_OF[config.attention]
    backend = best if asked == "auto" else asked
    require(ENGINE_LIMITS, Setting(config, runs=Runs(backend, str(device))))
    ops, problem = None, None
    if backend != "reference":
        problem = _no_kernels_for(backend, config, specs, dtype, device)
        if problem is None:
            try:
                ops = _KERNELS[backend](config)
            except KernelsUnavailable as unavailable:
                problem = str(unavailable)
    if problem is not None:
        if asked != "auto" or not _has_torch():
            raise ConfigError(f"backend={backend!r} is not available: {problem}")
        _warn_once(
            f"Using the reference backend, many times slower than the {backend.upper()} kernels: "
            f"{problem}"
        )
    ops = ops or _reference()
    require(ENGINE_LIMITS, Setting(config, runs=Runs(ops.name, str(device))))
    return lambda num_blocks: ops


def _reference() -> Ops:
    require_torch()
    from nano_inference.ops.reference.backend import reference_ops

    return reference_ops()


def in_kind_of_ops(ops: Ops, dtype: Dtype, device: Device) -> tuple[Dtype, Device]:
    """Return torch's dtype and device if the operations compute with tensors.

    An engine that `device_of` plans for `HOST` falls back to them if the CPU kernels cannot run its
    models.
    """
    if device is not HOST or ops.name == "cpu":
        return dtype, device
    cpu = require_torch().device("cpu")
    return dtype_for(cpu, dtype), cpu


def choose_dtype(config: EngineConfig, spec: ModelSpec, device: Device) -> Dtype:
    """Return the dtype of a model's weights and activations on this machine.

    `"auto"` is the result of `resolve_dtype` with two exceptions. Quantized weights use bfloat16,
    since their products do not depend on the dtype. If the CPU kernels run, bfloat16 replaces
    float16, which they do not support. `"fast"` also replaces float32 if bfloat16 gains.
    """
    if config.names_dtype:
        return dtype_for(device, config.dtype)
    if config.codes is not None:
        return dtype_for(device, "bfloat16")
    gains = bf16_gains(config, device)
    name = dtype_name(resolve_dtype("auto", spec, bf16_gains=gains, device=device))
    if name == "float32" and config.dtype == "fast" and gains and _is_large(spec, device):
        _tell_once(
            "Rounding the float32 checkpoint to bfloat16, which decodes about twice as fast in "
            "half the memory. dtype='float32' keeps full precision."
        )
        return dtype_for(device, "bfloat16")
    if name != "float16" or _cpu_build(config, device) is None:
        return dtype_for(device, name)
    _tell_once(
        "The CPU kernels do not support the checkpoint's float16: rounding weights to bfloat16. "
        "dtype='float32' keeps full precision in twice the memory."
    )
    return dtype_for(device, "bfloat16")


def _is_large(spec: ModelSpec, device: Device) -> bool:
    """Return True if the float32 weights of a model exceed the processor's caches."""
    return num_bytes(param_table(spec), dtype_for(device, "float32")) >= LEAST


def bf16_gains(config: EngineConfig, device: Device) -> bool:
    """Return True if the CPU kernels run and bfloat16 is at least as fast as float32."""
    build = _cpu_build(config, device)
    return build is not None and build.removesuffix(TILES) in FAST_BF16


def _cpu_build(config: EngineConfig, device: Device) -> str | None:
    """Return the build of the CPU kernels that a config can use, or None."""
    if device.type != "cpu" or not wants_cpu_kernels(config):
        return None
    return available_instruction_set()


def wants_cpu_kernels(config: EngineConfig) -> bool:
    """Return True if no option in a config excludes the CPU kernels."""
    allowed = ("auto", "cpu")
    return config.backend in allowed and config.attention in allowed


def _best_backend(config: EngineConfig, device: Device) -> Backend:
    if device.type == "cpu":
        return "cpu"
    # the CUDA kernels cannot compute partial attention
    return "cuda" if config.context_parallel == 1 else "reference"


def keeps_invariance(ops: Ops, device: Device) -> bool:
    """Return True if a row's bits depend only on its own context."""
    # The reference multiplies with torch, whose GPU library chooses a kernel by the batch's shape.
    return ops.schedule_invariant and (ops.name == "cuda" or device.type == "cpu")


def captures_graphs(config: EngineConfig, policy: ModelSpec) -> bool:
    """Return True if steps are captured as CUDA graphs.

    Sums over tensor ranks are captured: NCCL queues them like kernels, and all ranks compute the
    same steps. Messages between stages stay outside (`CapturedStage`). Graphs cannot contain the
    exchange of experts' rows, whose numbers the host reads in each step.
    """
    spreads_experts = config.expert_parallel > 1 or (
        config.tensor_parallel > 1 and policy.moe is not None
    )
    return config.cuda_graphs and not spreads_experts


def numerics_of(
    config: EngineConfig, ops: Ops, dtype: Dtype, device: Device, specs: Specs = _NONE
) -> Numerics:
    """Return the numerics fingerprint of these operations."""
    invariant, backend = keeps_invariance(ops, device), ops.name
    if backend == "cuda":  # the two modes use kernels that round differently
        backend += "-invariant" if invariant else ""
    # the CPU kernels compute the same bits on every processor
    kind, version = ("cpu", None) if backend == "cpu" else _of_torch(device)
    return Numerics(
        backend=backend,
        version=ops.version,
        dtype=dtype_name(dtype),
        device=kind,
        torch=version,
        schedule_invariant=invariant,
        tensor_parallel=1
        if ops.in_segments and config.tensor_parallel <= SEGMENTS
        else config.tensor_parallel,
        state_tokens=config.block_size if any(map(_by_block, specs.values())) else 0,
        quantization=config.codes,
        kv_cache=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        sums="tiles" if ops.sums == "tiles" and dtype_name(dtype) == "bfloat16" else None,
    )


def _of_torch(device: Device) -> tuple[str, str]:
    """Return the kind of device, as far as it decides torch's bits, and the version of torch."""
    import torch

    if device.type == "cuda":  # summation order depends on the GPU generation's instructions
        kind = "sm{}{}".format(*torch.cuda.get_device_capability(device))
    else:  # MKL's code differs for each of these
        kind = f"{vendor()}-{torch.backends.cpu.get_cpu_capability()}".lower().replace(" ", "-")
    return f"{device.type}-{kind}", torch.__version__


def _by_block(spec: ModelSpec) -> bool:
    return spec.state is not None and spec.state.by_block


def start_up_line(
    config: EngineConfig, ops: Ops, numerics: Numerics, device: Device, graphs: bool
) -> str:
    """Return the log line that describes backend, device and dtype."""
    kernels = "triton" if ops.name == "cuda" else ops.name
    attention = config.attention if config.attention != "auto" else kernels
    where = str(device)
    if device.type == "cuda":
        import torch

        where += f" ({torch.cuda.get_device_name(device)})"
    invariant = "batch invariant" if numerics.schedule_invariant else "not batch invariant"
    dtype = numerics.dtype
    if config.codes is not None:
        dtype += f", weights {config.codes}"
    if config.kv_cache_dtype != "auto":
        dtype += f", KV cache {config.kv_cache_dtype}"
    parts = [f"attention {attention}", where, dtype, invariant]
    if device.type == "cuda":
        parts.append("CUDA graphs" if graphs else "no CUDA graphs")
    return f"backend {ops.name} (version {ops.version}), {', '.join(parts)}"


def try_attention(
    config: EngineConfig, specs: Specs, num_blocks: int, dtype: Dtype, device: Device
) -> None:
    """Compile the configured attention at start-up, so that failures do not occur in a step."""
    if config.attention == "flex":
        from nano_inference.ops.flex import HeadShape, require_flex

        shapes = [
            HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale)
            for spec in specs.values()
        ]
        require_flex(
            shapes, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, device=device
        )


def lookahead_of(config: EngineConfig, device: Device) -> int:
    """Return how many steps are launched before the last one's tokens are known."""
    if config.pipeline_parallel > 1:
        return config.pipeline_parallel - 1
    return config.lookahead if config.lookahead is not None else int(device.type == "cuda")


MOST_HEAD_DIM = 576  # limit of the CPU kernels: MAX_HEAD_DIM in kernels/attention.h
MOST_THREADS = 64  # or the number of cores if larger: more threads may fail to start


def num_threads(config: EngineConfig) -> int:
    """Return the number of threads of the operations.

    Raise `ConfigError` if too many.
    """
    most = max(MOST_THREADS, psutil.cpu_count() or 1)
    if config.num_threads is not None and config.num_threads > most:
        raise ConfigError(
            f"num_threads={config.num_threads} exceeds this machine's limit ({most}); use "
            f"{usable_cores()}."
        )
    return config.num_threads or usable_cores()


def _cpu_kernels(config: EngineConfig) -> Ops:
    return cpu_ops(num_threads(config), sums=None if config.cpu_sums == "auto" else config.cpu_sums)


def _cuda_kernels(config: EngineConfig) -> Ops:
    from nano_inference.ops.cuda.backend import cuda_ops  # brings in Triton

    return cuda_ops(batch_invariant=config.batch_invariant is True, overlaps=config.cuda_overlap)


_KERNELS: dict[Backend, Callable[[EngineConfig], Ops]] = {
    "cpu": _cpu_kernels,
    "cuda": _cuda_kernels,
}


@functools.cache  # one log line per process
def _tell_once(text: str) -> None:
    logger.info("%s", text)


@functools.cache  # one warning per process
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def require_drafting(
    config: EngineConfig, ops: Ops, spec: ModelSpec, dtype: Dtype, device: Device
) -> None:
    """Raise `ConfigError` if a draft model cannot run on the policy's operations.

    The draft model does not change the choice of operations.
    """
    require(ENGINE_LIMITS, Setting(config, **traits_of(spec)))
    backend: Any = ops.name
    if backend in _KERNELS:
        problem = _no_kernels_for(backend, config, {DRAFT: spec}, dtype, device)
        if problem is not None:
            raise ConfigError(
                f"draft_model={config.draft_model!r} cannot run with this policy: {problem}"
            )


def _expert_sizes(spec: ModelSpec) -> list[int]:
    """Return the inner sizes of a model's experts."""
    if spec.moe is None:
        return []
    shared = [] if spec.moe.shared is None else [spec.moe.shared.intermediate_size]
    return [spec.moe.intermediate_size, *shared]


def _head_dims(spec: ModelSpec) -> list[int]:
    """Return the numbers per head of a model's kinds of layers."""
    return [kind.head_dim for kind in spec.kinds] or [spec.head_dim]


def _no_kernels_for(
    backend: Backend, config: EngineConfig, specs: Specs, dtype: Dtype, device: Device
) -> str | None:
    """Return the reason why a backend's kernels cannot run these models, or None."""
    if backend == "cuda":
        gap = "the CUDA kernels do not support"
        for spec in specs.values():
            if spec.moe is not None and config.codes == "fp8":
                return f"{gap} experts in FP8 ({spec.architecture}); use quantization='int8'."
            if config.codes == FILE and spec.quantisation is not None and not has_blocks(spec):
                said = f"{spec.quantisation}; omit quantization"
                return f"{gap} codes other than experts in MXFP4 ({said})."
            if spec.latent is not None:
                problem = availability.problem_with_latents(spec.latent.sizes)
                if problem is not None:
                    return problem
        plain = [spec for spec in specs.values() if spec.latent is None]
        head_dims = [size for spec in plain for size in _head_dims(spec)]
        problem = availability.problem_with(device, dtype, head_dims)
        for state in (spec.state for spec in specs.values()):
            if problem is None and isinstance(state, DeltaNet):
                sizes = state.key_dim, state.value_dim
                problem = availability.problem_with_delta_rule(sizes, config.block_size)
        if problem is None and config.cuda_overlap:
            problem = availability.problem_with_overlap(device)
        return problem
    return no_cpu_kernels_for(config, specs, dtype, device)


def no_cpu_kernels_for(
    config: EngineConfig, specs: Specs, dtype: Dtype, device: Device
) -> str | None:
    """Return the reason why the CPU kernels cannot run these models, or None."""
    if device.type != "cpu":
        return f"the CPU kernels do not run on {device}."
    if (name := dtype_name(dtype)) not in ("bfloat16", "float32"):
        return f"the CPU kernels do not support {name}; use dtype='bfloat16' or 'float32'."
    for spec in specs.values() if config.codes is not None else ():
        widest = max(param.shape[1] for param in param_table(spec) if param.codes is not None)
        if widest > MOST_COLUMNS:
            return (
                f"the CPU kernels support at most {MOST_COLUMNS} columns in a quantized matrix; "
                f"this model has {widest}."
            )
    return next(filter(None, map(_width_without_kernels, specs.values())), None)


def _width_without_kernels(spec: ModelSpec) -> str | None:
    """Return the reason why the CPU kernels cannot run a model with these widths, or None."""
    if spec.state is not None and any(size % 16 for size in spec.state.widths):
        return f"the CPU kernels need state widths that are multiples of 16; got {spec.state}."
    if spec.latent is not None and (spec.latent.sizes.rank % 16 or spec.latent.sizes.value % 16):
        return (
            "the CPU kernels need latent ranks and values that are multiples of 16; "
            f"got {spec.latent.sizes}."
        )
    for size in _head_dims(spec):
        if size % 16 or size > MOST_HEAD_DIM:
            most = MOST_HEAD_DIM
            return f"the CPU kernels need head_dim in multiples of 16 up to {most}; got {size}."
    for inner in _expert_sizes(spec):
        if spec.hidden_size % 16 or inner % 16:
            sizes = f"{spec.hidden_size} x {inner}"
            return f"the CPU kernels need expert sizes in multiples of 16; got {sizes}."
    return None
