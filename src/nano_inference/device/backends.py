"""Which device and which operations a config means here: what is available, what is taken instead,
and who is told.
"""

import functools
import logging
import platform
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from nano_inference.checkpoints.loading import resolve_dtype
from nano_inference.config import Backend, EngineConfig
from nano_inference.core.sequence import DRAFT
from nano_inference.errors import ConfigError
from nano_inference.features import ATTENTION_OF, ENGINE_LIMITS, Runs, Setting, require
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.traits import traits_of
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.cpu.build import TILES, KernelsUnavailable, available_instruction_set
from nano_inference.ops.cpu.quantised import MOST_COLUMNS
from nano_inference.ops.cuda import availability
from nano_inference.ops.interface import Numerics, Ops
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.parallel.bounds import SEGMENTS
from nano_inference.system.machine import usable_cores
from nano_inference.system.processor import vendor

logger = logging.getLogger("nano_inference")

Specs = Mapping[str, ModelSpec]
_NONE: Specs = {}
# Builds of the CPU kernels that compute bfloat16 at least as fast as float32, as measured
# (docs/models.md); of neon it was not.
FAST_BF16 = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2")
MakeOps = Callable[[int], Ops]  # of the number of blocks, which flex attention is made for


def choose_device(name: str) -> torch.device:
    """The device of this name. Raises `ConfigError`, with torch's reason where it sees no CUDA
    device.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if availability.has_nvidia_device():
            _warn_once(f"The CPU is used although there is a GPU: {availability.why_no_cuda()}")
        return torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={name!r} is not available: {availability.why_no_cuda()}")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device={name!r} is not available: the last of {count} is 'cuda:{count - 1}'."
            )
    return device


def choose_ops(
    config: EngineConfig,
    specs: Specs,
    dtype: torch.dtype,
    device: torch.device,
) -> MakeOps:
    """The operations that a config means.

    A backend that was asked for by name and is not available raises `ConfigError`; in the place of
    what `"auto"` would take there is the reference, and a warning.
    """
    for spec in specs.values():
        require(ENGINE_LIMITS, Setting(config, **traits_of(spec)))
    if config.attention == "flex":
        require(ENGINE_LIMITS, Setting(config, runs=Runs("reference", str(device))))
        from nano_inference.ops.flex import flex_ops  # brings in torch's compiler

        return functools.partial(flex_ops, reference_ops())
    best = _best_backend(config, device)
    asked: Backend = config.backend
    if asked == "auto" and config.attention != "auto":
        asked = ATTENTION_OF[config.attention]
    backend = best if asked == "auto" else asked
    require(ENGINE_LIMITS, Setting(config, runs=Runs(backend, str(device))))
    ops, problem = reference_ops(), None
    if backend != "reference":
        problem = _no_kernels_for(backend, config, specs, dtype, device)
        if problem is None:
            try:
                ops = _KERNELS[backend](config)
            except KernelsUnavailable as unavailable:
                problem = str(unavailable)
    if problem is not None:
        if asked != "auto":
            raise ConfigError(f"backend={backend!r} is not available: {problem}")
        _warn_once(
            f"The reference backend runs, many times slower than the {backend.upper()} kernels: "
            f"{problem}"
        )
    require(ENGINE_LIMITS, Setting(config, runs=Runs(ops.name, str(device))))
    return lambda num_blocks: ops


def choose_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The dtype that a config means for a model on this machine.

    `"auto"` is the checkpoint's, but bfloat16 on a CPU whose kernels compute it at least as fast as
    float32: in the place of float16, which has no kernels there, and for the numbers of a `.gguf`
    file, which has no dtype; and bfloat16 with quantised weights, whose products do not depend on
    it.
    """
    if config.dtype != "auto":
        return resolve_dtype(config.dtype, spec)
    if config.codes is not None:
        return torch.bfloat16
    gains = bf16_gains(config, device)
    found = resolve_dtype("auto", spec, bf16_gains=gains)
    if found != torch.float16 or not gains:
        return found
    _tell_once(
        "The checkpoint's float16 has no CPU kernels: its weights are rounded to bfloat16; "
        "dtype='float32' keeps every digit in twice the memory."
    )
    return torch.bfloat16


def bf16_gains(config: EngineConfig, device: torch.device) -> bool:
    """Whether the CPU kernels run, in a build that computes bfloat16 at least as fast as
    float32.
    """
    if device.type != "cpu" or not wants_cpu_kernels(config):
        return False
    return (available_instruction_set() or "").removesuffix(TILES) in FAST_BF16


def wants_cpu_kernels(config: EngineConfig) -> bool:
    """Whether nothing in a config asks for operations other than the CPU kernels."""
    own = ("auto", "cpu")
    return config.backend in own and config.attention in own


def _best_backend(config: EngineConfig, device: torch.device) -> Backend:
    if device.type == "cpu":
        return "cpu"
    # no kernel there computes attention in part
    return "cuda" if config.context_parallel == 1 else "reference"


def keeps_invariance(ops: Ops, device: torch.device) -> bool:
    """Whether a row's bits depend on its own context alone."""
    # The reference's products are the library's: on a GPU it chooses a kernel by the shape of a
    # whole batch.
    return ops.schedule_invariant and (ops.name == "cuda" or device.type == "cpu")


def captures_graphs(config: EngineConfig) -> bool:
    """Whether decode steps are captured on a GPU. Ranks that exchange rows with experts find out
    on the host how many rows go where, which no graph can hold.
    """
    return config.cuda_graphs and config.expert_parallel == 1


def numerics_of(
    config: EngineConfig, ops: Ops, dtype: torch.dtype, device: torch.device, specs: Specs = _NONE
) -> Numerics:
    """What decides the bits of these operations."""
    invariant, backend, kind = keeps_invariance(ops, device), ops.name, device.type
    if backend == "cuda":  # other kernels, other bits
        backend += "-invariant" if invariant else ""
    if kind == "cuda":  # products add up as the instructions of a generation do
        kind += "-sm{}{}".format(*torch.cuda.get_device_capability(device))
    # Tables of rotary embeddings are made by the CPU, by torch, with the same bits with these two.
    vectors = torch.backends.cpu.get_cpu_capability()
    if vectors not in ("AVX2", "AVX512"):
        kind += f"-{platform.machine()}-{vectors}".lower().replace(" ", "-")
    elif backend == "reference" and device.type == "cpu":  # MKL has code for each of these
        kind += f"-{vendor()}-{vectors}".lower()
    return Numerics(
        backend=backend,
        version=ops.version,
        dtype=str(dtype).removeprefix("torch."),
        device=kind,
        torch=torch.__version__,
        schedule_invariant=invariant,
        tensor_parallel=1
        if ops.in_segments and config.tensor_parallel <= SEGMENTS
        else config.tensor_parallel,
        state_tokens=config.block_size if any(map(_by_block, specs.values())) else 0,
        quantization=config.codes,
        kv_cache=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        sums="tiles" if ops.sums == "tiles" and dtype == torch.bfloat16 else None,
    )


def _by_block(spec: ModelSpec) -> bool:
    return spec.state is not None and spec.state.by_block


def start_up_line(
    config: EngineConfig, ops: Ops, numerics: Numerics, device: torch.device, graphs: bool
) -> str:
    """What runs, in a line of the log."""
    own = "triton" if ops.name == "cuda" else ops.name
    attention = config.attention if config.attention != "auto" else own
    where = str(device)
    if device.type == "cuda":
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
    config: EngineConfig, specs: Specs, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Find out now, not in the middle of a step, whether the attention that was asked for runs
    here.
    """
    if config.attention == "flex":
        from nano_inference.ops.flex import HeadShape, require_flex

        shapes = [
            HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale)
            for spec in specs.values()
        ]
        require_flex(
            shapes, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, device=device
        )


def lookahead_of(config: EngineConfig, device: torch.device) -> int:
    """Steps that are planned before the last one's tokens are known."""
    if config.pipeline_parallel > 1:
        return config.pipeline_parallel - 1
    return config.lookahead if config.lookahead is not None else int(device.type == "cuda")


MOST_HEAD_DIM = 576  # of the CPU kernels: MAX_HEAD_DIM of kernels/attention.h
MOST_THREADS = 64  # or as many as there are cores: a process cannot be sure to get more


def num_threads(config: EngineConfig) -> int:
    """Threads of the CPU kernels and of torch. Raises ConfigError for more than this machine has
    any use for.
    """
    most = max(MOST_THREADS, psutil.cpu_count() or 1)
    if config.num_threads is not None and config.num_threads > most:
        raise ConfigError(
            f"num_threads={config.num_threads} is too many for this machine; {usable_cores()} "
            "would do."
        )
    return config.num_threads or usable_cores()


def _cpu_kernels(config: EngineConfig) -> Ops:
    return cpu_ops(num_threads(config), sums=None if config.cpu_sums == "auto" else config.cpu_sums)


def _cuda_kernels(config: EngineConfig) -> Ops:
    from nano_inference.ops.cuda.backend import cuda_ops  # brings in Triton

    return cuda_ops(batch_invariant=config.batch_invariant is True)


_KERNELS: dict[Backend, Callable[[EngineConfig], Ops]] = {
    "cpu": _cpu_kernels,
    "cuda": _cuda_kernels,
}


@functools.cache  # one line a process
def _tell_once(text: str) -> None:
    logger.info("%s", text)


@functools.cache  # one warning a process
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def require_drafting(
    config: EngineConfig, ops: Ops, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise `ConfigError` unless a model that drafts runs on the operations of the policy, which
    stay what they are without it.
    """
    require(ENGINE_LIMITS, Setting(config, **traits_of(spec)))
    backend: Any = ops.name
    if backend in _KERNELS:
        problem = _no_kernels_for(backend, config, {DRAFT: spec}, dtype, device)
        if problem is not None:
            raise ConfigError(
                f"draft_model={config.draft_model!r} cannot run beside the policy: {problem}"
            )


def _expert_sizes(spec: ModelSpec) -> list[int]:
    """The inner sizes of a model's experts."""
    if spec.moe is None:
        return []
    shared = [] if spec.moe.shared is None else [spec.moe.shared.intermediate_size]
    return [spec.moe.intermediate_size, *shared]


def _no_kernels_for(
    backend: Backend, config: EngineConfig, specs: Specs, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why a backend's kernels cannot run these models, or None."""
    if backend == "cuda":
        for spec in specs.values():
            if spec.latent is not None:
                return f"the attention over latents of {spec.architecture} has no CUDA kernels."
            if spec.kinds:
                return f"the layers of several kinds of {spec.architecture} have no CUDA kernels."
            if spec.state is not None:
                return f"{spec.architecture} has layers with a state, which have no kernels there."
        head_dims = [spec.head_dim for spec in specs.values()]
        return availability.problem_with(device, dtype, head_dims)
    return no_cpu_kernels_for(config, specs, dtype, device)


def no_cpu_kernels_for(
    config: EngineConfig, specs: Specs, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the CPU kernels cannot run these models, or None."""
    if device.type != "cpu":
        return f"the CPU kernels do not run on {device}."
    if dtype not in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        return f"{name} has no CPU kernels; use dtype='bfloat16' or 'float32'."
    for spec in specs.values() if config.codes is not None else ():
        widest = max(param.shape[1] for param in param_table(spec) if param.codes is not None)
        if widest > MOST_COLUMNS:
            return f"{widest} columns in codes have no CPU kernels; at most {MOST_COLUMNS} have."
    return next(filter(None, map(_width_without_kernels, specs.values())), None)


def _width_without_kernels(spec: ModelSpec) -> str | None:
    """Why the CPU kernels cannot run a model, or None."""
    if spec.state is not None and any(size % 16 for size in spec.state.widths):
        return f"{spec.state} has no CPU kernels; widths that are multiples of 16 have."
    if spec.latent is not None and (spec.latent.sizes.rank % 16 or spec.latent.sizes.value % 16):
        return f"{spec.latent.sizes} has no CPU kernels; ranks and values of multiples of 16 have."
    for size in [kind.head_dim for kind in spec.kinds] or [spec.head_dim]:
        if size % 16 or size > MOST_HEAD_DIM:
            most = MOST_HEAD_DIM
            return f"head_dim={size} has no CPU kernels; multiples of 16 up to {most} have."
    for inner in _expert_sizes(spec):
        if spec.hidden_size % 16 or inner % 16:
            sizes = f"{spec.hidden_size} x {inner}"
            return f"experts of {sizes} have no CPU kernels; multiples of 16 have."
    return None
